"""Collects the routed experts of each token during decoding (R3, docs/routing.md).

The model's routing tape holds choices in the order of the forward passes, padding included; the decoder assigns them to
tokens. The last token of a response is never run, so a response of n tokens has an entry for each token of its prompt
and n - 1 more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from trimtab.trainer.models.routing import RoutingTape
from trimtab.types import ExpertArray

if TYPE_CHECKING:
    from trimtab.trainer.engines.decoding_rows import DecodingRow


class ExpertRecorder:
    """Collects the routed experts of one batch. A decoder calls `prompts` and `starts` after its prefill passes."""

    def __init__(self, tape: RoutingTape) -> None:
        self._tape = tape
        self._prompts: dict[int, ExpertArray] = {}
        self._starts: dict[int, ExpertArray] = {}

    def prompts(self, index: Sequence[int], real: Tensor) -> None:
        """Records a pass over the prompts of these indices; `real` (prompts, time) is False at padding."""
        self._prompts |= zip(index, self._split(real), strict=True)

    def starts(self, index: Sequence[int], real: Tensor) -> None:
        """Records a pass over the prefixes of these starts, or over prompt and prefix where they run as one text."""
        self._starts |= zip(index, self._split(real), strict=True)

    def begin(self, rows: Sequence[DecodingRow], prompt: Sequence[int], start: Sequence[int]) -> None:
        """Assigns the recorded prefill to rows; `start` holds each row's start, `prompt` each start's prompt.

        Experts that a prefix already carries are kept, because its tokens were sampled under them. Its last token has
        no entry yet, as it was not run before.
        """
        for row, index_of_start in zip(rows, start, strict=True):
            # Prompts and prefixes were run in separate passes, or as one text per start.
            parts = [self._prompts[prompt[index_of_start]]] if self._prompts else []
            if row.prefix_length or not parts:
                parts.append(self._starts[index_of_start])
            previous = None if row.prefix is None else row.prefix.routed_experts
            if previous is not None:
                parts = [previous, np.concatenate(parts)[len(previous) :]]
            row.routes = parts

    def step(self, rows: Sequence[DecodingRow], live: Sequence[bool]) -> None:
        """Records a step, which ran the last token of each row; finished rows are skipped."""
        choices = self._take_choices()
        for row, alive, experts in zip(rows, live, choices, strict=True):
            if alive:
                row.routes.append(experts[None])

    def _split(self, real: Tensor) -> list[ExpertArray]:
        counts = real.sum(-1).cumsum(0).tolist()
        return np.split(self._take_choices()[real.flatten().cpu().numpy()], counts[:-1])

    def _take_choices(self) -> ExpertArray:
        return self._tape.take().cpu().numpy()
