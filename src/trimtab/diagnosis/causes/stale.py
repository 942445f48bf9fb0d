"""Detects old weights on the sampler's side: `stale`, `undelivered` and `stale-cache`.

With versions, the shift of logits must grow with age. Without them there are three indications. Updates raise the
probability of what had positive advantage, so that a response's log-ratio correlates with its advantage beyond what its
log-prob explains; rounding is independent of the reward. Lag varies between steps; rounding does not. Drift shifts a
token the same way in every context; rounding errors are nearly independent between contexts (tested for vocabularies of
words, not of characters).

Versions are those of the weights that were loaded, which says nothing of weights that never arrive, nor of keys and
values of a prompt that older weights left in a cache. Then the shift grows from step to step, or is larger where a
prompt was asked before than where one of the same step is asked for the first time.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence
from trimtab.diagnosis.causes.noise_groups import drift_between_steps, growth_of, log_size, rms_of
from trimtab.diagnosis.causes.precision import Noise, noise_of
from trimtab.diagnosis.causes.what_is_left import Context, Finding, Left
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

FIX = (
    "Refresh the sampler's weights more often or bound the lag (max_lag); otherwise correct with weights of "
    "proximal over behavior and log versions to separate lag from rounding."
)
FIX_UNDELIVERED = (
    "Compare the sampler's weights with the trainer's after a publication (a checksum of each tensor, or the log-probs "
    "of one fixed text on both sides); with LoRA, whether the adapter's name and version change with each one."
)
FIX_CACHE = (
    "Empty the engine's prefix cache with every publication of weights (vLLM: reset_prefix_cache, SGLang: "
    "flush_cache), also where requests are paused over it, or turn prefix caching off to compare."
)


def find_drift(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Detects old weights, and leaves the tokens of age 0, or those of the step with the least drift."""
    noise = noise_of(tokens, context)
    correlation = None if context.against or noise.rms < LIMITS["least-rms"] else _reward_correlation(tokens)
    if tokens.age is not None and tokens.age.any():
        return _drift_by_age(tokens, noise, correlation)
    corr, z = correlation or (0.0, 0.0)
    is_strong = corr > LIMITS["reward-correlation-strong"] and noise.coarseness > 0
    needed = LIMITS["reward-correlation-strong" if tokens.age is not None else "reward-correlation"]
    if corr > needed and z > LIMITS["reward-correlation-strong-z" if is_strong else "reward-correlation-z"]:
        despite = "" if tokens.age is None else " although the file says age 0"
        evidence = (
            f"log-ratios of responses correlate with their advantage{despite}: correlation {corr:.2f}, z = {z:.1f}"
        )
        return [_all(tokens, evidence, confidence(z, LIMITS["reward-correlation-z"]))]
    if tokens.age is not None or context.against:
        return []
    if (steps := drift_between_steps(tokens)) is not None:
        return [_all(tokens, steps.text + ": the size of rounding does not vary, that of lag does", 0.6)]
    fine = LIMITS["least-rms"] <= noise.rms and noise.coarseness < LIMITS["drift-coarseness"] + LIMITS["border-ids"]
    if noise.depends_on_ids and fine:
        evidence = (
            f"{noise.persistent:.0%} of the shift of logits depends on the token id, unlike rounding, and is too "
            f"small for quantized weights (rms {noise.rms:.2g})"
        )
        return [_all(tokens, evidence, 0.6)]
    return []


def _all(tokens: LogprobPairs, evidence: str, sure: float) -> Finding:
    """Returns a finding that concerns all tokens, so that nothing is left to examine."""
    return Finding("stale", evidence, FIX, tokens, len(tokens), sure, is_final=True)


