"""The trained tokens that causes are inferred from, with differences of log-probs converted to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable

MAX_LOGP = -1e-7
"""The log-prob closest to 0 that float32 distinguishes from it; logits are clamped there."""

MIDDLE = (-5.0, -0.05)
"""Range of the mean log-prob of trainer and sampler in which both probabilities are precise and noise is visible."""


def logit(logp: np.ndarray) -> np.ndarray:
    """Returns log(p / (1 - p)) of log p, clamped at `NEAREST`."""
    logp = np.minimum(logp, MAX_LOGP)
    return logp - np.log(-np.expm1(logp))


@dataclass(frozen=True, eq=False)
class LogprobPairs:
    """Trained tokens of a table, each with a log-prob of the sampler and one of the trainer; arrays (tokens,).

    index: of each token in the table. behavior, trainer: float64, finite, at most 0; a repair replaces them. The other
    columns are those of the table at these tokens, None where the data has none.
    """

    table: TokenTable
    index: np.ndarray
    behavior: np.ndarray
    trainer: np.ndarray

    @classmethod
    def of(cls, table: TokenTable) -> LogprobPairs:
        """Returns the trained tokens with finite log-probs of at most 0, but for rounding, in order."""
        index = np.flatnonzero(table.mask & np.isfinite(table.behavior) & np.isfinite(table.trainer))
        index = index[np.maximum(table.behavior, table.trainer)[index] <= MAX_ROUNDED_LOGP]
        behavior, trainer = (
            np.minimum(values[index].astype(np.float64), 0.0) for values in (table.behavior, table.trainer)
        )
        return cls(table, index, behavior, trainer)

    @staticmethod
    def concat(parts: Sequence[LogprobPairs]) -> LogprobPairs:
        """Returns several selections of tokens of one table as one, in the order of the table."""
        names = ("index", "behavior", "trainer")
        order = np.argsort(np.concatenate([part.index for part in parts]), kind="stable")
        joined = (np.concatenate([getattr(part, name) for part in parts])[order] for name in names)
        return LogprobPairs(parts[0].table, *joined)

    def __len__(self) -> int:
        return len(self.behavior)

    @cached_property
    def row(self) -> np.ndarray:
        """The response of each token."""
        return self.table.row[self.index]

    @cached_property
    def position(self) -> np.ndarray:
        """The position of each token in its response, untrained tokens included."""
        return self.table.position[self.index]

    @cached_property
    def depth(self) -> np.ndarray:
        """The number of tokens before each one in its context; without the prompt where its length is unknown."""
        prompt = self.of_response(self.table.prompt_length)
        return self.position + (prompt if prompt is not None and np.isfinite(prompt).all() else 0.0)

    @cached_property
    def since_boundary(self) -> np.ndarray:
        """The number of tokens since the last boundary: the start of the response or of a turn.

        Without a column of turns, one begins after every untrained stretch.
        """
        return self._boundaries[0][self.index]

    @cached_property
    def in_later_turn(self) -> np.ndarray:
        """Whether that boundary is inside the response, bool."""
        return self._boundaries[1][self.index]

    @cached_property
    def _boundaries(self) -> tuple[np.ndarray, np.ndarray]:
        """`since_boundary` and `in_later_turn` of all tokens of the table."""
        mask, place = self.table.mask, self.table.position
        index = np.arange(len(mask))
        if not len(mask):
            return index, mask
        begins = mask & ((place == 0) | ~np.concatenate([[False], mask[:-1]]))
        if self.table.turn is not None:
            trained = np.flatnonzero(mask)
            turn, row = self.table.turn[trained], self.table.row[trained]
            begins = np.zeros_like(mask)
            begins[trained] = (np.diff(turn, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0)
        last = np.maximum.accumulate(np.where(begins, index, 0))
        # The first trained token after masked ones at the start of a response (a forced prefix) is no turn boundary.
        trained_before = np.concatenate([[0], np.cumsum(mask)[:-1]])
        inside = begins & (place > 0) & (trained_before > trained_before[index - place])
        if self.table.turn is not None:
            inside = begins & (self.table.turn > 0)
        return index - last, inside[last]

    @cached_property
    def entropy(self) -> np.ndarray | None:
        return None if self.table.entropy is None else self.table.entropy[self.index].astype(np.float64)

    @cached_property
    def ids(self) -> np.ndarray | None:
        return None if self.table.ids is None else self.table.ids[self.index]

    @cached_property
    def age(self) -> np.ndarray | None:
        """As in the table, but at least 0."""
        return None if self.table.age is None else np.maximum(self.table.age[self.index], 0)

    @property
    def log_ratio(self) -> np.ndarray:
        return self.trainer - self.behavior

    @property
    def shift(self) -> np.ndarray:
        """The trainer's logit minus the sampler's."""
        return logit(self.trainer) - logit(self.behavior)

    @property
    def middle(self) -> np.ndarray:
        """Tokens whose mean log-prob lies within `MIDDLE`."""
        mean = 0.5 * (self.behavior + self.trainer)
        return (mean > MIDDLE[0]) & (mean < MIDDLE[1])

    @property
    def distinct(self) -> LogprobPairs:
        """The first token of each distinct pair: samples of one prompt begin with the same tokens and errors."""
        first = np.zeros(len(self), dtype=bool)
        first[np.unique(np.stack([self.behavior, self.trainer], axis=1), axis=0, return_index=True)[1]] = True
        return self.select(first)

    def select(self, keep: np.ndarray) -> LogprobPairs:
        """Returns the tokens where `keep` is True."""
        return self.repaired(self.trainer, keep)

    def repaired(self, trainer: np.ndarray, keep: np.ndarray) -> LogprobPairs:
        """Returns the tokens where `keep` is True, with other log-probs of the trainer."""
        return LogprobPairs(self.table, self.index[keep], self.behavior[keep], trainer[keep])

    def swapped(self) -> LogprobPairs:
        """Returns the tokens with trainer and sampler exchanged."""
        return LogprobPairs(self.table, self.index, self.trainer, self.behavior)

    def of_response(self, values: np.ndarray | None) -> np.ndarray | None:
        """Returns a column of responses at each token."""
        return None if values is None else values[self.row]


def share(values: np.ndarray) -> float:
    """Returns the share of True values; 0 without values."""
    return float(values.mean()) if len(values) else 0.0


def z_of(values: np.ndarray) -> float:
    """Returns the mean divided by its standard error; 0 for fewer than 20 values."""
    if len(values) < 20:
        return 0.0
    error = float(values.std()) / np.sqrt(len(values))
    return float(values.mean()) / max(error, 1e-12)


def confidence(strength: float, needed: float) -> float:
    """Returns a confidence in (0.5, 0.99] that grows with the ratio of a statistic to its threshold."""
    excess = max(strength / needed, 1.0)
    return round(float(min(0.99, 1.0 - 0.45 / excess)), 2)
