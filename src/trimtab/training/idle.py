"""Detects steps without a training signal. They are reported at once; after some of them in a row the run stops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.types import Trajectory

AGAIN = 10
"""Steps after which a lasting state is said again."""


class Idle:
    """Counts steps in a row without any signal."""

    def __init__(self) -> None:
        self.steps = 0
        self._cut = 0

    def observe(self, trajectories: Sequence[Trajectory], advantages: torch.Tensor, max_tokens: int) -> str | None:
        """What to say of a batch, whose advantages are (rows, 1): at the first such step, and every tenth."""
        cut = _all_cut(trajectories)
        idle = not any(
            advantage != 0 and trajectory.loss_mask.any()
            for trajectory, advantage in zip(trajectories, advantages[:, 0].tolist(), strict=True)
        )
        self.steps = self.steps + 1 if idle else 0
        self._cut = self._cut + 1 if cut else 0
        if idle:
            line = f"it taught nothing: {reason(trajectories, max_tokens)}"
        else:
            line = f"none of {len(trajectories)} responses ended within sampling.max_tokens = {max_tokens}: raise it?"
        return line if (self.steps if idle else self._cut) % AGAIN == 1 else None


def reason(trajectories: Sequence[Trajectory], max_tokens: int) -> str:
    """Why a batch has no signal."""
    if not trajectories:
        return "no response could be used"
    count, rewards = len(trajectories), sorted({trajectory.reward for trajectory in trajectories})
    given = f"all of them got reward {rewards[0]:g}" if len(rewards) == 1 else "the rewards of every group are equal"
    if _all_cut(trajectories):
        return f"none of {count} responses ended within sampling.max_tokens = {max_tokens}, {given}"
    return f"of {count} responses {given}"


def _all_cut(trajectories: Sequence[Trajectory]) -> bool:
    own = [trajectory for trajectory in trajectories if not trajectory.off_policy]
    return bool(own) and all(trajectory.completion.finish == "length" for trajectory in own)
