"""Detects old weights on the sampler's side: `stale`, `undelivered` and `stale-cache`.

With versions, the shift of logits must grow with age. Without versions, old weights have three signs:

  - Updates raise the probability of responses with positive advantage. So log-ratios correlate with advantages beyond
    what log-probs explain. Rounding is independent of the reward, unless it is so coarse that the sampler earns less.
  - Lag varies between steps; rounding does not.
  - Drift shifts a token the same way in every context; rounding errors are nearly independent between contexts (tested
    for vocabularies of words, not of characters).

Versions name the weights that were loaded. They do not show weights that never arrive: then the shift grows from step
to step at one age (`undelivered`). Nor do they show keys and values of older weights in a cache: then the shift is
larger if a prompt was asked before (`stale-cache`). Versions that are assumed for a synchronous trainer, since the
files lack them, count as recorded for `undelivered` and `stale-cache`, and as unknown for `stale`.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.detector import (
    LEAST_RMS,
    CauseMatch,
    Context,
    LogprobPairs,
    Residual,
    centered,
    confidence,
    growth_of,
    log_size,
    rms_of,
    slope_of,
)
from trimtab.diagnosis.causes.noise_kinds import IDS_SHIFT, MIN_GROUP_TOKENS, Noise, drift_between_steps, measure_noise
from trimtab.diagnosis.records import UNPROVEN
from trimtab.text import short

GROWTH_Z = 5.0  # standard errors of a growth of the mean log size of the shifts
MIN_AGE_GROWTH = 1.15  # least growth of sizes from the youngest weights to older ones
MIN_CACHE_GROWTH = 1.3  # least growth of sizes from prompts that are new to those that were asked before
UNREWARDED_CONFIDENCE = 0.6  # confidence of undelivered where the difference does not follow the advantage
UNREWARDED_Z = 3.0  # standard errors of the correlation with the advantage below which that is so
MIN_ADVANTAGE_CORRELATION = 0.15  # least correlation of log-ratio and advantage of responses
CORRELATION_Z = 5.0  # standard errors of that correlation
STRONG_CORRELATION = 0.3  # least correlation in fine noise where versions say age 0; without versions a strong one
STRONG_CORRELATION_Z = 3.5  # standard errors of a strong correlation in coarse noise
MAX_DRIFT_COARSENESS = -0.8  # largest coarseness of noise that depends on token ids and is called drift


def find_drift(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Detects old weights; the tokens of age 0 remain if ages differ, all tokens otherwise."""
    noise = measure_noise(tokens)
    is_silent = context.direction or noise.rms < LEAST_RMS
    corr, z = (0.0, 0.0) if is_silent else advantage_correlation(tokens)
    text = f"log-ratios of responses correlate with their advantage (correlation {corr:.2f}, z = {z:.1f})"
    if tokens.age is not None and tokens.age.any():
        return _drift_by_age(tokens, tokens.age, noise, z, text)
    is_current = tokens.age is not None and not context.assumes_current
    is_coarse, needed = noise.coarseness > 0, STRONG_CORRELATION if is_current else MIN_ADVANTAGE_CORRELATION
    is_strong = corr > STRONG_CORRELATION and is_coarse
    # A sampler of four bits earns less reward where it errs, which explains a correlation at age 0.
    coarseness_explains = is_coarse and is_current
    if not coarseness_explains and corr > needed and z > (STRONG_CORRELATION_Z if is_strong else CORRELATION_Z):
        text += ", although the file says that all weights are current" if is_current else ""
        return [_everywhere(tokens, text, confidence(z, CORRELATION_Z))]
    if is_current or context.direction:
        return []
    if (steps := drift_between_steps(tokens)) is not None:
        return [_everywhere(tokens, steps.text + ", and k3 with it: rounding does not do so, lag does", 0.6)]
    is_fine = noise.rms >= LEAST_RMS and noise.coarseness < MAX_DRIFT_COARSENESS + IDS_SHIFT
    if not (noise.persistent and is_fine):
        return []
    evidence = (
        f"{noise.persistent:.0%} of the variance of the logits' shift depends on the token id, unlike rounding, and is "
        f"too small for quantized weights (root mean square {noise.rms:.2g})"
    )
    return [_everywhere(tokens, evidence, 0.6)]


