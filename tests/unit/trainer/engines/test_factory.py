"""Which engines a recipe gets, what is refused, and how cores and GPUs are shared."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.config import Config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import weight_quantization
from trimtab.trainer.engines.factory import build_engine, split_devices, split_threads
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.load import default_device

SERVER = {"type": "server", "server": {"urls": ["http://127.0.0.1:1"]}}


def config(engine: dict, **trainer: int) -> Config:
    return Config.model_validate({"engine": engine, "trainer": trainer})


@pytest.mark.parametrize(
    ("engine", "trainer", "count"),
    [
        ({}, {}, 0),
        ({}, {"max_lag": 2}, 1),
        ({"workers": 0}, {"max_lag": 2}, 0),
        ({"workers": 2}, {}, 2),
        ({"workers": 3}, {"max_lag": 2}, 3),
        ({"type": "vllm"}, {"max_lag": 2}, 1),
        (SERVER, {"max_lag": 2}, 0),
    ],
)
def test_processes_of_their_own(engine: dict, trainer: dict, count: int) -> None:
    assert config(engine, **trainer).engine_processes == count


@pytest.mark.parametrize(
    ("cores", "workers", "beside", "shares"),
    [
        (2, 1, False, (2, 2)),
        (8, 3, False, (8, 2)),
        (2, 3, False, (2, 1)),
        (8, 2, True, (4, 2)),
    ],
)
def test_shares_of_the_cores(cores: int, workers: int, beside: bool, shares: tuple[int, int]) -> None:
    assert split_threads(cores, workers, is_async=beside) == shares


@given(st.integers(1, 200), st.integers(1, 50))
def test_no_core_is_idle_and_none_is_shared_where_there_are_enough(cores: int, workers: int) -> None:
    own, each = split_threads(cores, workers, is_async=True)
    assert own >= each >= 1
    assert own + workers * each == max(cores, workers + 1)


def test_shares_of_the_gpus() -> None:
    assert split_devices([""], 1, 2, 1) == [None, None]
    assert split_devices(["0"], 1, 2, 1) == [None, None]
    assert split_devices(["0", "1", "2"], 1, 2, 1) == ["1", "2"]
    assert split_devices(["4", "5", "6", "7"], 2, 1, 2) == ["6,7"]
    with pytest.raises(TrimtabError, match="need 6 GPUs, 4 are visible"):
        split_devices(["4", "5", "6", "7"], 2, 2, 2)


def sent(value: Any) -> Any:
    """What arrives in another process."""
    return ForkingPickler.loads(ForkingPickler.dumps(value))  # pyright: ignore[reportAttributeAccessIssue]


def test_an_engine_elsewhere_is_built_from_the_recipe_and_the_files_of_the_model(tmp_path: Path) -> None:
    recipe = config({"quantize": "int3", "noise": 0.1, "dtype": "bfloat16"})
    vllm = config({"type": "vllm", "vllm": {"memory": 1, "context": 512, "quantization": "fp8"}})
    assert sent(vllm) == vllm
    save_model_files(*laboratory.build(0), tmp_path / "model")
    model, tokenizer = laboratory.build(0)
    engine = build_engine(sent(recipe), tmp_path / "model")
    own = EmbeddedEngine(model.to(default_device()), tokenizer, quantization=weight_quantization(recipe))
    for one in (engine, own):
        one.update_weights(laboratory.build(1)[0].named_parameters(), version=3)
    for (name, weight), (twin, other) in zip(engine.named_weights(), own.named_weights(), strict=True):
        assert name == twin
        assert torch.equal(weight, other)
