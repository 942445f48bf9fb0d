"""What ends a run: signals of the system, and steps without a training signal."""

from __future__ import annotations

import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.trajectories import multi_turn, trajectory

from trimtab.trainer.stop import IdleSteps, Stop
from trimtab.types import FinishReason, Trajectory


def test_signals_that_the_program_handles_itself_are_left_to_it() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Stop().signals():
            kept, replaced = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (kept, signal.getsignal(signal.SIGINT)) == (signal.SIG_IGN, signal.default_int_handler)
    assert replaced != signal.default_int_handler


def batch(*rewards: float, finish: FinishReason = "stop") -> tuple[list[Trajectory], torch.Tensor]:
    """Groups of two, with the advantages of centred rewards."""
    rows = [trajectory(index // 2, [3], reward=reward, finish=finish) for index, reward in enumerate(rewards)]
    pairs = torch.tensor(rewards).view(-1, 2)
    return rows, (pairs - pairs.mean(1, keepdim=True)).reshape(-1, 1)


def test_a_step_with_any_advantage_is_not_idle() -> None:
    idle = IdleSteps()
    assert idle.observe(*batch(0.0, 0.0, 1.0, 1.0, 0.0, 1.0), 8) is None
    assert idle.observe([multi_turn(0, "a..b")], torch.tensor([[1.0]]), 8) is None, "observations are not trained"
    assert idle.steps == 0


LIMITS = "no response ended within its limits (sampling.max_tokens = 8, or those of [environment])"


@pytest.mark.parametrize(
    ("rewards", "finish", "reason"),
    [
        ((0.0, 0.0, 1.0, 1.0), "stop", "the rewards of every group are equal (from 0 to 1)"),
        ((0.0, 0.0), "length", LIMITS),
        ((), "stop", "no response could be used"),
    ],
)
def test_an_idle_step_is_reported_with_its_reason(
    rewards: tuple[float, ...], finish: FinishReason, reason: str
) -> None:
    idle = IdleSteps()
    assert idle.observe(*batch(*rewards, finish=finish), 8) == f"no training signal: {reason}"
    assert idle.steps == 1


def test_idle_steps_are_reported_first_and_every_tenth_until_a_step_has_a_signal() -> None:
    idle = IdleSteps()
    reported = [idle.observe(*batch(0.0, 0.0), 8) is not None for _ in range(21)]
    assert [index for index, reports in enumerate(reported) if reports] == [0, 10, 20]
    assert idle.steps == 21
    assert idle.observe(*batch(0.0, 1.0), 8) is None
    assert idle.steps == 0
    assert idle.observe(*batch(0.0, 0.0), 8) is not None


def test_an_advantage_at_tokens_that_are_not_trained_is_no_signal() -> None:
    rows, advantages = batch(0.0, 1.0)
    masked = [replace(row, loss_mask=np.zeros(1, dtype=np.bool_)) for row in rows]
    idle = IdleSteps()
    idle.observe(masked, advantages, 8)
    assert idle.steps == 1
