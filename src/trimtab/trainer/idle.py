"""Detects steps without a training signal: all advantages are zero at trained tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.errors import TrimtabError
from trimtab.types import Trajectory

MESSAGE_INTERVAL = 10
"""Steps after which the message is repeated."""


class IdleSteps:
    """Counts consecutive steps without a training signal."""

    def __init__(self) -> None:
        self.steps = 0

    def observe(self, trajectories: Sequence[Trajectory], advantages: torch.Tensor, max_tokens: int) -> str | None:
        """Counts the step of a batch, whose advantages are (rows, 1).

        Returns a message at the first of such steps and at every tenth after it, else None.
        """
        idle = not any(
            advantage != 0 and trajectory.loss_mask.any()
            for trajectory, advantage in zip(trajectories, advantages[:, 0].tolist(), strict=True)
        )
        self.steps = self.steps + 1 if idle else 0
        return (
            f"no training signal: {_reason(trajectories, max_tokens)}" if self.steps % MESSAGE_INTERVAL == 1 else None
        )

    def error(self, trajectories: Sequence[Trajectory], max_tokens: int, step: int) -> TrimtabError:
        """Returns the error of a run that ends after too many such steps, the last of which, `step`, is saved."""
        return TrimtabError(
            f"{self.steps} steps in a row had no training signal, the last one because "
            f"{_reason(trajectories, max_tokens)}; step {step} is saved: look at the reward and the responses, or "
            "raise trainer.max_idle_steps (0: never stop)"
        )


def _reason(trajectories: Sequence[Trajectory], max_tokens: int) -> str:
    """Why a batch has no signal."""
    if not trajectories:
        return "no response could be used"
    sampled = [trajectory for trajectory in trajectories if not trajectory.off_policy]
    if sampled and all(trajectory.completion.finish_reason == "length" for trajectory in sampled):
        return f"no response ended within its limits (sampling.max_tokens = {max_tokens}, or those of [environment])"
    rewards = [trajectory.reward for trajectory in trajectories]
    return f"the rewards of every group are equal (from {min(rewards):g} to {max(rewards):g})"
