"""Collects the experts of each token while responses grow (METHODS 8.1, R3).

The model's tape holds choices in the order its passes ran them, padding included; a decoder says whose tokens these
were. The last token of a response is never run, so a response of n tokens has an entry for each token of its prompt
and n - 1 more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from trimtab.types import ExpertArray

if TYPE_CHECKING:
    from trimtab.engines.embedded.decoding_rows import Row


class Tape(Protocol):
    """See `models.routing.recorded`."""

    def take(self) -> Tensor:
        """Choices since the last call, (tokens, layers, k)."""
        ...


class ExpertRecorder:
    """The choices of one batch of rows. `prompts` and `starts` are for the decoder, after each of its passes."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._prompts: dict[int, ExpertArray] = {}
        self._starts: dict[int, ExpertArray] = {}

    def prompts(self, index: Sequence[int], real: Tensor) -> None:
        """The pass ran these prompts; `real` (prompts, time) tells their tokens from padding."""
        self._prompts |= zip(index, self._split(real), strict=True)

    def starts(self, index: Sequence[int], real: Tensor) -> None:
        """The pass ran the prefixes of these starts, or prompt and prefix where prompts had no pass of their own."""
        self._starts |= zip(index, self._split(real), strict=True)

    def begin(self, rows: Sequence[Row], prompt: Sequence[int], start: Sequence[int]) -> None:
        """Everything before the first step was run; `start` names the start of each row, `prompt` that of each start.

        What an older policy's record says of a prefix stays: it is what those tokens were sampled under. The prefix's
        last token is not in it, as it was not run before now.
        """
        for row, place in zip(rows, start, strict=True):
            # Either prompts and prefixes had passes of their own, or each start had one.
            parts = [self._prompts[prompt[place]]] if self._prompts else []
            if row.begun or not parts:
                parts.append(self._starts[place])
            old = None if row.prefix is None else row.prefix.routes
            if old is not None:
                parts = [old, np.concatenate(parts)[len(old) :]]
            row.routes = parts

    def step(self, rows: Sequence[Row], live: Sequence[bool]) -> None:
        """A step ran the last token of each row; rows that have ended are left as they are."""
        taken = self._taken()
        for row, growing, choice in zip(rows, live, taken, strict=True):
            if growing:
                row.routes.append(choice[None])

    def _split(self, real: Tensor) -> list[ExpertArray]:
        counts = real.sum(-1).cumsum(0).tolist()
        return np.split(self._taken()[real.flatten().cpu().numpy()], counts[:-1])

    def _taken(self) -> ExpertArray:
        return self._tape.take().cpu().numpy()
