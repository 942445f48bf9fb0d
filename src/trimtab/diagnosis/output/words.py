"""Sentences of a diagnosis, shared by terminal and HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.diagnosis.advice.rules import MUST_FIX
from trimtab.diagnosis.known import Match, matches
from trimtab.diagnosis.output.hotspots import hotspots
from trimtab.diagnosis.records import Cause, DataSummary, Diagnosis, Measured, MismatchSize, PresetOutcome
from trimtab.findings import Finding
from trimtab.intervals import Interval
from trimtab.pages.render import beside, number, short
from trimtab.runs.metric_ranges import K3, band_text, bounds, judge, k3_ranges

WIDE = 3.0
"""Ratio of the ends of an interval of the mean ratio beyond which it is no evidence that 1 is inside."""
MOST_KNOWN = 3
"""Largest number of known faults that is shown under a cause."""
CLOSE = 1e-3
"""A mean ratio this close to 1 is accepted, however narrow its interval is."""


@dataclass(frozen=True)
class Check:
    """The result of comparing the mean ratio with 1. tone: good, warn or plain (undecided)."""

    tone: str
    text: str


def format_number(value: float) -> str:
    """Formats a number with two significant digits; 0 as 0, values that are not finite as a dash."""
    if value == 0:
        return "0"
    return short(value) if math.isfinite(value) else "–"


def format_digits(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "–"


def format_percent(share: float) -> str:
    """Formats a share: 12%, 0.3%; 0% and 100% only for exact values."""
    if not math.isfinite(share):
        return "–"
    hundred = 100 * share
    if 0 < hundred < 0.1:
        return "<0.1%"
    if 99.9 < hundred < 100:
        return ">99.9%"
    return f"{hundred:.0f}%" if hundred >= 10 or hundred == 0 else f"{hundred:.1f}%"


def size_text(size: MismatchSize) -> str:
    """Returns the description of the published range that k3 lies in."""
    if size.verdict == "rounding":
        return "no more than the rounding of the stored log-probs makes"
    k3_range = k3_ranges()[size.verdict]
    if k3_range.low is not None and size.mismatch["k3"] < k3_range.low:
        return k3_range.text.replace("within what", "less than")
    return k3_range.text


def outside(size: MismatchSize) -> dict[str, str]:
    """Returns the statistics outside their healthy range, with the range as text, as report.html marks them."""
    keys = (key for key, value in size.mismatch.items() if judge(f"mismatch/{key}", value) == "outside")
    return {key: band_text(f"mismatch/{key}") for key in keys}


def _four_digits(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 0.1 else format_number(value)


def outside_text(size: MismatchSize) -> str:
    """Lists the statistics outside their healthy range."""
    bands = outside(size)
    if not bands:
        return "every figure is within its healthy range"
    items = [
        f"{key} {beside(size.mismatch[key], bounds(f'mismatch/{key}'), _four_digits)} ({band})"
        for key, band in bands.items()
    ]
    return f"outside their healthy ranges: {', '.join(items)}"


def known(interval: Interval | None) -> bool:
    return interval is not None and math.isfinite(interval.low) and math.isfinite(interval.high)


def format_with_interval(size: MismatchSize, key: str) -> str:
    """Formats a statistic as `1.9e-4 (1.7e-4 to 2.1e-4)`, without parentheses if there is no interval."""
    return f"{format_number(size.mismatch.get(key, math.nan))}{format_interval(size.intervals.get(key))}"


def format_interval(interval: Interval | None) -> str:
    if interval is None or not known(interval):
        return ""
    return f" ({format_number(interval.low)} to {format_number(interval.high)})"


def overrides_text(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={number(value)}" for name, value in overrides.items())


def method_text(preset: str, overrides: Mapping[str, Any]) -> str:
    if not preset:
        return "no correction yet"
    return f"{preset} with {overrides_text(overrides)}" if overrides else preset


def read_text(origin: DataSummary) -> str:
    """Returns one sentence on what was read and what was dropped."""
    trained = "" if origin.trained == origin.tokens else f", {origin.trained:,} of them trained"
    text = f"{format_count(origin.files, 'file')} ({origin.framework}): {format_count(origin.responses, 'response')}"
    return f"{text}, {format_count(origin.tokens, 'token')}{trained}; {dropped_text(origin)}"


def format_count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def masked_text(origin: DataSummary) -> str:
    """Describes the responses that the trainer masks out of its loss; empty without any."""
    if origin.masked is None:
        return ""
    masked = origin.masked
    return (
        f"without {format_count(masked.responses, 'response')} ({masked.share:.0%}) that the trainer masks out of its "
        f"loss: k3 is {format_number(masked.k3)} over them, {format_number(masked.k3_with)} over all"
    )


def dropped_text(origin: DataSummary) -> str:
    count = sum(origin.dropped.values())
    if not count:
        return "nothing dropped"
    return f"dropped {count:,} ({', '.join(f'{number_:,} {why}' for why, number_ in origin.dropped.items())})"


def contract(size: MismatchSize) -> Check:
    """Tests whether the mean ratio is 1, as it is if the log-probs are those of the sampling distribution."""
    mean, interval = size.mismatch.get("ratio_mean", math.nan), size.intervals.get("ratio_mean")
    if not math.isfinite(mean):
        return Check("plain", "the mean ratio is not defined")
    if interval is None or not known(interval):
        return Check("plain", f"mean ratio {mean:.5g}; too few responses for an interval")
    text = f"mean ratio {mean:.5g} ({interval.low:.5g} to {interval.high:.5g})"
    if interval.low <= 1 <= interval.high and interval.high > WIDE * interval.low:
        return Check("plain", f"{text}: an interval this wide says nothing, a few tokens decide the mean")
    if interval.low <= 1 <= interval.high:
        return Check("good", f"{text}: 1 is inside, as for correct log-probs of untruncated sampling")
    if abs(mean - 1) <= CLOSE:
        return Check("good", f"{text}: not quite 1, but within {format_percent(CLOSE)} of it")
    side = (
        "below 1: tokens the trainer finds likely were never sampled (top-p, top-k), or log-probs are wrong"
        if mean < 1
        else "above 1: the sampler's log-probs are not those of the distribution it sampled from"
    )
    return Check("warn", f"{text} is {side}")


def where_text(measured: Measured, texts: Mapping[int, str], most: int = 3) -> str:
    """Lists the `most` largest hotspots of the mismatch; `texts`: of token ids, where known."""
    if not measured.size.mismatch.get("k3", math.nan) > 0:
        return "nowhere: there is no mismatch"
    spots = hotspots(measured, texts)
    if not spots:
        return "spread evenly: no part of any view holds much more of the mismatch than its share of the tokens"
    items = [
        f"{spot.what} ({format_percent(spot.tokens)} of the tokens, {format_percent(spot.k3)} of the mismatch)"
        for spot in spots
    ]
    return "; ".join(items[:most])


def split_text(measured: Measured) -> str:
    """Describes the split of the drift into mismatch and staleness, or why it is unknown."""
    split = measured.split
    if not split.separable or split.mismatch is None or split.staleness is None:
        return f"mismatch and staleness are not separable: {split.why}"
    if split.staleness == 0:
        return split.why
    parts = [
        f"{format_number(value)}{format_interval(split.intervals.get(name))}"
        for name, value in (("mismatch", split.mismatch), ("staleness", split.staleness))
    ]
    return f"of the drift, k3 {parts[0]} is trainer and sampler computing differently and {parts[1]} is older weights"


def faults(diagnosis: Diagnosis) -> list[str]:
    """Returns the names of the causes that must be fixed before any correction."""
    return [cause.name for cause in diagnosis.causes if cause.name in MUST_FIX]


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """Returns everything that was found, the causes first."""
    wrong = faults(diagnosis)
    causes = [
        Finding("fail" if cause.name in wrong else "note", cause.name, cause.evidence, cause.fix)
        for cause in diagnosis.causes
    ]
    return [*causes, *diagnosis.measured.origin.findings]


def known_lines(diagnosis: Diagnosis, cause: Cause) -> list[Match]:
    """Returns the known faults to show under a cause.

    Where versions are unknown, noise is blamed on faults of the same trainer only, and that only where nothing must be
    repaired first and the data is not healthy.
    """
    origin, wrong = diagnosis.measured.origin, faults(diagnosis)
    loud = not wrong and tone(diagnosis) != "good"
    found = [
        match
        for match in matches(cause.name, origin)
        if match.certain or cause.name in wrong or (loud and origin.framework in match.fault.trainers)
    ]
    return found[:MOST_KNOWN]


def chosen(diagnosis: Diagnosis) -> PresetOutcome | None:
    """Returns the outcome of the recommended preset, at the recommended bounds if there is one."""
    recommended = diagnosis.recommendation
    same = [outcome for outcome in diagnosis.outcomes if outcome.preset == recommended.preset]
    exact = [outcome for outcome in same if dict(outcome.overrides) == dict(recommended.overrides)]
    return (exact or same or [None])[0]


def effect_text(outcome: PresetOutcome) -> str:
    return (
        f"keeps {format_percent(outcome.kept)} of the tokens, changes {format_percent(outcome.changed)} of the "
        f"weights, leaves ESS {format_number(outcome.ess)}"
    )


def tone(diagnosis: Diagnosis) -> str:
    """Returns good if k3 is healthy, also with masked responses, and the only cause, if any, is `precision`."""
    harmless = all(cause.name == "precision" for cause in diagnosis.causes)
    measured = diagnosis.measured
    k3 = [measured.size.mismatch["k3"], *([measured.origin.masked.k3_with] if measured.origin.masked else [])]
    return "good" if harmless and all(judge(K3, value) == "healthy" for value in k3) else "warn"


def opening(diagnosis: Diagnosis) -> list[str]:
    """Returns what is wrong, how sure that is and what to do first, in plain sentences."""
    lines = []
    for cause in diagnosis.causes[:2]:
        plain = f"{PLAIN[cause.name]} ({cause.name}, {certainty(cause)}, confidence {cause.confidence:.2f})."
        lines.append(f"Apart from that: {plain[0].lower()}{plain[1:]}" if lines else plain)
    if not lines:
        lines.append(f"{AGREES}.")
    wrong = faults(diagnosis)
    if wrong:
        first = next(cause for cause in diagnosis.causes if cause.name in wrong)
        lines.append(f"First: {first.fix}")
    return lines


def headline(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Returns the answers to the questions of someone who does not know the terms, each with its label."""
    recommendation, causes = diagnosis.recommendation, diagnosis.causes
    found = [
        f"{PLAIN[cause.name]} ({certainty(cause)}: confidence {cause.confidence:.2f} of 1)." for cause in causes[:2]
    ] or [f"{AGREES}."]
    lines: list[tuple[str, str]] = [("What was found", found[0]), *(("Apart from that", text) for text in found[1:])]
    lines.append(("How large it is", _large(diagnosis.measured)))
    if wrong := faults(diagnosis):
        lines.append(("What to do first", next(cause.fix for cause in causes if cause.name in wrong)))
    else:
        method = method_text(recommendation.preset, recommendation.overrides)
        text = f"Nothing has to be repaired. Use the correction {method}: section 4 says why and what to copy."
        lines.append(("What to do", text))
    lines.append(("Where it is", _place(diagnosis)))
    lines += [("Why this answer", f"{_capital(cause.evidence.rstrip('.'))}.") for cause in causes[:1]]
    # A hyphen at which lines do not break.
    return [(label, re.sub(r"(\de)-(\d)", "\\1\u2011\\2", text)) for label, text in lines]