def find_undelivered(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Detects weights that never reach the sampler: age 0 at every step, and a difference that grows with the steps."""
    if context.against or tokens.age is None or tokens.age.any():
        return []
    if (steps := drift_between_steps(tokens)) is None or steps.order < LIMITS["undelivered-order"]:
        return []
    step = tokens.of_response(tokens.table.step)
    assert step is not None
    first = tokens.select(step == steps.steps[0])
    k3 = [Left.of(tokens.select(step == number)).k3 for number in (steps.steps[0], steps.steps[-1])]
    evidence = (
        f"every token is of age 0 by its versions, but k3 grows from {k3[0]:.1e} at step {steps.steps[0]} to "
        f"{k3[1]:.1e} at step {steps.steps[-1]} ({k3[1] / max(k3[0], 1e-12):.0f} times), in the order of the steps: "
        "the trainer moves away from weights that the sampler keeps"
    )
    return [Finding("undelivered", evidence, FIX_UNDELIVERED, first, len(tokens) - len(first), 0.95)]


def find_stale_cache(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Detects keys and values of older weights: prompts that were asked before differ more than new ones of a step."""
    step, prompt = (tokens.of_response(column) for column in (tokens.table.step, tokens.table.prompt))
    if context.against or step is None or prompt is None or (tokens.age is not None and tokens.age.any()):
        return []
    _, index = np.unique(prompt, return_inverse=True)
    first = np.full(index.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, index, step)
    repeated, middle = step > first[index], tokens.middle
    if min((repeated & middle).sum(), (~repeated & middle).sum()) < LIMITS["group-tokens"]:
        return []
    size, again = log_size(tokens.shift[middle]), repeated[middle].astype(np.float64)
    _, at = np.unique(step[middle], return_inverse=True)
    count = np.bincount(at)
    size, again = (values - (np.bincount(at, values) / count)[at] for values in (size, again))
    power = float(again @ again)
    if power <= 0:
        return []
    slope = float(again @ size) / power
    error = float(np.sqrt(np.square(again * (size - slope * again)).sum())) / power
    growth, z = float(np.exp(slope)), slope / max(error, 1e-12)
    if growth < LIMITS["cache-growth"] or z < LIMITS["growth-z"]:
        return []
    new = tokens.select(~repeated)
    k3 = [Left.of(part).k3 for part in (tokens.select(repeated), new)]
    despite = "" if tokens.age is None else ", although versions say that weights are current"
    evidence = (
        f"logits move {growth:.1f} times as far for prompts that were asked in an earlier step as for new ones of the "
        f"same step (z = {z:.1f}; k3 {k3[0]:.1e} and {k3[1]:.1e}){despite}: keys and values of older weights answer "
        "from the engine's prefix cache"
    )
    sure = confidence(z, LIMITS["growth-z"])
    return [Finding("stale-cache", evidence, FIX_CACHE, new, len(tokens) - len(new), sure)]


def _drift_by_age(tokens: LogprobPairs, noise: Noise, correlation: tuple[float, float] | None) -> list[Finding]:
    age = tokens.age
    assert age is not None
    middle = tokens.middle
    ages = [int(a) for a in np.unique(age) if (middle & (age == a)).sum() >= LIMITS["group-tokens"]]
    corr, z = correlation or (0.0, 0.0)
    correlated = f"; log-ratios correlate with advantage (correlation {corr:.2f}, z = {z:.1f})" if z > 4 else ""
    if len(ages) >= 2:
        young, old = middle & (age == ages[0]), middle & (age > ages[0])
        growth, growth_z = growth_of(tokens.shift[old], tokens.shift[young])
        is_clear = growth > LIMITS["age-growth"] and growth_z > LIMITS["growth-z"]
        if is_clear and rms_of(tokens.shift[old]) > LIMITS["least-rms"]:
            times = f"{growth:.2f} times" if growth < 100 else "over 100 times"
            evidence = (
                f"logits of tokens older than {ages[0]} updates moved {times} as far as at age {ages[0]} "
                f"(z = {growth_z:.1f}; {int(old.sum())} and {int(young.sum())} tokens){correlated}"
            )
            fresh = tokens.select(age == 0)
            sure = confidence(growth_z, LIMITS["growth-z"])
            return [Finding("stale", evidence, FIX, fresh, int((age > 0).sum()), sure, is_final=0 not in ages)]
        if 0 in ages and not correlated:
            return []
    if noise.rms < LIMITS["least-rms"]:
        return []
    certainty = confidence(z, 4.0) if correlated else 0.6 if noise.coarseness > 0 or noise.depends_on_ids else 0.5
    size = f"logits move by {noise.rms:.2g}, " + ("more than" if noise.coarseness > 0 else "within")
    evidence = (
        f"tokens are {float(age.mean()):.1f} updates old and {size} what 16-bit rounding gives{correlated}; no tokens "
        "of another age are available to distinguish lag from rounding"
    )
    is_final = noise.coarseness > 0 or bool(correlated)
    return [Finding("stale", evidence, FIX, tokens, len(tokens), certainty, is_final=is_final)]


def _reward_correlation(tokens: LogprobPairs) -> tuple[float, float] | None:
    """Returns the partial correlation of log-ratio and advantage of responses, given log-prob and length, and its z."""
    advantage = _advantage(tokens)
    if advantage is None:
        return None
    rows, index = np.unique(tokens.row, return_inverse=True)
    total = np.bincount(index, np.clip(tokens.log_ratio, -3, 3))
    others = np.stack([np.ones(len(rows)), np.bincount(index, tokens.behavior), np.bincount(index)], 1)
    value = advantage[rows]
    use = np.isfinite(value) & (value != 0)
    if use.sum() < 30:
        return None
    left, right = (_residual(v[use], others[use]) for v in (total, value))
    if left.std() < 1e-9 or right.std() < 1e-9:
        return None
    product = left * right / (left.std() * right.std())
    corr = float(product.mean())
    return corr, corr / max(float(product.std()) / np.sqrt(len(product)), 1e-12)


def _residual(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    return values - others @ np.linalg.lstsq(others, values, rcond=None)[0]


def _advantage(tokens: LogprobPairs) -> np.ndarray | None:
    """Returns advantages, or rewards minus their group's mean; None without either."""
    table = tokens.table
    if table.advantage is not None:
        return table.advantage
    if table.reward is None:
        return None
    if table.group is None:
        return table.reward - np.nanmean(table.reward)
    keys = (
        table.group if table.step is None else table.group + (table.step - table.step.min()) * (table.group.max() + 1)
    )
    _, index = np.unique(keys, return_inverse=True)
    known = np.isfinite(table.reward)
    total = np.bincount(index, np.where(known, table.reward, 0.0))
    return table.reward - (total / np.maximum(np.bincount(index, known), 1))[index]