def _everywhere(tokens: LogprobPairs, evidence: str, sure: float) -> CauseMatch:
    """Returns a finding that concerns all tokens, so that nothing is left to examine."""
    return CauseMatch("stale", evidence, tokens, len(tokens), sure, is_final=True)


def _drift_by_age(tokens: LogprobPairs, age: np.ndarray, noise: Noise, z: float, text: str) -> list[CauseMatch]:
    """Compares tokens by age. z, text: z and sentence of the correlation with the advantage."""
    undecided = tokens.undecided
    ages = [int(a) for a in np.unique(age) if (undecided & (age == a)).sum() >= MIN_GROUP_TOKENS]
    is_correlated = z > 4
    also = f"; {text}" if is_correlated else ""
    found, count = np.unique(age, return_counts=True)
    usual = found[count.argmax()]
    grown = drift_between_steps(tokens.select(age == usual))
    is_stated = grown is None or not grown.ascends
    if grown is not None and not is_stated:
        also += f"; at age {usual} {grown.text}, as where weights do not arrive"
    if len(ages) >= 2:
        young, old = undecided & (age == ages[0]), undecided & (age > ages[0])
        growth, growth_z = growth_of(tokens.shift[old], tokens.shift[young])
        is_clear = growth > MIN_AGE_GROWTH and growth_z > GROWTH_Z
        if is_clear and rms_of(tokens.shift[old]) > LEAST_RMS:
            times = "over 100" if growth > 100 else f"{growth:.2f}"
            evidence = (
                f"logits of tokens older than {ages[0]} updates differ {times} times as much as at age {ages[0]} "
                f"(z = {growth_z:.1f}; {int(old.sum())} and {int(young.sum())} tokens){also}"
            )
            fresh, sure = tokens.select(age == 0), confidence(growth_z, GROWTH_Z)
            moved, is_final = int((age > 0).sum()), 0 not in ages
            return [CauseMatch("stale", evidence, fresh, moved, sure, is_final=is_final, is_stated=is_stated)]
        if 0 in ages and not is_correlated:
            return []
    if noise.rms < LEAST_RMS:
        return []
    is_coarse = noise.coarseness > 0
    sure = confidence(z, 4.0) if is_correlated else 0.6 if is_coarse or noise.persistent else 0.5
    evidence = (
        f"tokens are {float(age.mean()):.1f} updates old and logits move by {noise.rms:.2g}, "
        f"{'more than' if is_coarse else 'within'} what 16-bit rounding gives{also}; without tokens of another age, "
        "lag cannot be told from rounding"
    )
    # The file states the age, not that the age makes the difference: there may be another fault.
    return [CauseMatch("stale", evidence, tokens, len(tokens), sure, is_final=is_coarse or is_correlated)]


