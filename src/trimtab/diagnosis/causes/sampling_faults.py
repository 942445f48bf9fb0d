"""Detects violations of the sampling contract: `temperature`, `truncated-sampling` and `raw-logprobs`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence, logit, share, z_of
from trimtab.diagnosis.causes.raw_logprobs import find_undeclared_raw
from trimtab.diagnosis.causes.what_is_left import Against, Context, Finding, Left, TemperatureFit
from trimtab.diagnosis.records import Cause
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

# Weights rounded to four bits also flatten a large model, but unevenly: the residual exceeds one logit.
ENTROPY_RANGE = (-3.0, 8.0)
CERTAIN, NEARLY_CERTAIN, UNCERTAIN = -1e-6, -0.01, -0.01
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Truncation:
    """Truncation on the sampler's side.

    mass: mean ratio. z: of its distance from 1. one_sided_zeros: number of tokens with a log-prob of exactly 0
    from the sampler and not from the trainer. zeros: share of all tokens at exactly 0.
    """

    mass: float
    z: float
    one_sided_zeros: int
    zeros: float


def mean_ratio(tokens: LogprobPairs) -> tuple[float, float]:
    """Returns the mean of trainer/sampler and the z of its distance from 1 (no clustering: tokens are a martingale)."""
    excess = np.expm1(np.clip(tokens.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return 1.0 + float(excess.mean()), z_of(excess)


def fit_temperature(tokens: LogprobPairs) -> TemperatureFit | None:
    """Returns the fit of two temperatures, if the data has such a line; few likely tokens are complemented by others.

    Samples of one prompt begin with the same tokens in the same context, so repeated pairs of log-probs count once.
    """
    tokens = tokens.distinct
    mean = 0.5 * (tokens.behavior + tokens.trainer)
    # Below -1e-4 on both sides: the only token of a sampling mask has no logit to compare.
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
    residual = float(np.std(shift - shift.mean() - slope * centered))
    z = abs(slope) / max(residual / math.sqrt(power), 1e-12)
    entropy = float(shift.mean()) / slope - float(middle.mean()) if slope else math.inf
    spread = residual / max(abs(slope), 1e-12)
    part = slope**2 * power / max(float(np.square(shift - shift.mean()).sum()), 1e-300)
    tight, coarse = spread < LIMITS["temperature-tight"], residual >= LIMITS["temperature-residual"]
    if (
        not LIMITS["temperature-slope"] <= abs(slope) < 1.9
        or z < LIMITS["temperature-z" if tight else "temperature-z-wide"]
        or spread > LIMITS["temperature-spread-coarse" if coarse else "temperature-spread"]
        or part < LIMITS["temperature-explains"]
        or not ENTROPY_RANGE[0] < entropy < ENTROPY_RANGE[1]
    ):
        return None
    return TemperatureFit((1 + slope / 2) / (1 - slope / 2), z, spread, int(use.sum()), part)


def find_truncation(tokens: LogprobPairs) -> Truncation | None:
    """Returns truncation on the sampler's side, if the data shows it."""
    mass, z = mean_ratio(tokens)
    certain = tokens.behavior > CERTAIN
    if share(certain) > 0.99:  # greedy decoding, or values that never arrived
        return None
    one_sided_zeros = int((certain & (tokens.trainer < UNCERTAIN)).sum())
    just_below = int(((tokens.behavior <= CERTAIN) & (tokens.behavior > NEARLY_CERTAIN)).sum())
    log_ratio = tokens.log_ratio
    up, down = share((log_ratio > 1e-4) & ~certain), share((log_ratio < -1e-4) & ~certain)
    # Noise clamped at probability 1 also leaves zeros, but then the other tokens move in both directions.
    many = one_sided_zeros >= max(5, 0.002 * len(tokens)) and certain.sum() > just_below
    by_zeros = many and up <= LIMITS["truncated-up"] * down
    leans = share(log_ratio > 1e-4) < 0.8 * share(log_ratio < -1e-4)
    # Lost mass shifts every token about equally; missing large ratios leave the mean log far below the log mean.
    even = mass > 0 and float(log_ratio.mean()) > LIMITS["truncated-uneven"] * math.log(mass)
    less = mass < 1.0 - LIMITS["truncated-deficit"] and z < -LIMITS["truncated-z"]
    by_mass = less and leans and even and _is_in_bulk(tokens)
    # What top-p keeps bounds the ratio from below in every context.
    far, moved = share(log_ratio < -1.0), share(log_ratio < UNCERTAIN)
    if not (by_zeros or by_mass) or far > LIMITS["truncated-far"] + LIMITS["truncated-moved"] * moved:
        return None
    return Truncation(mass, z, one_sided_zeros, share(certain))


