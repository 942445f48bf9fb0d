"""What is left of a mismatch: its size, and whether the tokens follow the log-probs that the sampler reports.

For tokens drawn from the reported distribution E[trainer/sampler] = 1, whatever rounding does. The mean of a few heavy
ratios is close to nothing: it lies below 1 as long as large ones are missing, and one token may move it. So a mean
above 1 must also win a bet against the contract (a product of 1 + λ (ratio - 1), whose expectation is 1, averaged over
λ), a mean below 1 must stay there with three tokens more of twice the largest ratio, and where the standard error is
large the contract says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs
from trimtab.diagnosis.records import Settings
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

_BETS = np.array([0.01, 0.03, 0.1, 0.3, 0.8])
_BOUND = 20.0


@dataclass(frozen=True)
class Left:
    """Size of a mismatch, and `contract`: inside, outside, or silent where the mean ratio says nothing."""

    tokens: int
    k3: float
    ratio_mean: float
    contract: str

    @classmethod
    def of(cls, tokens: LogprobPairs) -> Left:
        log_ratio = np.clip(tokens.log_ratio, -_BOUND, _BOUND)
        if not len(log_ratio):
            return cls(0, 0.0, 1.0, "silent")
        excess = np.expm1(log_ratio)
        mean, count = float(excess.mean()), len(excess)
        return cls(count, float((excess - log_ratio).mean()), 1 + mean, _contract(excess, mean))

    @property
    def total(self) -> float:
        return self.k3 * self.tokens

    @property
    def text(self) -> str:
        says = {"inside": "as it must be", "outside": "where 1 is needed", "silent": "which says nothing here"}
        return f"mean ratio {self.ratio_mean:.4g}, {says[self.contract]}"


def _contract(excess: np.ndarray, mean: float) -> str:
    error = max(float(excess.std()) / np.sqrt(len(excess)), 1e-12)
    needed = LIMITS["contract-z"]
    if mean > LIMITS["contract-close"] and mean > needed * error:
        bets = np.log1p(_BETS[:, None] * excess).sum(1)
        wins = np.logaddexp.reduce(bets) - np.log(len(_BETS)) > LIMITS["contract-bet"]
        if wins or excess.max() < 0.5:
            return "outside"
    unseen = 3 * 2 * max(float(excess.max()), 0.0) / len(excess)
    if mean + unseen < -LIMITS["contract-close"] and mean + unseen < -needed * error:
        return "outside"
    return "silent" if error > LIMITS["contract-silent"] else "inside"


@dataclass(frozen=True)
class TemperatureFit:
    """The fit of two temperatures: trainer distribution = (sampler distribution)^a.

    z: of the distance of a from 1. spread: residual in logits per unit of slope. tokens: number of tokens fitted.
    part: share of the variance of shifts that lies on the line.
    """

    a: float
    z: float
    spread: float
    tokens: int
    part: float


@dataclass(frozen=True)
class Against:
    """A systematic shape that log-ratios follow, against which noise is measured: `precision.noise_lower_bound`."""

    line: TemperatureFit | None
    sampler_cut: bool


@dataclass(frozen=True, eq=False)
class Finding:
    """A cause and its repair.

    rest: the tokens once it is undone, empty where nothing can be restored. tokens: how many it concerns. at_most: the
    largest confidence that the kind of evidence allows. against: the shape that log-ratios still follow in `rest`,
    where the cause cannot be undone for each token. is_final: whether nothing else can be said of the tokens.
    """

    name: str
    evidence: str
    fix: str
    rest: LogprobPairs
    tokens: int
    at_most: float = 0.99
    against: Against | None = None
    is_final: bool = False


@dataclass(frozen=True)
class Context:
    """What detectors know besides the tokens.

    floor: k3 of the file's rounding. settings: of the run's recipe, if known. repaired: whether a cause was undone.
    against: the shape that log-ratios follow because of a cause that cannot be undone.
    """

    floor: float
    settings: Settings | None
    repaired: bool = False
    against: Against | None = None


class Detector(Protocol):
    """Finds causes in tokens, each with the tokens that remain once it is undone: the proposed repair."""

    def __call__(self, tokens: LogprobPairs, context: Context, /) -> list[Finding]: ...