def find_undelivered(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Detects weights that never reach the sampler: age 0 at every step, and a difference that grows with the steps."""
    if context.direction or tokens.age is None or tokens.age.any():
        return []
    if (steps := drift_between_steps(tokens)) is None or not steps.ascends:
        return []
    first, last = (tokens.select(tokens.step == steps.steps[at]) for at in (0, -1))
    k3 = Residual.of(first).k3, Residual.of(last).k3
    times = "over 1,000 times" if k3[1] > 1000 * k3[0] else f"{k3[1] / k3[0]:.0f} times"
    by = "as of a synchronous trainer" if context.assumes_current else "by its versions"
    evidence = (
        f"every token is of age 0 {by}, but k3 grows from {short(k3[0])} at step {steps.steps[0]} to {short(k3[1])} "
        f"at step {steps.steps[-1]} ({times}), in the order of the steps: "
        "the trainer moves away from weights that the sampler keeps"
    )
    sure = UNPROVEN if context.assumes_current else 0.95
    corr, z = advantage_correlation(tokens)
    is_stated = bool(not context.assumes_current and z >= UNREWARDED_Z)
    if corr and z < UNREWARDED_Z:
        sure = UNREWARDED_CONFIDENCE
        evidence += (
            f"; but log-ratios do not correlate with the advantage (correlation {corr:.2f}, z = {z:.1f}), as they "
            "would if the sampler lacked updates: rounding that grows while the policy changes looks the same"
        )
    return [CauseMatch("undelivered", evidence, first, len(tokens) - len(first), sure, is_stated=is_stated)]


def find_stale_cache(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Detects keys and values of older weights: in a step, prompts asked before differ more than new prompts."""
    step, prompt = tokens.step, tokens.prompt
    if context.direction or step is None or prompt is None or (tokens.age is not None and tokens.age.any()):
        return []
    _, index = np.unique(prompt, return_inverse=True)
    first = np.full(index.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, index, step)
    repeated, undecided = step > first[index], tokens.undecided
    if min((repeated & undecided).sum(), (~repeated & undecided).sum()) < MIN_GROUP_TOKENS:
        return []
    within = step[undecided]
    size, again = centered(log_size(tokens.shift[undecided]), within), centered(repeated[undecided], within)
    slope, z = slope_of(size, again)
    if np.exp(slope) < MIN_CACHE_GROWTH or z < GROWTH_Z:
        return []
    old, new = tokens.select(repeated), tokens.select(~repeated)
    is_recorded = tokens.age is not None and not context.assumes_current
    despite = ", although versions say that weights are current" if is_recorded else ""
    evidence = (
        f"logits move {np.exp(slope):.1f} times as far for prompts that were asked in an earlier step as for new ones "
        f"of the same step (z = {z:.1f}; k3 {short(Residual.of(old).k3)} and {short(Residual.of(new).k3)}){despite}: "
        "keys and values of older weights answer from the engine's prefix cache"
    )
    return [CauseMatch("stale-cache", evidence, new, len(old), confidence(z, GROWTH_Z))]


def advantage_correlation(tokens: LogprobPairs) -> tuple[float, float]:
    """Returns the partial correlation of log-ratio and advantage of responses, given log-prob and length, and its z.

    (0, 0) without advantages and rewards, or with fewer than 30 that are not 0.
    """
    advantage = _advantage(tokens)
    if advantage is None:
        return 0.0, 0.0
    rows, index = np.unique(tokens.row, return_inverse=True)
    total = np.bincount(index, np.clip(tokens.log_ratio, -3, 3))
    others = np.stack([np.ones(len(rows)), np.bincount(index, tokens.behavior), np.bincount(index)], 1)
    value = advantage[rows]
    use = np.isfinite(value) & (value != 0)
    if use.sum() < 30:
        return 0.0, 0.0
    left, right = (v[use] - others[use] @ np.linalg.lstsq(others[use], v[use], rcond=None)[0] for v in (total, value))
    if left.std() < 1e-9 or right.std() < 1e-9:
        return 0.0, 0.0
    product = left * right / (left.std() * right.std())
    corr = float(product.mean())
    return corr, corr / max(float(product.std()) / np.sqrt(len(product)), 1e-12)


def _advantage(tokens: LogprobPairs) -> np.ndarray | None:
    """Returns advantages, or rewards minus their group's mean if no advantage is known; None without either."""
    table = tokens.table
    if table.reward is None or (table.advantage is not None and np.isfinite(table.advantage).any()):
        return table.advantage
    result = np.full(table.responses, np.nan)
    known = np.isfinite(table.reward)
    columns = [column for column in (table.group, table.step) if column is not None and table.group is not None]
    keys = np.stack([np.zeros(table.responses), *columns], axis=1)[known]
    result[known] = centered(table.reward[known], np.unique(keys, axis=0, return_inverse=True)[1])
    return result
