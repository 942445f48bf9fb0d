"""Steps that teach nothing, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.trajectories import trajectory

from trimtab.training.idle import IdleSteps
from trimtab.types import EpisodeOutcome, FinishReason, Trajectory


def batch(*rewards: float, finish: FinishReason = "stop") -> tuple[list[Trajectory], torch.Tensor]:
    """Groups of two, with the advantages of centred rewards."""
    rows = [trajectory(index // 2, [3], reward=reward, finish=finish) for index, reward in enumerate(rewards)]
    pairs = torch.tensor(rewards).view(-1, 2)
    return rows, (pairs - pairs.mean(1, keepdim=True)).reshape(-1, 1)


def test_a_step_with_any_advantage_is_not_idle() -> None:
    idle = IdleSteps()
    assert idle.observe(*batch(0.0, 0.0, 1.0, 1.0, 0.0, 1.0), 8) is None
    assert idle.steps == 0


@pytest.mark.parametrize(
    ("rewards", "finish", "reason"),
    [
        ((0.0, 0.0, 0.0, 0.0), "stop", "of 4 responses all of them got reward 0"),
        ((0.0, 0.0, 1.0, 1.0), "stop", "of 4 responses the rewards of every group are equal"),
        ((0.0, 0.0), "length", r"none of 2 responses ended within sampling.max_tokens = 8, all of them got reward 0"),
    ],
)
def test_an_idle_step_is_reported_with_its_reason(
    rewards: tuple[float, ...], finish: FinishReason, reason: str
) -> None:
    idle = IdleSteps()
    line = idle.observe(*batch(*rewards, finish=finish), 8)
    assert line == f"it taught nothing: {reason}"
    assert idle.steps == 1


def test_idle_steps_are_reported_first_and_every_tenth_until_a_step_teaches() -> None:
    idle = IdleSteps()
    reported = [idle.observe(*batch(0.0, 0.0), 8) is not None for _ in range(21)]
    assert [index for index, reports in enumerate(reported) if reports] == [0, 10, 20]
    assert idle.steps == 21
    assert idle.observe(*batch(0.0, 1.0), 8) is None
    assert idle.steps == 0
    assert idle.observe(*batch(0.0, 0.0), 8) is not None


def test_responses_that_are_all_cut_but_have_different_rewards_are_reported_and_not_counted() -> None:
    idle = IdleSteps()
    line = idle.observe(*batch(0.0, 1.0, finish="length"), 8)
    assert line is not None
    assert "none of 2 responses ended within sampling.max_tokens = 8" in line
    assert "nothing" not in line
    assert idle.steps == 0


def test_episodes_that_are_all_cut_name_every_bound_that_cuts_them() -> None:
    rows, advantages = batch(0.0, 1.0, finish="length")
    rows = [
        replace(row, completion=replace(row.completion, outcome=EpisodeOutcome(row.prompt, calls=1))) for row in rows
    ]
    line = IdleSteps().observe(rows, advantages, 8)
    assert line is not None
    assert "sampling.max_tokens = 8, environment.max_turns and environment.max_turn_tokens" in line


def test_an_advantage_at_tokens_that_are_not_trained_teaches_nothing() -> None:
    rows, advantages = batch(0.0, 1.0, finish="length")
    masked = [replace(row, loss_mask=np.zeros(1, dtype=np.bool_)) for row in rows]
    idle = IdleSteps()
    idle.observe(masked, advantages, 8)
    assert idle.steps == 1


def test_an_empty_batch_teaches_nothing() -> None:
    idle = IdleSteps()
    assert idle.observe([], torch.zeros(0, 1), 8) == "it taught nothing: no response could be used"


def test_idle_steps_after_responses_that_were_all_cut_are_reported_at_once() -> None:
    """Both states are counted for themselves: the second of them is no repetition of the first."""
    idle = IdleSteps()
    for _ in range(4):
        idle.observe(*batch(0.0, 1.0, finish="length"), 8)
    line = idle.observe(*batch(0.0, 0.0, finish="length"), 8)
    assert line is not None
    assert line.startswith("it taught nothing")
