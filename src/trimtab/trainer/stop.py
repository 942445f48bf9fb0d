"""Ends a run: on request, or after steps without a training signal (all advantages are zero at trained tokens).

The first Ctrl-C or SIGTERM ends it after the current step, with a checkpoint. The second ends it at once.
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
    """A request to end a run, by a signal or by `request`. line: written to standard error if a signal must wait."""

    def __init__(self, line: bytes = WAITING_MESSAGE) -> None:
        self.signal_number: int | None = None  # None until a request
        self._line = line
        self._finishing = False

    def request(self, number: int = signal.SIGINT) -> None:
        """Requests the end of the run after the step in progress. May be called from any thread."""
        self.signal_number = self.signal_number or number

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM inside, in the main thread only; handlers that the program has set are kept."""
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
        """Makes the first signal wait inside. Outside there is nothing to save, so it raises `Stopped` at once."""
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
        # print is not reentrant: the interrupted code may be inside of it.
        os.write(2, self._line)


class IdleSteps:
    """Counts consecutive steps without a training signal."""

    def __init__(self) -> None:
        self.steps = 0

    def observe(self, trajectories: Sequence[Trajectory], advantages: torch.Tensor, max_tokens: int) -> str | None:
        """Counts a step with advantages (rows, 1). Returns a message at the 1st, 11th, ... idle step in a row."""
        idle = not any(
            advantage != 0 and trajectory.loss_mask.any()
            for trajectory, advantage in zip(trajectories, advantages[:, 0].tolist(), strict=True)
        )
        self.steps = self.steps + 1 if idle else 0
        return (
            f"no training signal: {_reason(trajectories, max_tokens)}" if self.steps % MESSAGE_INTERVAL == 1 else None
        )

    def error(self, trajectories: Sequence[Trajectory], max_tokens: int, step: int) -> TrimtabError:
        """Returns the error for a run that ends after too many idle steps; the last one, `step`, is saved."""
        return TrimtabError(
            f"{self.steps} steps in a row had no training signal, the last one because "
            f"{_reason(trajectories, max_tokens)}; step {step} is saved: look at the reward and the responses, or "
            "raise trainer.max_idle_steps (0: never stop)"
        )


def _reason(trajectories: Sequence[Trajectory], max_tokens: int) -> str:
    """Returns why a batch has no training signal."""
    if not trajectories:
        return "no response could be used"
    sampled = [trajectory for trajectory in trajectories if not trajectory.off_policy]
    if sampled and all(trajectory.completion.finish_reason == "length" for trajectory in sampled):
        return f"no response ended within its limits (sampling.max_tokens = {max_tokens}, or those of [environment])"
    rewards = [trajectory.reward for trajectory in trajectories]
    return f"the rewards of every group are equal (from {min(rewards):g} to {max(rewards):g})"
