"""Detects violations of the sampling contract: `temperature`, `truncated-sampling`, `raw-logprobs`.

Let mu be the distribution tokens were drawn from. If the sampler reports mu, then E[pi/mu] is the mass pi gives to
mu's support: 1, or the kept mass under top-p, top-k and min-p. If it reports q instead and the trainer has mu, then
E[q/mu] is that mass: the inverse ratio is the one with mean 1. So what a raw log-prob does to a trainer that is right
is the mirror image of what a wrong trainer does, and every test is run on (sampler, trainer) and on (trainer, sampler):

  shape                                          sampler's log-probs are true     trainer's are
  temperature: logit pi = a logit mu + (a-1) h   temperature                      raw-logprobs
  truncation: log-ratio = log kept mass <= 0     truncated-sampling               raw-logprobs

Temperature is named when a line through (mean logit, logit difference) at tokens more likely than not has a slope
beyond `STEEP` standard errors (`CLEAR` on a tight line) and leaves at most `SPREAD` logits for each unit of slope
(`LOOSE` where that is more than half a logit):
Renyi entropies of the tokens not sampled differ that much between contexts, noise of any kind by far more.

Truncation is named when the mean ratio is below 1 by `DEEP` standard errors (and `DEFICIT`), the log-ratio leans down
and has no wide upper tail; or when tokens have log-prob exactly 0 for one side, hardly any are just below 0, and the
other side disagrees: such a token was alone in its kept set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import Tokens, logit, share, z_of

SPREAD, TIGHT, SLOPE, STEEP, CLEAR = 6.0, 2.5, 0.02, 8.0, 6.0
# Weights rounded to four bits also flatten a large model, but far from evenly: what is left is over a logit.
HALF, LOOSE = 0.5, 2.0
HOLD = (-3.0, 8.0)
DEFICIT, DEEP, BULK = 1e-3, 6.0, 4.0
ALONE, CLOSE, DISAGREES = -1e-6, -0.01, -0.01
WIDE, WIDE_SHARE, UNEVEN, ONE_WAY = 0.5, 0.01, 4.0, 0.6
LOG_RATIO_MOST = 20.0


@dataclass(frozen=True)
class Line:
    """a: exponent that leads from the sampler's to the trainer's distribution. z: of its distance from 1.
    spread: logits left over for each unit of slope. tokens: fitted."""

    a: float
    z: float
    spread: float
    tokens: int


@dataclass(frozen=True)
class Cut:
    """Truncation on the sampler's side. mass: mean ratio. z: of its distance from 1. alone: tokens the sampler gave
    log-prob exactly 0 and the trainer did not; zeros: share of all tokens at exactly 0."""

    mass: float
    z: float
    alone: int
    zeros: float


def mean_ratio(tokens: Tokens) -> tuple[float, float]:
    """Mean of trainer over sampler, and the z of its distance from 1 (tokens are a martingale: no clustering)."""
    excess = np.expm1(np.clip(tokens.log_ratio, -LOG_RATIO_MOST, LOG_RATIO_MOST))
    return 1.0 + float(excess.mean()), z_of(excess)


def temperature_line(tokens: Tokens) -> Line | None:
    """The line of two temperatures, if the data lies on one; less likely tokens are asked where too few are likely.

    Samples of one prompt begin with the same tokens in the same context: what repeats in both columns is one fact.
    """
    tokens = tokens.kept(_first_seen(tokens))
    mean = 0.5 * (tokens.behavior + tokens.trainer)
    # Below -1e-4 on both sides: a token alone in its kept set has no logit to compare.
    doubt = np.maximum(tokens.behavior, tokens.trainer) < -1e-4
    use = doubt & (mean > math.log(0.5))
    if use.sum() < 100:
        use = doubt & (mean > math.log(0.1))
    if use.sum() < 40:
        return None
    shift = tokens.shift[use]
    middle = 0.5 * (logit(tokens.behavior[use]) + logit(tokens.trainer[use]))
    centered = middle - middle.mean()
    power = float(centered @ centered)
    if power <= 0:
        return None
    slope = float(centered @ shift) / power
    left = float(np.std(shift - shift.mean() - slope * centered))
    z = abs(slope) / max(left / math.sqrt(power), 1e-12)
    hold = float(shift.mean()) / slope - float(middle.mean()) if slope else math.inf
    spread = left / max(abs(slope), 1e-12)
    if (
        abs(slope) < SLOPE
        or z < (CLEAR if spread < TIGHT else STEEP)
        or spread > (SPREAD if left < HALF else LOOSE)
        or not HOLD[0] < hold < HOLD[1]
        or abs(slope) >= 1.9
    ):
        return None
    return Line((1 + slope / 2) / (1 - slope / 2), z, spread, int(use.sum()))


def _first_seen(tokens: Tokens) -> np.ndarray:
    """The first token of each pair of log-probs (tokens,)."""
    pairs = np.stack([tokens.behavior, tokens.trainer], axis=1)
    first = np.zeros(len(tokens), dtype=bool)
    first[np.unique(pairs, axis=0, return_index=True)[1]] = True
    return first


def cut_off(tokens: Tokens) -> Cut | None:
    """Truncation on the sampler's side, if the data shows it."""
    mass, z = mean_ratio(tokens)
    certain = tokens.behavior > ALONE
    alone = int((certain & (tokens.trainer < DISAGREES)).sum())
    just_below = int(((tokens.behavior <= ALONE) & (tokens.behavior > CLOSE)).sum())
    log_ratio = tokens.log_ratio
    up, down = share((log_ratio > 1e-4) & ~certain), share((log_ratio < -1e-4) & ~certain)
    # Noise cut off at probability 1 also leaves zeros, but the tokens that are not at 0 go both ways.
    by_zeros = alone >= max(5, 0.002 * len(tokens)) and certain.sum() > just_below and up <= ONE_WAY * down
    leans = share(log_ratio > 1e-4) < 0.8 * share(log_ratio < -1e-4)
    # A wide ratio has a mean below 1 until its rare large values are sampled.
    wide = share(log_ratio > WIDE) > WIDE_SHARE
    # Lost mass costs every token about as much; unsampled large ratios leave a mean log far below the log of the mean.
    even = mass > 0 and float(log_ratio.mean()) > UNEVEN * math.log(mass)
    by_mass = mass < 1.0 - DEFICIT and z < -DEEP and leans and even and not wide and _in_bulk(tokens)
    if not (by_zeros or by_mass):
        return None
    return Cut(mass, z, alone, share(certain))


def _in_bulk(tokens: Tokens) -> bool:
    """Whether ordinary undecided tokens carry the deficit, as lost mass does, rather than a few far ones."""
    log_ratio = tokens.log_ratio[tokens.middle]
    if len(log_ratio) < 20:
        return False
    scale = 1.48 * float(np.median(np.abs(log_ratio)))
    held = np.clip(log_ratio, -3 * scale, 3 * scale)
    return z_of(held) < -BULK and float(held.mean()) < 0.3 * float(log_ratio.mean())