def _large(measured: Measured) -> str:
    size, difference = measured.size, measured.size.mismatch["abs_diff_mean"]
    if not math.isfinite(difference):
        return "Not known: no token has two finite log-probs."
    ratio, interval = math.exp(difference), size.intervals.get("k3")
    by = f"{100 * math.expm1(difference):.2g}%" if ratio < 1.5 else f"a factor of {format_number(ratio)}"
    ends = ""
    if interval is not None and known(interval):
        ends = f", 95% interval {format_number(interval.low)} to {format_number(interval.high)}"
    text = (
        f"The two probabilities of a token, the trainer's and the sampler's, differ by {by} on average (k3, an "
        f"estimate of the KL divergence per token: {format_number(size.mismatch['k3'])}{ends}): {size_text(size)}."
    )
    masked = masked_text(measured.origin)
    return f"{text} That is {masked}." if masked else text


def _place(diagnosis: Diagnosis) -> str:
    """Returns which tokens the first cause concerns, and where the mismatch gathers."""
    measured, first = diagnosis.measured, diagnosis.causes[:1]
    where = where_text(measured, diagnosis.texts)
    where = f"Mostly at {where}." if hotspots(measured, diagnosis.texts) else f"{_capital(where)}."
    if not first or first[0].name not in MUST_FIX:
        return where
    concerned = first[0].tokens
    left_out = measured.removed or (concerned if first[0].name == "non-finite" else 0)
    tokens = measured.size.mismatch["tokens"] + left_out
    if not 0 < concerned < tokens:
        return where
    what = f"In {format_count(concerned, 'token')}, {format_percent(concerned / tokens)} of all."
    return f"{what} What remains without them: {where[0].lower()}{where[1:]}" if left_out else f"{what} {where}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:2].isalpha() else text  # k3 stays k3


