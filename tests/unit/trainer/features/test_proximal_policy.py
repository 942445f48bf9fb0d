"""Snapshots of the weights, and which of them score a token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.trajectories import trajectory
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.objectives.lookup import from_section
from trimtab.trainer.batch_preparation import _pack  # pyright: ignore[reportPrivateUsage]
from trimtab.trainer.config import load_config
from trimtab.trainer.features import build_features
from trimtab.trainer.features.proximal_policy import Snapshots
from trimtab.trainer.learner import Learner
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.optim import build_optimizer
from trimtab.trainer.packing import MicroBatch
from trimtab.trainer.ranks import current_ranks
from trimtab.types import EXTERNAL_VERSION, Trajectory

MODEL, _ = laboratory.build(0)


def learner(*overrides: str) -> Learner:
    sets = ["trainer.proximal=snapshot", "trainer.max_lag=2", "trainer.micro_batch_tokens=24", *overrides]
    config, model = load_config("laboratory", sets), copy.deepcopy(MODEL)
    built = from_section(config.objective.model_dump())
    features = list(build_features(config, model, built, None, current_ranks(), lambda _: None))
    optimizer = build_optimizer(model.parameters(), config.optim)
    return Learner(config, model, optimizer, built, total_updates=9, features=features)


def snapshots(of: Learner) -> Snapshots:
    return next(feature for feature in of.features if isinstance(feature, Snapshots))


def train_and_publish(of: Learner, versions: Sequence[int]) -> dict[int, nn.Module]:
    """Publishes different weights after so many updates; returns the model of each version."""
    models = {}
    for version in versions:
        of.updates = version
        with torch.no_grad():
            for parameter in of.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.manual_seed(version)), alpha=0.02)
        snapshots(of).publish_options(of.model, version)
        models[version] = copy.deepcopy(of.model)
    return models


def sampled_by(group: int, versions: list[int]) -> Trajectory:
    one = trajectory(group, [3 + index for index in range(len(versions))])
    return replace(one, completion=replace(one.completion, policy_version=np.array(versions, dtype=np.int64)))


ROWS = [sampled_by(0, [1, 1, 1]), sampled_by(1, [1, 2, 3, 3]), sampled_by(2, [3, EXTERNAL_VERSION]), sampled_by(3, [2])]


@torch.no_grad()
def proximal(of: Learner) -> list[MicroBatch]:
    return [micro for batch in of.score_fixed_policies(_pack(ROWS, of, 0)) for micro in batch]


@torch.no_grad()
def differing(of: Learner, models: dict[int, nn.Module]) -> int:
    """Tokens whose proximal log-prob is not, bit for bit, that of the model of their version."""
    count = 0
    for micro in proximal(of):
        for version, model in models.items():
            logp = score(model, micro.tokens).logp
            for index, row in enumerate(micro.rows):
                chosen = np.flatnonzero(ROWS[row].completion.policy_version == version)
                count += int((micro.proximal[index, chosen] != logp[index, chosen]).sum())
    return count


@pytest.mark.parametrize("budget", [24, 1000])
def test_every_token_is_scored_by_the_weights_that_sampled_it(budget: int) -> None:
    of = learner(f"trainer.micro_batch_tokens={budget}")
    models = train_and_publish(of, (1, 2, 3))
    assert differing(of, models) == 0
    for name, parameter in of.model.named_parameters():
        assert torch.equal(parameter, models[3].get_parameter(name)), "the weights are back in their places"
    newest = {
        row: version for m in proximal(of) for row, version in zip(m.rows, m.extras["proximal_versions"], strict=True)
    }
    assert newest == {0: 1, 1: 3, 2: 3, 3: 2}


def test_a_snapshot_of_another_version_is_seen() -> None:
    of = learner()
    models = train_and_publish(of, (1, 2, 3))
    kept = snapshots(of)._snapshots  # pyright: ignore[reportPrivateUsage]
    kept[1], kept[2] = kept[2], kept[1]
    assert differing(of, models) == 3 + 2 + 1


def test_snapshots_are_kept_as_long_as_tokens_may_come_from_them() -> None:
    of = learner()
    train_and_publish(of, (0, 1, 2, 3, 5))
    assert sorted(snapshots(of).tensors()) == ["proximal-3", "proximal-5"]
    with pytest.raises(TrimtabError, match=r"sampled by the weights of update 1, and .* snapshots of \[3, 5\] only"):
        proximal(of)


def test_the_weights_are_back_after_an_error() -> None:
    of = learner()
    train_and_publish(of, (1, 3))
    before = [parameter.clone() for parameter in of.model.parameters()]
    [one, *_] = snapshots(of).proximal_passes(_pack(ROWS[:1], of, 0)[0], 3)
    with suppress(RuntimeError), one.weights:
        assert not all(torch.equal(old, new) for old, new in zip(before, of.model.parameters(), strict=True))
        raise RuntimeError
    assert all(torch.equal(old, new) for old, new in zip(before, of.model.parameters(), strict=True))
