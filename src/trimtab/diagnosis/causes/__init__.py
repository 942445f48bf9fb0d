"""Infers the causes of a mismatch from the log-probs of sampled tokens, with evidence.

The rules follow from three facts about tokens y drawn from mu and a trainer pi:

    E[pi/mu] = 1        if the reported log-probs are those of the sampling distribution and pi has no larger support
    logit pi = a logit mu + (a - 1) h      if both are one model at two temperatures (a > 0; h >= 0 is a Renyi entropy
                                           of the context's tokens that were not sampled)
    noise moves logits   bfloat16, quantized weights and old weights shift logits up and down: the ratio keeps mean 1

A cause is named only if undoing it heals the data. Each detector proposes repairs that are applied to the tokens:
values converted, lists shifted back, tokens left out. Stage by stage the one that heals most is kept, and the search
goes on with what is left, until noise remains (`precision`, `quantized`, `routing`), which needs the first fact to
hold. What no detector explains is `unexplained`. Numbers that decide are in `diagnosis/thresholds.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs
from trimtab.diagnosis.causes.long_context import find_depth_growth
from trimtab.diagnosis.causes.misaligned import find_shifts
from trimtab.diagnosis.causes.placeholder import placeholder_cause
from trimtab.diagnosis.causes.precision import find_noise
from trimtab.diagnosis.causes.retokenized import find_retokenized
from trimtab.diagnosis.causes.sampling_faults import find_sampling_faults
from trimtab.diagnosis.causes.stale import find_drift, find_stale_cache, find_undelivered
from trimtab.diagnosis.causes.swapped import find_swapped_responses
from trimtab.diagnosis.causes.unexplained import above_zero, unexplained
from trimtab.diagnosis.causes.what_is_left import Context, Detector, Finding, Left
from trimtab.diagnosis.causes.wrong_values import find_copied, find_log_base, find_wrong_token
from trimtab.diagnosis.records import Cause, DataSummary, Measured
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

MIN_TOKENS = 100
"""Fewest trained tokens for which causes other than `non-finite` and `placeholder` are inferred."""

NOISES = ("precision", "quantized", "routing")
STAGES: tuple[tuple[Detector, ...], ...] = (
    (find_copied, find_log_base, find_wrong_token),
    (find_shifts, find_swapped_responses),
    (find_retokenized,),
    (find_sampling_faults,),
    (find_depth_growth,),
    (find_stale_cache,),
    (find_undelivered, find_drift),
    (find_noise,),
)
"""Detectors of one stage compete; a stage is searched again after a repair."""


def find_causes(measured: Measured, without: Collection[str] = ()) -> tuple[Cause, ...]:
    """Returns the causes, faults before noise and each most confident first; empty within the noise floor.

    Uses `measured.sample`, `measured.origin` (values that are not finite, the run's settings) and the floor in
    `measured.size`. without: names that are not looked for. Rules, and the columns that each needs: docs/detection.md.
    """
    known = [placeholder_cause(measured), _non_finite(measured.origin), above_zero(measured.sample)]
    causes = [cause for cause in known if cause is not None and cause.name not in without]
    tokens = LogprobPairs.of(measured.sample)
    everywhere = bool(measured.placeholders) and not measured.cleaned and "placeholder" not in without
    if len(tokens) >= MIN_TOKENS and not everywhere:
        context = Context(measured.size.floor, measured.origin.settings)
        causes += _Search(context, frozenset(without), tokens).causes()
    # Noise is what remains when every fault is undone, so that it comes last.
    return tuple(sorted(causes, key=lambda cause: (cause.name in NOISES, -cause.confidence)))


@dataclass(frozen=True, eq=False)
class _Search:
    """The search for causes in some tokens."""

    context: Context
    without: frozenset[str]
    tokens: LogprobPairs

    def causes(self) -> list[Cause]:
        """Applies the repairs that heal most one after the other; what they leave decides how sure each is."""
        found: list[tuple[Finding, Left]] = []
        tokens, left, context = self.tokens, Left.of(self.tokens), self.context
        for stage in STAGES:
            names = {finding.name for finding, _ in found}
            while options := self._options(stage, tokens, left, context, names):
                accepted, after = max(options, key=lambda option: left.total - option[1].total)
                found += [(finding, after) for finding in accepted]
                names |= {finding.name for finding in accepted}
                tokens, left = accepted[-1].rest, after
                context = replace(context, repaired=True, against=accepted[-1].against or context.against)
                if accepted[-1].is_final or len(tokens) < MIN_TOKENS // 2:
                    return [self._cause(*one, None) for one in found]
        open_question = None if context.against else unexplained(tokens, left, context.floor, bool(found))
        named = [self._cause(*one, left if open_question else None) for one in found]
        return [*named, open_question] if open_question else named

    def _options(
        self, stage: tuple[Detector, ...], tokens: LogprobPairs, left: Left, context: Context, names: set[str]
    ) -> list[tuple[list[Finding], Left]]:
        """Returns the findings of each detector that heal, with what they leave."""
        options = []
        for find in stage:
            findings = [one for one in find(tokens, context) if one.name not in self.without | names]
            if not findings:
                continue
            last = findings[-1]
            after = left if last.rest is tokens else Left.of(last.rest)
            if last.rest is tokens or last.is_final or _heals(left, after):
                options.append((findings, after))
        return options

    def _cause(self, finding: Finding, after: Left, open_left: Left | None) -> Cause:
        """Returns the record; `open_left`: what nothing explains, which lowers confidence by its share of k3."""
        before = Left.of(self.tokens)
        share = float(np.clip(1 - after.k3 / before.k3, 0, 1)) if before.k3 > 0 and after.tokens else 0.0
        heals = after.tokens > 0 and finding.against is None and finding.name not in ("stale", *NOISES)
        limit = 0.99
        if open_left is not None:
            limit = LIMITS["confidence-outside"] + 0.5 * share**2
        repaired = {"k3": after.k3, "ratio_mean": after.ratio_mean} if heals else {}
        return Cause(
            finding.name,
            round(min(finding.at_most, limit), 2),
            finding.evidence,
            finding.fix,
            share if heals else None,
            finding.tokens,
            repaired,
        )


def _heals(before: Left, after: Left) -> bool:
    """Whether less is left for each token, and the contract does not break."""
    if after.tokens == 0:
        return False
    return after.k3 < LIMITS["heals"] * before.k3 and not (before.contract == "inside" and after.contract == "outside")


def _non_finite(origin: DataSummary) -> Cause | None:
    if not any(origin.nonfinite.values()):
        return None
    counts = ", ".join(f"{count} {name}" for name, count in origin.nonfinite.items() if count)
    fix = (
        "An infinite log-prob is a token outside the kept set of top-k, top-p or a vocabulary mask; NaN is an "
        "overflow, or a value that was not written (null in JSON). Score sampled tokens with the same masks, compute "
        "the log-softmax in float32, and log a value for every sampled token."
    )
    tokens = sum(origin.nonfinite.values())
    return Cause("non-finite", 0.99, f"values that are not finite at trained tokens: {counts}", fix, tokens=tokens)