def certainty(cause: Cause) -> str:
    """Returns the confidence as a word."""
    return next(word for least, word in CERTAINTY if cause.confidence >= least)


AGREES = "Trainer and sampler agree: no cause stands out above the noise floor"
CERTAINTY = ((0.9, "sure"), (0.7, "likely"), (0.5, "possible"), (0.0, "doubtful"))
PLAIN = {
    "placeholder": "Some log-probs in the file are constants that stand for missing values",
    "misaligned": "Trainer and sampler log-probs are paired with the wrong tokens",
    "retokenized": "The trainer scores other tokens than were sampled, since text was encoded again",
    "log-base": "One side uses logarithms of another base",
    "wrong-token": "The sampler reports the log-prob of another token than the one it sampled",
    "copied": "One column of log-probs is a copy of the other, so nothing can be measured",
    "temperature": "Trainer and sampler use different temperatures",
    "raw-logprobs": "The sampler reports log-probs of another distribution than it samples from",
    "truncated-sampling": "The sampler cuts its distribution (top-p, top-k or min-p), the trainer does not",
    "undelivered": "New weights do not arrive at the sampler",
    "stale": "The sampler used older weights than the trainer",
    "stale-cache": "The sampler answers from a cache of older weights",
    "non-finite": "Some log-probs are not finite or missing",
    "routing": "A few tokens were answered by other experts of the model",
    "quantized": "The difference is as large as that of quantized weights",
    "precision": "The difference is ordinary rounding",
    "long-context": "The difference grows with the length of the context",
    "unexplained": "Something is wrong that no known cause explains",
}
"""What each cause means, for a reader who does not know the terms."""
