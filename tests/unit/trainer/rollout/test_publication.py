"""Weights that did not arrive are given once more, by what the engine says that it has and by the canary."""

from __future__ import annotations

import copy
from typing import Any
from zlib import crc32

import pytest
import torch
from tests.support.faulty_engines import LosesWeights

from trimtab.errors import EngineDeadError
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import WeightQuantization
from trimtab.trainer.engines.weight_transfer import SUMMED_VALUES, SUMMED_WEIGHTS, checksum
from trimtab.trainer.models import laboratory
from trimtab.trainer.rollout.canary import Canary
from trimtab.trainer.rollout.source import publish

MODEL, TOKENIZER = laboratory.build(seed=0)


def engine(first: int = 1, *, bits: int | None = None, noise: float = 0.0, **kind: bool) -> Any:
    """An embedded engine that loses version `first` and, with `for_good`, all later ones."""
    return LosesWeights(EmbeddedEngine(MODEL, TOKENIZER, quantization=WeightQuantization(bits, noise)), first, **kind)


def changed(size: float) -> Any:
    """The model with every weight changed by at most `size` of its largest one."""
    model, generator = copy.deepcopy(MODEL), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * weight.abs().max() * (2 * torch.rand(weight.shape, generator=generator) - 1))
    return model


def twice(sampler: Any, model: Any, canary: Canary | None = None) -> list[str]:
    """Publishes the first weights, then those of `model`; returns why these were published again."""
    publish(sampler, list(MODEL.named_parameters()), 0, canary, canary and canary.predict(MODEL, 0))
    expected = canary and canary.predict(model, 1)
    return publish(sampler, list(model.named_parameters()), 1, canary, expected).republished


@pytest.mark.parametrize(("bits", "noise"), [(None, 0.0), (4, 0.0), (None, 0.3)])
def test_a_small_update_that_is_lost_is_seen_at_once_and_repeated(bits: int | None, noise: float) -> None:
    sampler = engine(bits=bits, noise=noise)
    (line,) = twice(sampler, changed(1e-3))
    assert "is not that of version 1: the publication did not reach it" in line
    assert line.endswith("published the weights again")
    assert sampler.updates == 3
    healthy = engine(9, bits=bits, noise=noise)
    assert twice(healthy, changed(1e-3)) == []
    assert healthy.updates == 2


def test_an_engine_that_does_not_say_what_it_has_is_checked_by_the_canary() -> None:
    canary = Canary.build(load_config("laboratory", ["engine.canary.every=1"]), TOKENIZER, MODEL)
    silent = engine(says=False)
    (line,) = twice(silent, changed(0.5), canary)
    assert line.startswith("canary: ")
    assert silent.updates == 3
    silent = engine(says=False)
    assert twice(silent, changed(0.5)) == []
    assert silent.updates == 2


def test_an_engine_that_died_is_not_given_weights_again() -> None:
    def dies() -> Any:
        raise EngineDeadError("gone")

    sampler = engine(9)
    sampler.weight_checksums = dies
    with pytest.raises(EngineDeadError):
        twice(sampler, MODEL)
    assert sampler.updates == 1


def test_checksums_are_those_of_a_few_weights_that_are_used_as_published() -> None:
    exact, coarse = engine().weight_checksums(), engine(bits=4).weight_checksums()
    assert len(exact) == SUMMED_WEIGHTS
    assert coarse.keys() != exact.keys(), "rounded matrices are left out"
    for name, (dtype, found) in (*exact.items(), *coarse.items()):
        assert dtype == torch.bfloat16
        assert found == checksum(MODEL.get_parameter(name).bfloat16(), dtype)


def test_a_checksum_is_of_evenly_spaced_values_in_a_dtype() -> None:
    long = torch.arange(3.0 * SUMMED_VALUES + 1)
    assert checksum(long, torch.float32) == crc32(long[::4].numpy().tobytes())
    assert checksum(long.view(1, -1), torch.float32) == checksum(long, torch.float32)
    assert checksum(torch.tensor([1.0, 1.0 + 2**-20]), torch.bfloat16) == checksum(torch.ones(2), torch.bfloat16)
    assert checksum(torch.tensor([1.0, 1.0 + 2**-20]), torch.float32) != checksum(torch.ones(2), torch.float32)
    assert checksum(torch.zeros(0), torch.float32) == 0