def _is_in_bulk(tokens: LogprobPairs) -> bool:
    """Whether the deficit is spread over undecided tokens, as with lost mass, rather than caused by a few outliers."""
    log_ratio = tokens.log_ratio[tokens.middle]
    if len(log_ratio) < 20:
        return False
    scale = 1.48 * float(np.median(np.abs(log_ratio)))
    clipped = np.clip(log_ratio, -3 * scale, 3 * scale)
    return z_of(clipped) < -LIMITS["truncated-bulk-z"] and float(clipped.mean()) < 0.3 * float(log_ratio.mean())


FIX_TEMPERATURE = (
    "Divide the trainer's logits by the sampling temperature before the log-softmax, and have the sampler return "
    "log-probs after temperature (vLLM: logprobs_mode=processed_logprobs)."
)
FIX_CUT = (
    "Sample with top_p = 1, top_k = 0 and min_p = 0, or record the kept token ids and renormalize the trainer's "
    "distribution over them."
)
FIX_RAW = (
    "Have the sampler return the log-probs of the distribution it samples from (vLLM: "
    "logprobs_mode=processed_logprobs), not those of the model before temperature and truncation."
)


def find_sampling_faults(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Finds another temperature, truncation, and log-probs of another distribution than the sampling one."""
    declared, fit = _declared_raw(tokens), fit_temperature(tokens)
    # Tokens were drawn from one of the two distributions, so that the mean ratio of the other one to it is 1. The
    # trainer's is that with noise, which makes the mean of the inverse a little larger.
    reported, inverse = Left.of(tokens), Left.of(tokens.swapped())
    drawn_by_sampler = reported.contract != "outside"
    drawn_by_trainer = inverse.contract != "outside" or 0 < inverse.ratio_mean - 1 < 3 * reported.k3
    truncation, mirrored = find_truncation(tokens), find_truncation(tokens.swapped())
    if truncation is not None and mirrored is not None:
        truncation, mirrored = (truncation, None) if truncation.mass <= mirrored.mass else (None, mirrored)
    if truncation is not None or mirrored is not None:
        fit = _fit_despite_truncation(tokens, fit, sampler_cut=truncation is not None)
    causes = [] if declared is None else [declared]
    sampler = _follows_sampler(tokens, fit, truncation, mirrored, repaired=context.repaired)
    sampler = sampler and (drawn_by_sampler or truncation is not None)
    if truncation is not None:
        causes.append(_truncation_cause(truncation, len(tokens)))
    if mirrored is not None and declared is None:
        causes.append(_raw_truncation_cause(mirrored, len(tokens)))
    if fit is not None and sampler:
        causes.append(_temperature_cause(tokens, fit))
    elif fit is not None and drawn_by_trainer and declared is None and mirrored is None:
        causes.append(_raw_temperature_cause(tokens, fit))
        if fit.a < 1 and tokens.table.temperature is None:
            causes.append(_temperature_cause(tokens, fit, doubtful=True))
    if not causes and (hidden := find_undeclared_raw(tokens)) is not None:
        causes.append(Cause("raw-logprobs", *hidden, FIX_RAW))
    systematic = bool(causes) and (fit is not None or truncation is not None or mirrored is not None)
    against = Against(fit, sampler_cut=truncation is not None) if systematic else None
    return [_finding(cause, tokens, against) for cause in causes]


def _finding(cause: Cause, rest: LogprobPairs, against: Against | None = None) -> Finding:
    return Finding(cause.name, cause.evidence, cause.fix, rest, len(rest), cause.confidence, against)


def _declared_raw(tokens: LogprobPairs) -> Cause | None:
    """Returns a cause if the file marks log-probs as raw although temperature or truncation changed the sampling."""
    table = tokens.table
    if table.raw is None:
        return None
    processed = np.zeros(table.responses, dtype=bool)
    if table.temperature is not None:
        processed |= (table.temperature != 1) & np.isfinite(table.temperature)
    if table.top_p is not None:
        processed |= table.top_p < 1
    if table.top_k is not None:
        processed |= table.top_k > 0
    wrong = processed & table.raw.astype(bool)
    if not wrong.any():
        return None
    evidence = (
        f"{int(wrong.sum())} of {table.responses} responses were sampled with a temperature or truncation of their own "
        f"and carry log-probs marked raw"
    )
    return Cause("raw-logprobs", 0.99, evidence, FIX_RAW)


def _fit_despite_truncation(
    tokens: LogprobPairs, fit: TemperatureFit | None, *, sampler_cut: bool
) -> TemperatureFit | None:
    """Returns the fit if truncation does not explain it: truncation moves log-ratios in one direction only."""
    up = tokens.log_ratio if sampler_cut else -tokens.log_ratio
    rare = 0.5 * (tokens.behavior + tokens.trainer) < -1.5
    opposite = (up > 0.1) & rare
    likely = (up > 0.01) & (tokens.behavior > math.log(0.5))
    frequent = opposite.sum() >= 5 and share(opposite[rare]) > 0.15
    lifted = likely.sum() >= 8 and share(likely) > 0.25
    return fit if fit is not None and (frequent or lifted) else None


def _follows_sampler(
    tokens: LogprobPairs,
    fit: TemperatureFit | None,
    truncation: Truncation | None,
    mirrored: Truncation | None,
    *,
    repaired: bool,
) -> bool:
    """Whether tokens follow the sampler's log-probs rather than the trainer's.

    The sum of log-ratios is the log-likelihood ratio of the two. Repaired pairs were selected by it and need more.
    """
    if truncation is not None or mirrored is not None or fit is None:
        return mirrored is None
    ratio, z = mean_ratio(tokens)
    return float(tokens.log_ratio.sum()) <= LIMITS["raw-likelihood"] or ratio <= 1 or (repaired and z < 4)


def _temperature_cause(tokens: LogprobPairs, fit: TemperatureFit, *, doubtful: bool = False) -> Cause:
    known = _temperature_text(tokens)
    ratio, _ = mean_ratio(tokens)
    evidence = (
        f"trainer and sampler are one distribution at temperatures of about {fit.a:.2f} : 1 (sampler over trainer"
        f"{known}): logit differences lie on a line, {fit.spread:.1f} logits left per unit of slope, z = {fit.z:.0f} "
        f"on {fit.tokens} tokens; mean ratio {ratio:.4f}"
    )
    sure = 0.5 if doubtful else min(confidence(fit.z, 8.0), 0.5 + fit.part)
    if abs(float(tokens.log_ratio.sum())) < LIMITS["temperature-likelihood"]:  # about as likely
        sure = min(sure, 0.6)
    return Cause("temperature", sure, evidence, FIX_TEMPERATURE)


def _raw_temperature_cause(tokens: LogprobPairs, fit: TemperatureFit) -> Cause:
    ratio, z = mean_ratio(tokens)
    inverse, _ = mean_ratio(tokens.swapped())
    evidence = (
        f"the mean ratio is {ratio:.4f} (z = {z:.1f}) and the mean inverse ratio {inverse:.4f}: tokens were drawn from "
        f"the trainer's distribution, which is the reported one at temperature {1 / fit.a:.2f} or so"
    )
    sure = 0.6 if fit.a < 1 else min(confidence(z, 4.0), 0.5 + fit.part)
    return Cause("raw-logprobs", sure, evidence, FIX_RAW)


def _truncation_cause(truncation: Truncation, tokens: int) -> Cause:
    zeros = truncation.one_sided_zeros
    text = f"; {zeros} tokens have sampler log-prob exactly 0, the trainer's is below -0.01" if zeros else ""
    evidence = f"the mean ratio is {truncation.mass:.4f} (z = {truncation.z:.1f}, {tokens} tokens), the mass kept{text}"
    sure = confidence(max(-truncation.z / 6, zeros / 5), 1.0)
    if truncation.mass < LIMITS["truncated-mass"]:
        sure = LIMITS["confidence-outside"]
    return Cause("truncated-sampling", sure, evidence, FIX_CUT)


def _raw_truncation_cause(truncation: Truncation, tokens: int) -> Cause:
    zeros = truncation.one_sided_zeros
    text = f"; {zeros} tokens have trainer log-prob exactly 0, the sampler's is below -0.01" if zeros else ""
    evidence = (
        f"the mean inverse ratio is {truncation.mass:.4f} (z = {truncation.z:.1f}, {tokens} tokens): the sampler "
        f"reports the whole distribution, tokens come from the trainer's truncated one{text}"
    )
    sure = confidence(max(-truncation.z / 6, zeros / 5), 1.0)
    if truncation.mass < LIMITS["truncated-mass"]:
        sure = LIMITS["confidence-outside"]
    return Cause("raw-logprobs", sure, evidence, FIX_RAW)


def _temperature_text(tokens: LogprobPairs) -> str:
    temperature = tokens.table.temperature
    if temperature is None or not np.isfinite(temperature).any():
        return ""
    values = np.unique(temperature[np.isfinite(temperature)])
    return f"; sampling temperature {values[0]:g}" if len(values) == 1 else ""
