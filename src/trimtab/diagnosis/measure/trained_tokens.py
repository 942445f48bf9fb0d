"""The trained tokens of a table with per-token and per-response columns that several views share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from trimtab.corrections.ratios import LOG_RATIO_BOUND
from trimtab.corrections.statistics import RatioStatistics
from trimtab.diagnosis.measure.bins import log_ratio_bin, probability_bin
from trimtab.diagnosis.tokens import TokenTable, excess, k3

_SEQUENCE_BOUND = 300.0  # exponent bound of sequence sums: exp(2 * 300) still fits float64
_FAR = 1 << 40  # position relative to a turn's boundary where there is none


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns (as in `TokenTable.turn_number`), per token (tokens,) int64.

    number: of its turn, from 0. after: position relative to the start of its turn, very large in a first turn. before:
    position relative to the next turn, -1 for the last token of a turn, very negative in a last turn.
    """

    number: np.ndarray
    after: np.ndarray
    before: np.ndarray


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The trained tokens of a table in flat arrays (tokens,) float64, and the responses that have any.

    places: index of each token in the table. responses: indices of the table's responses with a trained token.
    starts: (responses + 1,), where each of them begins among the trained tokens. rows: position in `responses` of each
    token's response. log: the log-ratio. first: index of the table's first response in the whole stream.
    """

    table: TokenTable
    places: np.ndarray
    responses: np.ndarray
    starts: np.ndarray
    behavior: np.ndarray
    trainer: np.ndarray
    log: np.ndarray
    first: int

    @classmethod
    def of(cls, table: TokenTable, first: int) -> TrainedTokens:
        """Selects trained tokens; `first`: responses before this table. `ValueError` for a non-finite log-prob."""
        places = np.flatnonzero(table.mask)
        upto = np.append(0, np.cumsum(table.mask))[table.starts]
        responses = np.flatnonzero(np.diff(upto))
        # Log-probs are stored in float32; their difference in float64 is exact.
        behavior, trainer = (values[places].astype(np.float64) for values in (table.behavior, table.trainer))
        log = trainer - behavior
        if not np.isfinite(log).all():
            raise ValueError("a trained token has a log-prob that is not finite: readers leave such tokens out")
        starts = np.append(upto[responses], upto[-1])
        return cls(table, places, responses, starts, behavior, trainer, log, first)

    def __len__(self) -> int:
        return len(self.log)

    @cached_property
    def lengths(self) -> np.ndarray:
        """T: trained tokens of each response (responses,) int64."""
        return np.diff(self.starts)

    @cached_property
    def rows(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.responses)), self.lengths)

    @cached_property
    def excess(self) -> np.ndarray:
        return excess(self.log)

    @cached_property
    def k3(self) -> np.ndarray:
        return k3(self.log)

    @cached_property
    def size(self) -> np.ndarray:
        return np.abs(self.log)

    @cached_property
    def log_ratio_bin(self) -> np.ndarray:
        return log_ratio_bin(self.log)

    @cached_property
    def probability_bin(self) -> np.ndarray:
        return probability_bin(self.behavior)

    @cached_property
    def q(self) -> np.ndarray:
        """Probability of the token under the sampler; above 1, and bounded, for a log-prob above 0 (a finding)."""
        return np.exp(np.minimum(self.behavior, LOG_RATIO_BOUND))

    @cached_property
    def p(self) -> np.ndarray:
        """Probability of the token under the trainer, as `q`."""
        return np.exp(np.minimum(self.trainer, LOG_RATIO_BOUND))

    @cached_property
    def sums(self) -> np.ndarray:
        """Sums over each response (responses, FIELDS); those of sequences as in `corrections.statistics`."""
        log = self.over(self.log)
        product = np.exp(np.clip(log, -_SEQUENCE_BOUND, _SEQUENCE_BOUND))
        columns = {
            "tokens": self.lengths,
            "log": log,
            "log_square": self.over(np.square(self.log)),
            "log_abs": self.over(self.size),
            "excess": self.over(self.excess),
            "excess_square": self.over(np.square(self.excess)),
            "k3": self.over(self.k3),
            "p": self.over(self.p),
            "q": self.over(self.q),
            "p_square": self.over(np.square(self.p)),
            "q_square": self.over(np.square(self.q)),
            "p_q": self.over(self.p * self.q),
            "sequences": np.ones(len(self.responses)),
            "product": product,
            "product_square": np.square(product),
            "ppl_ratio": np.exp(np.minimum(-log / self.lengths, _SEQUENCE_BOUND)),
            "ppl_train": np.exp(np.minimum(-self.over(self.trainer) / self.lengths, _SEQUENCE_BOUND)),
        }
        return np.stack([columns[name] for name in FIELDS], axis=1)

    @cached_property
    def largest(self) -> np.ndarray:
        """Largest log-ratio and -log-ratio of a token, and log-ratio of the product: (responses, 3)."""
        of_tokens = np.maximum.reduceat(np.stack([self.log, -self.log]), self.starts[:-1], axis=1)
        return np.stack([*of_tokens, self.sums[:, FIELDS.index("log")]], axis=1)

    def over(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum over each response (responses,)."""
        return np.add.reduceat(values, self.starts[:-1])

    def per_response(self, column: np.ndarray) -> np.ndarray:
        """Returns a per-response column of the table at the responses with a trained token."""
        return column[self.responses]

    def at_tokens(self, column: np.ndarray) -> np.ndarray:
        """Returns a per-token column of the table at the trained tokens."""
        return column[self.places]

    @cached_property
    def turns(self) -> Turns:
        """The turns of the trained tokens."""
        number = self.at_tokens(self.table.turn_number)
        begin = np.append(True, np.diff(number) != 0)
        begin[self.starts[:-1]] = True
        begins, turn = np.flatnonzero(begin), np.cumsum(begin) - 1
        behind = np.where(number[begins] > 0, begins, -_FAR)
        is_followed = ~np.isin(np.append(begins[1:], self.starts[-1]), self.starts)
        ahead = np.where(is_followed, np.append(begins[1:], 0), _FAR)
        place = np.arange(len(self))
        return Turns(number, place - behind[turn], place - ahead[turn])

    @cached_property
    def cluster(self) -> np.ndarray:
        """The bootstrap cluster of each response, uint64: a hash of its group (and step), or of its index."""
        table = self.table
        if table.group is None:
            return hash_index((self.first + self.responses).astype(np.uint64))
        group = self.per_response(table.group).astype(np.uint64)
        if table.step is not None:
            group = hash_index(group) ^ self.per_response(table.step).astype(np.uint64)
        return hash_index(group)


_OTHERS = ("log_min", "log_max", "product_log_max", "histogram")
FIELDS = tuple(item.name for item in fields(RatioStatistics) if item.name not in _OTHERS)
"""The summed fields of `RatioStatistics`, in the order of `TrainedTokens.sums`."""


def hash_index(numbers: np.ndarray) -> np.ndarray:
    """Returns a uniform, fixed uint64 hash of each number (the SplitMix64 finalizer; Steele et al., OOPSLA 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
