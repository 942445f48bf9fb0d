"""Detects that tokens were drawn from another distribution: `temperature`, `truncated-sampling` and `raw-logprobs`.

`raw-logprobs` is also found if the ratio does not show it, but the file marks log-probs as raw although temperature or
truncation changed the sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.detector import (
    CONFIDENCE_OUTSIDE,
    CauseMatch,
    Context,
    LogprobPairs,
    Residual,
    confidence,
    correlation,
    logit,
    robust_scale,
    share,
    z_of,
)
from trimtab.diagnosis.tokens import TokenTable

MIN_SLOPE = 0.02  # least slope of the line of two temperatures
SLOPE_Z = 6.0  # standard errors of the slope on a line with little spread
SLOPE_Z_WIDE = 8.0  # standard errors of the slope on a line with much spread
TIGHT_SPREAD = 2.5  # residual per unit of slope of a line with little spread
MAX_SPREAD = 6.0  # largest residual, in logits per unit of slope
COARSE_RESIDUAL = 1.0  # residual in logits above which noise flattens the line unevenly [SmolLM2: 1.9]
MAX_SPREAD_COARSE = 2.0  # largest residual per unit of slope of such noise
MIN_EXPLAINED = 0.08  # least share of the variance of shifts on the line
MIN_LIKELIHOOD = 6.0  # nats by which one of two distributions must explain the tokens better
MIN_TRAINER_LIKELIHOOD = 2.0  # nats by which the trainer must explain the tokens better
MIN_DEFICIT = 0.001  # least mass that truncation must cut
DEFICIT_Z = 6.0  # standard errors of the kept mass below 1
BULK_Z = 4.0  # standard errors of the deficit without outliers
MIN_SURE_MASS = 0.65  # least kept mass that top-p and top-k are sure to explain
MAX_UNEVEN = 4.0  # largest ratio of the mean log-ratio to the log of the kept mass
MAX_UP = 0.6  # most tokens that move up for each that moves down
MAX_FAR = 0.002  # share of ratios below 1/e that truncation may have
MAX_FAR_OF_MOVED = 0.05  # plus this part of the tokens that moved down
MAX_PROPORTIONAL = 0.8  # largest correlation of log-ratio and log-prob [zoo: .6; log-base: .94]

FEW_KEPT = 50  # largest top_k that explains a deficit by itself
MAX_STATED_ERROR = 0.15  # largest log of the ratio of the temperature that was found and the one that the file states

ENTROPY_RANGE = (-3.0, 8.0)
CERTAIN, UNCERTAIN = -1e-6, -0.01


@dataclass(frozen=True)
class TemperatureFit:
    """The fit of two temperatures: trainer distribution = (sampler distribution)^a."""

    a: float
    z: float  # of the distance between `a` and 1
    tokens: int  # number of tokens fitted
    part: float  # share of the variance of shifts that lies on the line


@dataclass(frozen=True)
class Truncation:
    """Truncation of the distribution of one side."""

    mass: float  # mean ratio other side / truncated side: the probability that truncation keeps
    z: float  # of the distance between `mass` and 1
    one_sided_zeros: int  # number of tokens with a log-prob of exactly 0 on the truncated side only

    @property
    def confidence(self) -> float:
        if self.mass < MIN_SURE_MASS:
            return CONFIDENCE_OUTSIDE
        return confidence(max(-self.z / 6, self.one_sided_zeros / 5), 1.0)


def find_sampling_faults(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Finds another temperature, truncation, and log-probs that are not of the sampling distribution."""
    swapped = tokens.swapped()
    residual, inverse = Residual.of(tokens), Residual.of(swapped)
    truncation, mirrored = find_truncation(tokens, residual), find_truncation(swapped, inverse)
    if truncation is not None and mirrored is not None:
        truncation, mirrored = (truncation, None) if truncation.mass <= mirrored.mass else (None, mirrored)
    fit = fit_temperature(tokens)
    if (truncation or mirrored) and not _moves_against(tokens, is_sampler_cut=truncation is not None):
        fit = None  # truncation explains the line
    # Tokens were drawn from one of the two distributions: the mean ratio of the other distribution to that one is 1. If
    # that one is the trainer's, noise in its log-probs makes the mean of sampler / trainer a little larger.
    drawn_by_trainer = inverse.mean_is_one != "no" or 0 < inverse.ratio_mean - 1 < 3 * residual.k3
    if truncation is not None or mirrored is not None:
        drawn_by_sampler = mirrored is None
    else:
        drawn_by_sampler = residual.mean_is_one != "no" and not _follows_trainer(tokens, residual, context)

    declared = declared_raw(tokens.table)
    found = [] if declared is None else [("raw-logprobs", *declared)]
    if truncation is not None:
        found.append(("truncated-sampling", truncation.confidence, _truncation_text("sampler", "trainer", truncation)))
    if mirrored is not None and declared is None:
        found.append(("raw-logprobs", mirrored.confidence, _truncation_text("trainer", "sampler", mirrored)))
    if fit is not None and drawn_by_sampler:
        sure = min(confidence(fit.z, 8.0), 0.5 + fit.part)
        is_close = abs(float(tokens.log_ratio.sum())) < MIN_LIKELIHOOD  # tokens are about as likely on both sides
        found.append(("temperature", min(sure, 0.6) if is_close else sure, _temperature_text(fit, residual)))
    elif fit is not None and drawn_by_trainer and declared is None and mirrored is None:
        sure = 0.6 if fit.a < 1 else min(confidence(residual.z, 4.0), 0.5 + fit.part)
        text = (
            f"the mean ratio trainer/sampler is {residual.ratio_mean:.4f} (z = {residual.z:.1f}), that of "
            f"sampler/trainer {inverse.ratio_mean:.4f}: tokens were drawn from the trainer's distribution, for which "
            f"the latter is 1; that is the reported one at a temperature of about {1 / fit.a:.2f}"
        )
        found.append(("raw-logprobs", sure, text))
        if fit.a < 1 and tokens.table.temperature is None:
            found.append(("temperature", 0.5, _temperature_text(fit, residual)))
    direction = 0
    if found and fit is not None:
        direction = 1 if fit.a > 1 else -1
    elif found and (truncation or mirrored):
        direction = -1 if truncation else 1
    stated = _stated(tokens.table, fit, (truncation or mirrored or Truncation(0.0, 0.0, 0)).mass)
    return [
        CauseMatch(name, text, tokens, len(tokens), sure, direction, is_stated=name in stated)
        for name, sure, text in found
    ]


