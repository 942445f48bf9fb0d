"""What a detector of causes receives and returns, and the size of the mismatch before and after a repair.

If tokens are drawn from the reported distribution, E[trainer / sampler] = 1, whatever the rounding. The sample mean of
heavy-tailed ratios is unreliable: it is below 1 while large ratios are missing, and one token may move it. So a mean
above 1 counts only if an e-value exceeds `CONTRACT_BET` (the product of 1 + λ (ratio - 1), whose expectation is 1,
averaged over λ), and a mean below 1 only if further tokens with large ratios would leave it below. Where the standard
error is large, the test says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from trimtab.diagnosis.causes.evidence import z_of
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs
from trimtab.diagnosis.records import Settings
from trimtab.diagnosis.tokens import excess

LEAST_RMS = 4e-4  # logits: two float32 forwards, or the rounding of the file, move less
LEAST_K3 = 1e-8  # k3 of two float32 forwards
CONTRACT_Z = 5.0  # standard errors of the mean ratio from 1 beyond which it is wrong
CONTRACT_BET = 9.2  # log of the e-value beyond which the mean is above 1 [Ville's inequality: 1e-4]
CONTRACT_CLOSE = 0.001  # a mean this close to 1 is always accepted
CONTRACT_SILENT = 0.2  # standard error beyond which the mean ratio says nothing
CONFIDENCE_OUTSIDE = 0.45  # where the mean ratio stays wrong; plus half the squared share of k3 that was removed

_LAMBDAS = np.array([0.01, 0.03, 0.1, 0.3, 0.8])
UNSEEN_TOKENS = 3
"""Tokens with a large ratio that a sample may lack by chance (the 95% bound on a count of which none was seen)."""
UNSEEN_FACTOR = 2
"""How many times the largest excess that was seen theirs may be."""


Contract = Literal["inside", "outside", "silent"]


@dataclass(frozen=True)
class Residual:
    """The mismatch of some tokens: its size, and whether they follow the log-probs that the sampler reports.

    z: standard errors of the mean ratio from 1 (tokens are a martingale, so that responses are no clusters). contract:
    whether the mean ratio can be 1: inside, outside, or silent where it says nothing.
    """

    tokens: int
    k3: float
    ratio_mean: float
    z: float
    contract: Contract

    @classmethod
    def of(cls, tokens: LogprobPairs) -> Residual:
        if not len(tokens):
            return cls(0, 0.0, 1.0, 0.0, "silent")
        of_tokens = excess(tokens.log_ratio)
        mean = float(of_tokens.mean())
        return cls(len(tokens), float(tokens.k3.mean()), 1 + mean, z_of(of_tokens), contract(of_tokens))

    @property
    def total(self) -> float:
        return self.k3 * self.tokens

    @property
    def text(self) -> str:
        says = {"inside": "", "outside": ", too far off", "silent": ", but a few tokens decide it"}
        return f"mean ratio {self.ratio_mean:.4g} (expected: 1{says[self.contract]})"


def contract(excess: np.ndarray) -> Contract:
    """Judges the mean of ratio - 1 over tokens of which the denominator sampled."""
    mean = float(excess.mean())
    error = max(float(excess.std()) / np.sqrt(len(excess)), 1e-12)
    smallest = max(CONTRACT_CLOSE, CONTRACT_Z * error)
    if mean > smallest:
        log_wealth = np.log1p(_LAMBDAS[:, None] * excess).sum(1)
        log_e_value = np.logaddexp.reduce(log_wealth) - np.log(len(_LAMBDAS))
        if log_e_value > CONTRACT_BET or excess.max() < 0.5:
            return "outside"
    unseen = UNSEEN_TOKENS * UNSEEN_FACTOR * max(float(excess.max()), 0.0) / len(excess)
    if mean + unseen < -smallest:
        return "outside"
    return "silent" if error > CONTRACT_SILENT else "inside"


@dataclass(frozen=True, eq=False)
class CauseMatch:
    """A cause that the tokens show, with its repair.

    remaining: the tokens once it is undone, empty where nothing can be restored. tokens: how many it concerns.
    max_confidence: the largest confidence that the kind of evidence allows. direction: +1 or -1 where the cause stays
    in `remaining` since it cannot be undone for each token, the direction in which it moves the logits of likely
    tokens; otherwise 0. is_final: whether nothing else can be said of the tokens. is_stated: as in `records.Cause`.
    """

    name: str
    evidence: str
    remaining: LogprobPairs
    tokens: int
    max_confidence: float = 0.99
    direction: int = 0
    is_final: bool = False
    is_stated: bool = False


@dataclass(frozen=True)
class Context:
    """What detectors know besides the tokens.

    floor: k3 of the file's rounding. settings: of the run's recipe, if known. repaired: whether a cause was undone.
    direction: of a cause that was found and cannot be undone (`CauseMatch.direction`); 0 for none. assumes_current:
    whether ages are those of a synchronous trainer, not recorded.
    """

    floor: float
    settings: Settings | None
    repaired: bool = False
    direction: int = 0
    assumes_current: bool = False


class Detector(Protocol):
    """Finds causes in tokens, each with the tokens that remain once it is undone: the proposed repair."""

    def __call__(self, tokens: LogprobPairs, context: Context, /) -> list[CauseMatch]: ...
