"""Searches for causes stage by stage: `find_causes`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.causes import wrong_values
from trimtab.diagnosis.causes.detector import CONFIDENCE_OUTSIDE, CauseMatch, Context, Detector, LogprobPairs, Residual
from trimtab.diagnosis.causes.noise_kinds import drift_between_steps, find_noise, find_unexplained
from trimtab.diagnosis.causes.old_weights import find_drift, find_stale_cache, find_undelivered
from trimtab.diagnosis.causes.sampling_faults import find_sampling_faults
from trimtab.diagnosis.causes.wrong_pairs import find_retokenized, find_shifts, find_swapped_responses
from trimtab.diagnosis.records import CAUSES, FINDINGS, UNPROVEN, Cause, Measured

MAX_K3_LEFT = 0.9  # part of k3 that a repair may leave
MAX_FIRST_K3 = 0.3  # largest k3 of the first step, relative to the last, of a growth that no constant cause explains
MIN_TRAINED_TOKENS = 100  # fewest for which causes other than `non-finite` and `placeholder` are inferred

NOISES = ("precision", "quantized", "routing")
STAGES: tuple[tuple[Detector, ...], ...] = (
    (wrong_values.find_copied, wrong_values.find_log_base, wrong_values.find_wrong_token),
    (find_shifts, find_swapped_responses),
    (find_retokenized,),
    (find_sampling_faults,),
    (find_stale_cache,),
    (find_undelivered, find_drift),
    (find_noise,),
)
"""Detectors of one stage compete; a stage is searched again after a repair."""


def find_causes(measured: Measured, without: Collection[str] = ()) -> tuple[Cause, ...]:
    """Returns the causes, faults before noise and each most confident first; empty within the noise floor.

    Uses `measured.sample`, `measured.origin` (values that are not finite, the run's numerics) and the floor in
    `measured.size`. without: names of causes to skip. Rules: docs/reference-detection.md.
    """
    known = [
        wrong_values.find_placeholder(measured),
        wrong_values.find_nonfinite(measured.origin),
        wrong_values.find_above_zero(measured.sample),
    ]
    causes = [cause for cause in known if cause is not None and cause.name not in without]
    tokens = LogprobPairs.of(measured.sample)
    everywhere = bool(measured.placeholders) and not measured.cleaned and "placeholder" not in without
    origin = measured.origin
    is_rounded = any(one.name == FINDINGS["whole-numbers"]["name"] for one in origin.findings)
    if len(tokens) >= MIN_TRAINED_TOKENS and not everywhere and not is_rounded:
        context = Context(measured.size.floor, origin.numerics, assumes_current=origin.assumes_current)
        causes += _search(tokens, context, without)
    # Noise is what remains when every fault is undone, so it comes last.
    causes.sort(key=lambda cause: (cause.name in NOISES, -cause.confidence))
    return tuple(map(_add_remedy, causes))


def _add_remedy(cause: Cause) -> Cause:
    """Returns a cause with its remedy. A cause that nothing proves has at most `UNPROVEN`, and its test is first."""
    kind = CAUSES[cause.name]
    fix = f"{kind.fix} {kind.otherwise}".strip()
    if cause.name == "unexplained" or cause.is_stated or kind.proves:
        return replace(cause, fix=fix)
    test = f"{kind.test}. " if kind.must_fix and kind.test else ""
    return replace(cause, fix=test + fix, confidence=min(cause.confidence, UNPROVEN))


def _search(tokens: LogprobPairs, context: Context, without: Collection[str]) -> list[Cause]:
    """Applies in each stage the repair that leaves least; what finally remains bounds the confidence of causes."""
    found: list[tuple[CauseMatch, Residual]] = []
    whole = left = Residual.of(tokens)
    is_finished = False
    for stage in STAGES:
        while not is_finished:
            excluded = {*without, *(match.name for match, _ in found)}
            options = [option for find in stage if (option := _try(find, tokens, left, context, excluded))]
            if not options:
                break
            matches, after = max(options, key=lambda option: left.total - option[1].total)
            found += [(match, after) for match in matches]
            tokens, left = matches[-1].remaining, after
            context = replace(context, repaired=True, direction=matches[-1].direction or context.direction)
            is_finished = matches[-1].is_final or len(tokens) < MIN_TRAINED_TOKENS // 2
    is_known = is_finished or context.direction
    open_question = None if is_known else find_unexplained(tokens, left, context.floor, is_rest=bool(found))
    causes = [_to_cause(match, whole, after, left if open_question else None) for match, after in found]
    return [*causes, open_question] if open_question else causes


def _try(
    find: Detector, tokens: LogprobPairs, left: Residual, context: Context, excluded: Collection[str]
) -> tuple[list[CauseMatch], Residual] | None:
    """Returns a detector's matches with what they leave; None if there are none, or if they leave too much."""
    matches = [match for match in find(tokens, context) if match.name not in excluded]
    if any(CAUSES[match.name].is_constant for match in matches) and (start := _select_first_step(tokens)):
        there = {match.name for match in find(start, context)}
        matches = [one for one in matches if one.name in there or not CAUSES[one.name].is_constant]
    if not matches:
        return None
    last = matches[-1]
    if last.remaining is tokens:
        return matches, left
    after = Residual.of(last.remaining)
    breaks = left.mean_is_one == "yes" and after.mean_is_one == "no"
    leaves_less = after.tokens > 0 and after.k3 < MAX_K3_LEFT * left.k3 and not breaks
    return (matches, after) if last.is_final or leaves_less else None


def _select_first_step(tokens: LogprobPairs) -> LogprobPairs | None:
    """Returns the tokens of the first step if the mismatch grows with the steps, else None.

    A constant cause must show in that step too. Otherwise it may be training: a policy that becomes more certain has
    the logits of its old weights times a factor, as with another temperature.
    """
    steps = drift_between_steps(tokens)
    if steps is None or not steps.ascends:
        return None
    first, last = (tokens.select(tokens.step == steps.steps[at]) for at in (0, -1))
    return first if Residual.of(first).k3 < MAX_FIRST_K3 * Residual.of(last).k3 else None


def _to_cause(match: CauseMatch, whole: Residual, after: Residual, unexplained: Residual | None) -> Cause:
    """Returns the record of a match; the confidence is lower if a share of k3 stays unexplained."""
    share = float(np.clip(1 - after.k3 / whole.k3, 0, 1)) if whole.k3 > 0 and after.tokens else 0.0
    limit = 0.99 if unexplained is None else CONFIDENCE_OUTSIDE + 0.5 * share**2
    sure = round(min(match.max_confidence, limit), 2)
    cause = Cause(match.name, sure, match.evidence, tokens=match.tokens, is_stated=match.is_stated)
    if not after.tokens or match.direction or match.name in ("stale", *NOISES):  # nothing was undone
        return cause
    return replace(cause, share_of_k3=share, repaired={"k3": after.k3, "ratio_mean": after.ratio_mean})
