"""The trained tokens that causes are inferred from, with differences of log-probs converted to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable, k3

MAX_LOGP = -1e-7
"""The log-prob closest to 0 that float32 distinguishes from it; logits are clamped there."""

UNDECIDED = (-5.0, -0.05)
"""Range of the mean log-prob of trainer and sampler in which both probabilities are precise and noise is visible."""


def logit(logp: np.ndarray) -> np.ndarray:
    """Returns log(p / (1 - p)) of log p, clamped at `MAX_LOGP`."""
    logp = np.minimum(logp, MAX_LOGP)
    return logp - np.log(-np.expm1(logp))


@dataclass(frozen=True, eq=False)
class LogprobPairs:
    """Trained tokens of a table, each with a log-prob of the sampler and one of the trainer; arrays (tokens,).

    index: of each token in the table, ascending. behavior, trainer: float64, finite, at most 0; a repair replaces them.
    The other columns are those of the table at these tokens, None where the data has none.
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
    def turn(self) -> np.ndarray:
        """The turn of each token, from 0; without a column of turns one begins after every untrained stretch."""
        return self.table.turn_number[self.index]

    @cached_property
    def since_turn(self) -> np.ndarray:
        """The number of tokens since the first trained one of the turn, untrained ones included."""
        trained = np.flatnonzero(self.table.mask)
        turn, row = self.table.turn_number[trained], self.table.row[trained]
        begins = (np.diff(turn, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0)
        first = np.maximum.accumulate(np.where(begins, trained, 0))
        return self.index - first[np.searchsorted(trained, self.index)]

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
    def step(self) -> np.ndarray | None:
        return self.of_response(self.table.step)

    @property
    def prompt(self) -> np.ndarray | None:
        return self.of_response(self.table.prompt)

    @property
    def log_ratio(self) -> np.ndarray:
        return self.trainer - self.behavior

    @property
    def k3(self) -> np.ndarray:
        return k3(self.log_ratio)

    @property
    def shift(self) -> np.ndarray:
        """The trainer's logit minus the sampler's."""
        return logit(self.trainer) - logit(self.behavior)

    @property
    def mean(self) -> np.ndarray:
        """The mean log-prob of trainer and sampler."""
        return 0.5 * (self.behavior + self.trainer)

    @property
    def undecided(self) -> np.ndarray:
        """Whether a token is undecided: its mean log-prob lies within `UNDECIDED`."""
        return (self.mean > UNDECIDED[0]) & (self.mean < UNDECIDED[1])

    @property
    def distinct(self) -> LogprobPairs:
        """The first token of each distinct pair: samples of one prompt begin with the same tokens and errors."""
        # As complex numbers: sorting rows takes six times as long.
        pairs = np.stack([self.behavior, self.trainer], axis=1).view(np.complex128)[:, 0]
        return self.select(np.sort(np.unique(pairs, return_index=True)[1]))

    def select(self, keep: np.ndarray) -> LogprobPairs:
        """Returns the tokens at `keep`, a mask or indices."""
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
