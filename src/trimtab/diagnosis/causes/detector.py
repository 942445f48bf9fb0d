"""Inputs and results of the detectors of causes: tokens with both log-probs, statistics, and a proposed repair.

Differences of log-probs are converted to logits, since noise moves all logits by about the same size.

If tokens are drawn from the reported distribution, E[trainer / sampler] = 1, whatever the rounding. The sample mean of
heavy-tailed ratios is unreliable: it is below 1 until a large ratio is drawn, and one token may move it. So a mean
above 1 counts only if the log of an e-value exceeds `MEAN_LOG_E_VALUE` (the product of 1 + λ (ratio - 1), whose
expectation is 1, averaged over λ). A mean below 1 counts only if it would stay below 1 with a few more large ratios. If
the standard error is large, the test says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from trimtab.diagnosis.records import Numerics
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable, excess, k3

MAX_LOGP = -1e-7  # the log-prob closest to 0 that float32 distinguishes from it; logits are clamped there

UNDECIDED = (-5.0, -0.05)
"""Range of the mean log-prob of trainer and sampler in which both probabilities are precise and noise is visible."""


def logit(logp: np.ndarray) -> np.ndarray:
    """Returns log(p / (1 - p)) of log p, clamped at `MAX_LOGP`."""
    logp = np.minimum(logp, MAX_LOGP)
    return logp - np.log(-np.expm1(logp))


@dataclass(frozen=True, eq=False)
class LogprobPairs:
    """Trained tokens of a table, each with the log-probs of sampler and trainer; arrays are (tokens,).

    Other columns are the table's columns at these tokens; None if the data lacks them.
    """

    table: TokenTable
    index: np.ndarray  # index of each token in the table, ascending
    behavior: np.ndarray  # float64, finite, at most 0; a repair may replace it
    trainer: np.ndarray  # float64, finite, at most 0; a repair may replace it

    @classmethod
    def of(cls, table: TokenTable) -> LogprobPairs:
        """Returns the trained tokens whose log-probs are finite and at most 0 (up to rounding), in order."""
        index = np.flatnonzero(table.mask & np.isfinite(table.behavior) & np.isfinite(table.trainer))
        index = index[np.maximum(table.behavior, table.trainer)[index] <= MAX_ROUNDED_LOGP]
        behavior, trainer = (
            np.minimum(values[index].astype(np.float64), 0.0) for values in (table.behavior, table.trainer)
        )
        return cls(table, index, behavior, trainer)

    @staticmethod
    def concat(parts: Sequence[LogprobPairs]) -> LogprobPairs:
        """Joins selections of tokens of one table, in the order of the table."""
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
        """The number of context tokens before each token, without the prompts if any of their lengths is unknown."""
        prompt = self.of_response(self.table.prompt_length)
        return self.position + (prompt if prompt is not None and np.isfinite(prompt).all() else 0.0)

    @cached_property
    def turn(self) -> np.ndarray:
        """The turn of each token, from 0. Without a column of turns, a turn begins after each untrained stretch."""
        return self.table.turn_number[self.index]

    @cached_property
    def since_turn(self) -> np.ndarray:
        """The number of tokens, trained or not, since the first trained token of the turn."""
        trained = np.flatnonzero(self.table.mask)
        turn, row = self.table.turn_number[trained], self.table.row[trained]
        begins = (np.diff(turn, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0)
        first = np.maximum.accumulate(np.where(begins, trained, 0))
        return self.index - first[np.searchsorted(trained, self.index)]

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
        """The first token of each distinct pair of log-probs: samples of one prompt share first tokens and errors."""
        # Pairs are sorted as complex numbers: sorting rows takes six times as long.
        pairs = np.stack([self.behavior, self.trainer], axis=1).view(np.complex128)[:, 0]
        return self.select(np.sort(np.unique(pairs, return_index=True)[1]))

    def select(self, keep: np.ndarray) -> LogprobPairs:
        """Returns the tokens at `keep`, a mask or indices."""
        return self.repaired(self.trainer, keep)

    def repaired(self, trainer: np.ndarray, keep: np.ndarray) -> LogprobPairs:
        """Returns the tokens at `keep`, a mask or indices, with `trainer` (all tokens) as the trainer's log-probs."""
        return LogprobPairs(self.table, self.index[keep], self.behavior[keep], trainer[keep])

    def swapped(self) -> LogprobPairs:
        """Returns the tokens with trainer and sampler exchanged."""
        return LogprobPairs(self.table, self.index, self.trainer, self.behavior)

    def of_response(self, values: np.ndarray | None) -> np.ndarray | None:
        """Returns a per-response column at each token."""
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


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Pearson's correlation; 0 if a side is constant."""
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def centered(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns each value minus the mean of its group."""
    _, group = np.unique(group, return_inverse=True)
    return values - (np.bincount(group, values) / np.bincount(group))[group]


def slope_of(y: np.ndarray, x: np.ndarray, cluster: np.ndarray | None = None) -> tuple[float, float]:
    """Returns the least-squares slope of y over x, both centered, and its z; (0, 0) if x does not vary.

    The standard error is robust to unequal variances, and to dependence between values of the same cluster.
    """
    power = float(x @ x)
    if power <= 0:
        return 0.0, 0.0
    slope = float(x @ y) / power
    score = x * (y - slope * x)
    if cluster is not None:
        score = np.bincount(np.unique(cluster, return_inverse=True)[1], score)
    error = float(np.sqrt(np.square(score).sum())) / power
    return slope, slope / max(error, 1e-12)


def rms_of(shift: np.ndarray) -> float:
    """Returns the root mean square."""
    return float(np.sqrt(np.square(shift).mean()))


def robust_scale(values: np.ndarray) -> float:
    """Returns the standard deviation of the normal distribution around 0 with the same median |value|."""
    return 1.48 * float(np.median(np.abs(values)))


def usual_rms(shift: np.ndarray) -> float:
    """Returns the root mean square of values clipped at five robust scales, so that outliers do not decide it."""
    bound = 5 * robust_scale(shift)
    return rms_of(np.clip(shift, -bound, bound))


def log_size(shift: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the size of each shift, plus 1e-6 so that it is finite."""
    return np.log(np.abs(shift) + 1e-6)


def growth_of(old: np.ndarray, young: np.ndarray) -> tuple[float, float]:
    """Returns the geometric mean size of `old` relative to that of `young`, and the z of its logarithm."""
    left, right = log_size(old), log_size(young)
    difference = float(left.mean() - right.mean())
    error = np.sqrt(left.var() / len(left) + right.var() / len(right))
    return float(np.exp(difference)), difference / max(float(error), 1e-12)


def confidence(strength: float, needed: float) -> float:
    """Returns a confidence in (0.5, 0.99] that grows with the ratio of a statistic to its threshold."""
    return round(float(min(0.99, 1.0 - 0.45 / max(strength / needed, 1.0))), 2)


LEAST_RMS = 4e-4  # logits: two float32 forwards, or the rounding of the file, move less
LEAST_K3 = 1e-8  # k3 of two float32 forwards
MEAN_Z = 5.0  # standard errors of the mean ratio from 1 beyond which it is wrong
MEAN_LOG_E_VALUE = 9.2  # log of the e-value beyond which the mean is above 1 [Ville's inequality: 1e-4]
MEAN_CLOSE = 0.001  # a mean this close to 1 is always accepted
MAX_MEAN_ERROR = 0.2  # standard error beyond which the mean ratio says nothing
CONFIDENCE_OUTSIDE = 0.45  # where the mean ratio stays wrong; plus half the squared share of k3 that was removed

_LAMBDAS = np.array([0.01, 0.03, 0.1, 0.3, 0.8])
UNSEEN_TOKENS = 3
"""Tokens with a large ratio that a sample may lack by chance (the 95% bound on a count of which none was seen)."""
UNSEEN_FACTOR = 2  # how many times the largest excess that was seen theirs may be


MeanIsOne = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Residual:
    """The mismatch of some tokens: its size, and whether they can be samples of the reported distribution."""

    tokens: int
    k3: float
    ratio_mean: float
    z: float  # standard errors between the mean ratio and 1; tokens form a martingale, so responses are not clusters
    mean_is_one: MeanIsOne  # whether the mean ratio can be 1, as with correct log-probs; unknown if a few tokens decide

    @classmethod
    def of(cls, tokens: LogprobPairs) -> Residual:
        if not len(tokens):
            return cls(0, 0.0, 1.0, 0.0, "unknown")
        of_tokens = excess(tokens.log_ratio)
        mean = float(of_tokens.mean())
        return cls(len(tokens), float(tokens.k3.mean()), 1 + mean, z_of(of_tokens), judge_mean(of_tokens))

    @property
    def total(self) -> float:
        return self.k3 * self.tokens

    @property
    def text(self) -> str:
        says = {"yes": "", "no": ", too far off", "unknown": ", but a few tokens decide it"}
        return f"mean ratio {self.ratio_mean:.4g} (expected: 1{says[self.mean_is_one]})"


def judge_mean(above: np.ndarray) -> MeanIsOne:
    """Returns whether the mean ratio can be 1. above: ratio - 1 of tokens sampled from the ratio's denominator."""
    mean = float(above.mean())
    error = max(float(above.std()) / np.sqrt(len(above)), 1e-12)
    smallest = max(MEAN_CLOSE, MEAN_Z * error)
    if mean > smallest:
        log_products = np.log1p(_LAMBDAS[:, None] * above).sum(1)
        log_e_value = np.logaddexp.reduce(log_products) - np.log(len(_LAMBDAS))
        if log_e_value > MEAN_LOG_E_VALUE or above.max() < 0.5:
            return "no"
    unseen = UNSEEN_TOKENS * UNSEEN_FACTOR * max(float(above.max()), 0.0) / len(above)
    if mean + unseen < -smallest:
        return "no"
    return "unknown" if error > MAX_MEAN_ERROR else "yes"


@dataclass(frozen=True, eq=False)
class CauseMatch:
    """A cause that a detector found in tokens, with its repair."""

    name: str
    evidence: str
    remaining: LogprobPairs  # the tokens once the cause is undone; empty if nothing can be restored
    tokens: int  # number of affected tokens
    max_confidence: float = 0.99  # largest confidence that this kind of evidence allows
    direction: int = 0  # 0 if repairable per token; else the sign of its shift on likely tokens, kept in `remaining`
    is_final: bool = False  # whether nothing else can be said about the tokens
    is_stated: bool = False  # as in `records.Cause`


@dataclass(frozen=True)
class Context:
    """What detectors know besides the tokens."""

    floor: float  # k3 of the file's rounding
    numerics: Numerics | None  # from the run's recipe or the user, if known
    repaired: bool = False  # whether a cause was undone
    direction: int = 0  # `CauseMatch.direction` of an earlier cause that cannot be undone; 0 for none
    assumes_current: bool = False  # whether ages are not recorded, but assumed as of a synchronous trainer


Detector = Callable[[LogprobPairs, Context], list[CauseMatch]]
"""Finds causes in tokens, each with the tokens that remain once it is undone: the proposed repair."""
