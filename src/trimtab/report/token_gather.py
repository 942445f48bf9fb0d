"""Collects the data of the report's token section while trajectory files are read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.diagnosis import token_statistics
from trimtab.report.clipping import Clipping, clipping
from trimtab.report.token_file import Tokens


@dataclass
class Seen:
    """The first and the last file with trained tokens, and sums over all of them.

    noisy: the last file with perturbed log-probs. clip_*: counts (10,) by tenth of the response. before, after: the
    tokens around the places where a newer policy took over, with the entropy there.
    """

    first: tuple[int, Tokens] | None = None
    last: tuple[int, Tokens] | None = None
    noisy: tuple[int, Tokens] | None = None
    steps: list[int] = field(default_factory=list)
    rows: int = 0
    read: int = 0
    external: int = 0
    nonfinite: int = 0
    clip_low: np.ndarray = field(default_factory=lambda: np.zeros(token_statistics.DECILES))
    clip_high: np.ndarray = field(default_factory=lambda: np.zeros(token_statistics.DECILES))
    clip_tokens: np.ndarray = field(default_factory=lambda: np.zeros(token_statistics.DECILES))
    clip_rules: set[str] = field(default_factory=set)
    no_clip: str = "no response is left"
    before: list[np.ndarray] = field(default_factory=list)
    after: list[np.ndarray] = field(default_factory=list)
    before_entropy: list[np.ndarray] = field(default_factory=list)
    after_entropy: list[np.ndarray] = field(default_factory=list)

    @property
    def ends(self) -> dict[int, Tokens]:
        """The first and the last step with a token, one where they are the same."""
        return dict(end for end in (self.first, self.last) if end is not None)

    def look(self, config: Mapping[str, Any], step: int, found: Tokens) -> None:
        """Take in the file of one step; `config` is the run's."""
        self.steps.append(step)
        self.rows, self.read = self.rows + found.rows, self.read + found.read
        self.external, self.nonfinite = self.external + found.external, self.nonfinite + found.nonfinite
        if not found.trained.any():
            return
        self.first, self.last = self.first or (step, found), (step, found)
        if found.perturbed is not None and found.clean is not None:
            self.noisy = (step, found)
        self._remember_clipped(clipping(config, found), found)
        self._remember_cuts(found)

    def _remember_clipped(self, clip: Clipping | str, found: Tokens) -> None:
        if isinstance(clip, str):
            self.no_clip = clip
            return
        where = token_statistics.deciles(found.starts)
        low, high, trained = (
            np.bincount(where[mask], minlength=token_statistics.DECILES)
            for mask in (clip.low, clip.high, found.trained)
        )
        self.clip_low, self.clip_high = self.clip_low + low, self.clip_high + high
        self.clip_tokens = self.clip_tokens + trained
        self.clip_rules.add(clip.rule)

    def _remember_cuts(self, found: Tokens) -> None:
        if found.version is None:
            return
        places = token_statistics.cuts(found.version, found.starts)
        self.after.append(found.ids[places])
        self.before.append(found.ids[places - 1])
        if found.entropy is not None:
            self.after_entropy.append(found.entropy[places])
            self.before_entropy.append(found.entropy[places - 1])