def _stated(table: TokenTable, fit: TemperatureFit | None, mass: float) -> set[str]:
    """Returns the causes that the file's own columns state: the temperature that was found, truncation, raw values.

    mass: the share of the probability that is kept; top-p keeps at least p.
    """
    stated = {"raw-logprobs"} if declared_raw(table) is not None else set()
    known = table.sampling
    temperature = float(np.median(known.get("temperature", 1.0)))
    if fit is not None and 0 < temperature != 1 and abs(math.log(fit.a / temperature)) < MAX_STATED_ERROR:
        stated.add("temperature")
    top_p, top_k = float(np.min(known.get("top_p", 1.0))), int(np.max(known.get("top_k", 0)))
    if (top_p < 1 and mass >= top_p - MIN_DEFICIT) or (top_p == 1 and 0 < top_k <= FEW_KEPT):
        stated.add("truncated-sampling")
    return stated


def fit_temperature(tokens: LogprobPairs) -> TemperatureFit | None:
    """Returns the fit of two temperatures, or None if logits lie on no such line.

    Fits tokens of probability above 1/2, or above 1/10 if they are fewer than 100. Samples of one prompt begin with the
    same tokens in the same context, so repeated pairs of log-probs count once.
    """
    tokens = tokens.distinct
    # Both sides are below -1e-4: a token that is alone in a sampling mask has no logit to compare.
    doubt = np.maximum(tokens.behavior, tokens.trainer) < -1e-4
    use = doubt & (tokens.mean > math.log(0.5))
    if use.sum() < 100:
        use = doubt & (tokens.mean > math.log(0.1))
    if use.sum() < 40:
        return None
    shift = tokens.shift[use]
    middle = 0.5 * (logit(tokens.behavior[use]) + logit(tokens.trainer[use]))
    centered = middle - middle.mean()
    power = float(centered @ centered)
    if power <= 0:
        return None
    slope = float(centered @ shift) / power
    residual = float(np.std(shift - shift.mean() - slope * centered))
    z = abs(slope) / max(residual / math.sqrt(power), 1e-12)
    entropy = float(shift.mean()) / slope - float(middle.mean()) if slope else math.inf
    spread = residual / max(abs(slope), 1e-12)
    part = slope**2 * power / max(float(np.square(shift - shift.mean()).sum()), 1e-300)
    # Weights rounded to four bits also flatten a large model, but unevenly: the residual exceeds one logit.
    tight, coarse = spread < TIGHT_SPREAD, residual >= COARSE_RESIDUAL
    if (
        not MIN_SLOPE <= abs(slope) < 1.9
        or z < (SLOPE_Z if tight else SLOPE_Z_WIDE)
        or spread > (MAX_SPREAD_COARSE if coarse else MAX_SPREAD)
        or part < MIN_EXPLAINED
        or not ENTROPY_RANGE[0] < entropy < ENTROPY_RANGE[1]
    ):
        return None
    return TemperatureFit((1 + slope / 2) / (1 - slope / 2), z, int(use.sum()), part)


