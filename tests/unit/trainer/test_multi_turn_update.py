"""Updates on responses of several turns that the embedded engine sampled: nothing at an observation is read."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.turns import ScriptedTurns

from trimtab.corrections.weights import WeightStatistics
from trimtab.objectives import objective
from trimtab.trainer import tasks
from trimtab.trainer.batch_preparation import Batch, prepare_batch
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.learner import Learner
from trimtab.trainer.models.laboratory import build
from trimtab.trainer.rollout.collector import Group
from trimtab.trainer.step_statistics import StepStatistics, batch_metrics
from trimtab.types import SamplingParams, Trajectory

MODEL, TOKENIZER = build(0)
TASK = tasks.build("sort", digits=3, holdout=8)
STOPS = SamplingParams(max_tokens=40, stop_ids=tuple(range(0, len(TOKENIZER), 3)))
VERSION = 0


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Two groups of four responses of up to three turns, with rewards 0 and 1."""
    engine = EmbeddedEngine(copy.deepcopy(MODEL), TOKENIZER, torch.float32)
    prompts = [tasks.encode(TASK, problem, TOKENIZER) for problem in TASK.train[:2]]
    handler = ScriptedTurns(STOPS.max_tokens, vocabulary=len(TOKENIZER))
    sampled = engine.generate(prompts, 4, STOPS, seed=1, turns=handler)
    assert all(one.turn[-1] > 0 for group in sampled for one in group)
    return [
        [
            Trajectory(prompt, number, one, STOPS, one.sampled, float(index % 2), {"exact": float(index % 2)})
            for index, one in enumerate(completions)
        ]
        for number, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
    ]


def with_junk(groups: list[Group]) -> list[Group]:
    """The same responses with other values at their observations, wherever the loss mask is False."""
    rng = np.random.default_rng(0)

    def changed(one: Trajectory) -> Trajectory:
        completion = one.completion
        assert completion.entropy is not None
        junk = rng.normal(0, 50, len(one)).astype(np.float32)
        return replace(
            one,
            completion=replace(
                completion,
                logp_behavior=np.where(completion.sampled, completion.logp_behavior, junk),
                entropy=np.where(completion.sampled, completion.entropy, junk),
                policy_version=np.where(completion.sampled, completion.policy_version, -99),
            ),
        )

    return [[changed(one) for one in group] for group in groups]


def updated(groups: list[Group], name: str) -> tuple[torch.Tensor, StepStatistics, Batch]:
    """The weights after two mini-batches of plain gradient steps."""
    config = load_config(
        {
            "trainer": {"prompts": 2, "samples": 4, "minibatches": 2},
            "objective": {"name": name},
            "model": {"path": "laboratory", "autocast": "none"},
        }
    )
    model = copy.deepcopy(MODEL)
    learner = Learner(config, model, torch.optim.SGD(model.parameters()), objective(name), total_updates=2)
    batch = prepare_batch(groups, learner, pad_id=0)
    stats = learner.update(batch.minibatches, lambda *_: None)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), stats, batch


@pytest.mark.parametrize("name", ["turn-tis", "seq-mis-seq-ratio", "oapl", "m2po"])
def test_values_at_observations_change_nothing(groups: list[Group], name: str) -> None:
    weights, stats, batch = updated(groups, name)
    other, other_stats, other_batch = updated(with_junk(groups), name)
    assert torch.equal(weights, other)
    assert not torch.equal(weights, torch.cat([parameter.flatten() for parameter in MODEL.parameters()]))
    assert stats.mismatch is not None
    assert other_stats.mismatch is not None
    measured = stats.mismatch.finalize()
    assert measured == other_stats.mismatch.finalize()
    assert measured["tokens"] <= sum(one.loss_mask.sum() for group in groups for one in group)
    assert measured["k3"] < 1e-8, "the trainer scores a turn after an observation as the engine sampled it"
    assert batch_metrics(batch.trajectories, VERSION) == batch_metrics(other_batch.trajectories, VERSION)


def test_every_turn_has_its_weight(groups: list[Group]) -> None:
    _, stats, _ = updated(groups, "turn-tis")
    assert stats.objective is not None
    turns = sum(int(one.completion.turn[one.loss_mask].max()) + 1 for group in groups for one in group)
    weight = stats.objective.parts["weight"]
    assert isinstance(weight, WeightStatistics)
    assert int(weight.count) == turns


def test_a_void_response_has_no_loss_and_its_reward_counts(groups: list[Group]) -> None:
    """The first response of each group is right, the others are not, and the last one is masked for a void turn."""

    def with_void(group: Group, offset: float) -> Group:
        rows = [replace(one, reward=float(index == 0)) for index, one in enumerate(group)]
        void = rows[-1].completion
        moved = replace(void, logp_behavior=void.logp_behavior + np.float32(offset))
        return [*rows[:-1], replace(rows[-1], completion=moved, loss_mask=np.zeros(len(rows[-1]), dtype=np.bool_))]

    weights, _, batch = updated([with_void(group, 0.0) for group in groups], "token-tis")
    # Of the rewards 1, 0, 0, 0 the mean is 1/4 and the deviation 1/2; of 1, 0, 0 they would be 1/3 and .577.
    assert batch.advantages.flatten().tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5] * 2, rel=1e-3)
    other, _, _ = updated([with_void(group, -3.0) for group in groups], "token-tis")
    assert torch.equal(weights, other), "nothing of the void response is read"
    dropped, _, _ = updated([with_void(group, 0.0)[:-1] for group in groups], "token-tis")
    assert not torch.equal(weights, dropped)
