"""Ends a run: on request, or after steps without a training signal (all advantages are zero at trained tokens).

The first Ctrl-C or SIGTERM ends it after the current step, with a checkpoint, the second at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from trimtab.errors import Stopped, TrimtabError
from trimtab.types import Trajectory

if TYPE_CHECKING:
    import torch

MESSAGE_INTERVAL = 10
"""Steps without a signal after which the message is repeated."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WAITING_MESSAGE = b"\nstopping: this step is finished and saved first; once more (Ctrl-C) to stop at once\n"


class Stop:
    """A request to end a run, by a signal or by `request`. line: written to standard error if a signal has to wait."""

    def __init__(self, line: bytes = WAITING_MESSAGE) -> None:
        self.signal_number: int | None = None  # None until then
        self._line = line
        self._finishing = False

    def request(self, number: int = signal.SIGINT) -> None:
        """Requests the end of the run after the step in progress. May be called from any thread."""
        self.signal_number = self.signal_number or number

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles signals inside, in the main thread; handlers that the program has set itself are kept."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        handled = [number for number in SIGNALS if in_main_thread and signal.getsignal(number) in defaults]
        before = {number: signal.signal(number, self._receive) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Inside, the first signal waits; outside there is nothing to save and it raises `Stopped` at once."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = self.signal_number is None
        self.request(number)  # also before raising: an exception may be lost, in a destructor or an import
        if not self._finishing or not first:
            raise Stopped(number)
        # Not print: the interrupted code may be inside of print.
        os.write(2, self._line)


class IdleSteps:
    """Counts consecutive steps without a training signal."""

    def __init__(self) -> None:
        self.steps = 0

    def observe(self, trajectories: Sequence[Trajectory], advantages: torch.Tensor, max_tokens: int) -> str | None:
        """Counts a step with advantages (rows, 1); returns a message at the first idle one and every tenth after it."""
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