def find_truncation(tokens: LogprobPairs, residual: Residual) -> Truncation | None:
    """Returns truncation on the sampler's side, if the data shows it, else None. residual: of these tokens."""
    mass, z = residual.ratio_mean, residual.z
    certain = tokens.behavior > CERTAIN
    if share(certain) > 0.99:  # greedy decoding, or values that never arrived
        return None
    one_sided_zeros = int((certain & (tokens.trainer < UNCERTAIN)).sum())
    just_below = int((~certain & (tokens.behavior > UNCERTAIN)).sum())
    log_ratio = tokens.log_ratio
    up, down = share((log_ratio > 1e-4) & ~certain), share((log_ratio < -1e-4) & ~certain)
    # Noise clamped at probability 1 also leaves zeros, but then the other tokens move in both directions.
    many = one_sided_zeros >= max(5, 0.002 * len(tokens)) and certain.sum() > just_below
    by_zeros = many and up <= MAX_UP * down
    less = mass < 1.0 - MIN_DEFICIT and z < -DEFICIT_Z
    # Lost mass shifts every token about equally; missing large ratios leave the mean log far below the log mean.
    even = mass > 0 and float(log_ratio.mean()) > MAX_UNEVEN * math.log(mass)
    by_mass = less and even and _is_in_bulk(tokens)
    # Top-p keeps at least p of the probability in every context, which bounds the ratio from below.
    far, moved = share(log_ratio < -1.0), share(log_ratio < UNCERTAIN)
    bounded = far <= MAX_FAR + MAX_FAR_OF_MOVED * moved
    # The mass that is lost depends on the context; values in another unit differ in proportion to the log-prob itself.
    proportional = correlation(log_ratio, tokens.mean) > MAX_PROPORTIONAL
    if not (by_zeros or by_mass) or not bounded or proportional:
        return None
    return Truncation(mass, z, one_sided_zeros)


def _is_in_bulk(tokens: LogprobPairs) -> bool:
    """Whether the deficit is spread over undecided tokens, as with lost mass, rather than caused by a few outliers."""
    log_ratio = tokens.log_ratio[tokens.undecided]
    if len(log_ratio) < 20:
        return False
    scale = robust_scale(log_ratio)
    clipped = np.clip(log_ratio, -3 * scale, 3 * scale)
    return z_of(clipped) < -BULK_Z and float(clipped.mean()) < 0.3 * float(log_ratio.mean())


def _moves_against(tokens: LogprobPairs, *, is_sampler_cut: bool) -> bool:
    """Whether tokens move against truncation, which moves log-ratios in one direction only."""
    up = tokens.log_ratio if is_sampler_cut else -tokens.log_ratio
    rare, likely = tokens.mean < -1.5, tokens.behavior > math.log(0.5)
    opposite, lifted = (up > 0.1) & rare, (up > 0.01) & likely
    frequent = opposite.sum() >= 5 and share(opposite[rare]) > 0.15
    return bool(frequent or (lifted.sum() >= 8 and share(lifted) > 0.25))


def _follows_trainer(tokens: LogprobPairs, residual: Residual, context: Context) -> bool:
    """Whether tokens follow the trainer's log-probs rather than the sampler's.

    The sum of log-ratios is the log-likelihood ratio of trainer and sampler. Repaired pairs were selected by it, so
    they need more evidence.
    """
    is_likelier = float(tokens.log_ratio.sum()) > MIN_TRAINER_LIKELIHOOD
    return is_likelier and residual.ratio_mean > 1 and not (context.repaired and residual.z < 4)


def _temperature_text(fit: TemperatureFit, residual: Residual) -> str:
    return (
        f"trainer and sampler have the same distribution at two temperatures, {fit.a:.2f} : 1 (sampler : trainer): "
        f"their logits differ in proportion (z = {fit.z:.0f} over {fit.tokens} tokens); {residual.text}"
    )


def _truncation_text(cut: str, whole: str, truncation: Truncation) -> str:
    return (
        f"the {cut}'s distribution is truncated and the {whole}'s is not: the mean ratio {whole}/{cut} is "
        f"{truncation.mass:.4f} (z = {truncation.z:.1f}), the share of the probability that is kept, and at "
        f"{truncation.one_sided_zeros} tokens the {cut}'s log-prob alone is exactly 0"
    )


def declared_raw(table: TokenTable) -> tuple[float, str] | None:
    """Returns confidence and evidence if the file says that log-probs are not of the sampling distribution."""
    if table.raw is None:
        return None
    processed = np.zeros(table.responses, dtype=bool)
    if table.temperature is not None:
        processed |= (table.temperature != 1) & np.isfinite(table.temperature)
    if table.top_p is not None:
        processed |= table.top_p < 1
    if table.top_k is not None:
        processed |= table.top_k > 0
    wrong = int((processed & table.raw.astype(bool)).sum())
    if not wrong:
        return None
    return 0.99, (
        f"the file marks the log-probs of {wrong} of {table.responses} responses as raw, and these were sampled at "
        "another temperature than 1 or from a truncated distribution"
    )
