"""Numbers and sentences of a diagnosis, shared by the terminal, Markdown and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.diagnosis.known import KnownFault, matches
from trimtab.diagnosis.output.hotspots import hotspots
from trimtab.diagnosis.records import (
    CAUSES,
    MUST_FIX,
    Cause,
    CauseKind,
    DataSummary,
    Diagnosis,
    Measured,
    MismatchSize,
    PresetOutcome,
)
from trimtab.errors import Finding
from trimtab.intervals import Interval
from trimtab.pages.numbers import beside, number, short, short_exponent
from trimtab.runs.metric_catalog import K3, band_text, bounds, judge, k3_ranges

FIGURES = {
    "k3": ("k3, nats per token", "KL divergence of sampler and trainer; 0 where they agree; look here first"),
    "ratio_mean": ("mean ratio trainer / sampler", "1 where log-probs are correct, however large k3 is"),
    "ess_token": ("effective sample size, tokens", "share of the tokens that count under importance weights"),
    "pearson": ("Pearson r of the probabilities", "1 at best"),
    "ess_seq": ("effective sample size, responses", "share of the responses that count under importance weights"),
    "k1": ("k1", "the KL divergence from log-ratios alone; may be negative"),
    "k2": ("k2", "half the mean squared log-ratio"),
    "chi2_token": ("χ², token", "variance of token importance weights"),
    "chi2_seq": ("χ², sequence", "variance of sequence importance weights"),
    "ppl_ratio": ("perplexity ratio", "trainer over sampler, mean over responses"),
    "ppl_train": ("perplexity", "of the trainer, mean over responses"),
    "abs_diff_mean": ("mean |log-ratio|", "nats per token"),
    "abs_diff_max": ("largest |log-ratio|", "nats"),
}
"""Name and meaning of each figure, in reading order."""
WIDE = 3.0
"""Ratio of the ends of an interval of the mean ratio beyond which it does not support a mean of 1."""
MOST_KNOWN = 3
"""Largest number of known faults that is shown under a cause."""
CLOSE = 1e-3
"""A mean ratio this close to 1 is accepted, however narrow its interval is."""


def format_number(value: float) -> str:
    """Formats a number with two significant digits; 0 as 0, values that are not finite as a dash."""
    return short(value) if math.isfinite(value) else "–"


def format_signed(value: float) -> str:
    """Formats a number with a typographic minus."""
    return f"−{format_number(-value)}" if value < 0 else format_number(value)


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


def format_count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def format_interval(interval: Interval | None, form: Callable[[float], str] = format_number) -> str:
    """Formats the ends as `1.7e-4 to 2.1e-4`; empty if they are not known."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    return f"{form(interval.low)} to {form(interval.high)}"


def _form(key: str) -> Callable[[float], str]:
    if key in ("ratio_mean", "ppl_ratio", "pearson"):  # near 1, where four digits are too few
        return lambda value: short_exponent(f"{value:.5g}") if math.isfinite(value) else "–"
    return format_number if key in ("k1", "k2", "k3", "chi2_token") else number


def figure(size: MismatchSize, key: str) -> str:
    """Formats a statistic of the mismatch, with enough digits to tell it from the ends of its healthy range."""
    return beside(size.mismatch[key], bounds(f"mismatch/{key}"), _form(key))


def interval_of(size: MismatchSize, key: str) -> str:
    """Formats the 95% interval of a statistic; empty if it has none."""
    return format_interval(size.intervals.get(key), _form(key))


def with_interval(size: MismatchSize, key: str) -> str:
    """Formats a statistic as `1.9e-4 (1.7e-4 to 2.1e-4)`, without parentheses if there is no interval."""
    ends = interval_of(size, key)
    return f"{figure(size, key)} ({ends})" if ends else figure(size, key)


def overrides_text(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={number(value)}" for name, value in overrides.items())


def method_text(diagnosis: Diagnosis) -> str:
    """Returns the recommended preset with its bounds."""
    recommended = diagnosis.recommendation
    if not recommended.preset:
        return "no correction yet"
    overrides = overrides_text(recommended.overrides)
    return f"{recommended.preset} with {overrides}" if overrides else recommended.preset


def read_text(origin: DataSummary) -> str:
    """Returns what was read and what was dropped."""
    trained = "" if origin.trained == origin.tokens else f", {origin.trained:,} of them trained"
    reasons = ", ".join(f"{count:,} {why}" for why, count in origin.dropped.items() if count)
    dropped = f"dropped {sum(origin.dropped.values()):,} ({reasons})" if reasons else "nothing dropped"
    text = f"{format_count(origin.files, 'file')} ({origin.framework}): {format_count(origin.responses, 'response')}"
    return f"{text}, {format_count(origin.tokens, 'token')}{trained}; {dropped}"


def range_text(size: MismatchSize) -> str:
    """Returns the description of the published range that contains k3."""
    if size.verdict == "rounding":
        return "no more than the rounding of the stored log-probs causes"
    k3_range = k3_ranges()[size.verdict]
    if k3_range.low is not None and size.mismatch["k3"] < k3_range.low:
        return k3_range.text.replace("within what", "less than")
    return k3_range.text


def size_text(measured: Measured) -> str:
    """Returns k3, what it means, and how far apart the probabilities of a token are."""
    size, difference = measured.size, measured.size.mismatch["abs_diff_mean"]
    by = f"{100 * math.expm1(difference):.2g}%" if difference < 0.4 else f"a factor of e^{difference:.2g}"
    apart = f"; the two probabilities of a token differ by {by} on average" if math.isfinite(difference) else ""
    text = f"k3 (KL divergence) {with_interval(size, 'k3')} nats per token: {range_text(size)}"
    return f"{text}{apart}; rounding alone causes {format_number(size.floor)}"


def masked_text(origin: DataSummary) -> str:
    """Describes the responses that the trainer masks out of its loss; empty without any."""
    if (masked := origin.masked) is None:
        return ""
    return (
        f"without {format_count(masked.responses, 'response')} ({masked.share:.0%}) that the trainer masks out of its "
        f"loss: k3 is {format_number(masked.k3)} over them, {format_number(masked.k3_with)} over all"
    )


def outside(size: MismatchSize) -> dict[str, str]:
    """Returns the statistics outside their healthy range, with the range as text, as report.html marks them."""
    keys = (key for key, value in size.mismatch.items() if judge(f"mismatch/{key}", value) == "outside")
    return {key: band_text(f"mismatch/{key}") for key in keys}


def outside_lines(size: MismatchSize, a_line: int = 4) -> list[str]:
    """Returns the figures outside their healthy ranges, each with its range, `a_line` of them in a line."""
    items = [f"{key} {figure(size, key)} ({band})" for key, band in outside(size).items()]
    if not items:
        return ["every figure is within its healthy range"]
    if len(items) <= a_line:
        return [f"outside their healthy ranges: {', '.join(items)}"]
    lines = [", ".join(items[start : start + a_line]) for start in range(0, len(items), a_line)]
    return [f"{len(items)} figures are outside their healthy ranges:", *lines]


def contract(size: MismatchSize) -> tuple[str, str]:
    """Tests whether the mean ratio is 1, as it is if the log-probs are those of the sampling distribution.

    Returns good, warn or plain (undecided), and the result in words.
    """
    mean, interval = size.mismatch["ratio_mean"], size.intervals.get("ratio_mean")
    text = f"mean ratio {with_interval(size, 'ratio_mean')}"
    if interval is None or not interval_of(size, "ratio_mean"):
        return "plain", f"{text}; too few responses for an interval"
    if interval.low <= 1 <= interval.high:
        if interval.high > WIDE * interval.low:
            return "plain", f"{text}: the interval is too wide to decide, since a few tokens determine the mean"
        return "good", f"{text}: the interval contains 1, as expected of correct log-probs without top-p and top-k"
    if abs(mean - 1) <= CLOSE:
        return "good", f"{text}: within {format_percent(CLOSE)} of 1"
    if mean < 1:
        return "warn", f"{text} is below 1: tokens likely under the trainer cannot be sampled, or log-probs are wrong"
    return "warn", f"{text} is above 1: the sampler's log-probs are not those of the distribution it sampled from"


def where_text(diagnosis: Diagnosis, most: int = 3) -> str:
    """Lists the `most` largest hotspots of the mismatch, after the tokens that the first cause concerns."""
    measured = diagnosis.measured
    spots = hotspots(measured, diagnosis.texts)
    if not measured.size.mismatch["k3"] > 0:
        text = "nowhere: there is no mismatch"
    elif not spots:
        text = "spread evenly: no part of the data has much more of the mismatch than its share of the tokens"
    else:
        text = "; ".join(
            f"{spot.what} ({format_percent(spot.tokens)} of the tokens, {format_percent(spot.k3)} of the mismatch)"
            for spot in spots[:most]
        )
    first = next(iter(diagnosis.causes), None)
    if first is None or first.name not in MUST_FIX:
        return text
    left_out = measured.removed or (first.tokens if first.name == "non-finite" else 0)
    tokens = measured.size.mismatch["tokens"] + left_out
    if not 0 < first.tokens < tokens:
        return text
    concerned = f"{format_count(first.tokens, 'token')} ({format_percent(first.tokens / tokens)} of all)"
    return f"{concerned}; {'without them: ' if left_out else ''}{text}"


def split_text(measured: Measured) -> str:
    """Describes the split of the drift into mismatch and staleness, or why it is unknown."""
    split = measured.split
    if not split.separable or split.mismatch is None or split.staleness is None:
        return f"mismatch and staleness are not separable: {split.why}"
    if split.staleness == 0:
        return split.why
    parts = []
    for name, value in (("mismatch", split.mismatch), ("staleness", split.staleness)):
        ends = format_interval(split.intervals.get(name))
        parts.append(f"{name} {format_number(value)}{f' ({ends})' if ends else ''}")
    return f"k3 of the drift: {', '.join(parts)}"


def faults(diagnosis: Diagnosis) -> dict[str, str]:
    """Returns the remedy, by name, of the causes and findings that must be repaired before any correction."""
    causes = {cause.name: cause.fix for cause in diagnosis.causes if cause.name in MUST_FIX}
    failed = [finding for finding in diagnosis.measured.origin.findings if finding.status == "fail"]
    return causes | {finding.name: finding.next_step for finding in failed}


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """Returns everything that was found, the causes first."""
    causes = [
        Finding("fail" if cause.name in MUST_FIX else "note", cause.name, cause.evidence, cause.fix)
        for cause in diagnosis.causes
    ]
    return [*causes, *diagnosis.measured.origin.findings]


def known_faults_of(diagnosis: Diagnosis, cause: Cause) -> list[KnownFault]:
    """Returns the known faults to show under a cause.

    Where versions are unknown, noise is blamed on faults of the same trainer only, and that only where nothing must be
    repaired first and the data is not healthy.
    """
    origin, wrong = diagnosis.measured.origin, faults(diagnosis)
    loud = not wrong and severity(diagnosis) != "good"
    found = [
        match
        for match in matches(cause.name, origin)
        if match.certain or cause.name in wrong or (loud and origin.framework in match.trainers)
    ]
    return found[:MOST_KNOWN]


def recommended_outcome(diagnosis: Diagnosis) -> PresetOutcome | None:
    """Returns the outcome of the recommended preset, at the recommended bounds if there is one."""
    recommended = diagnosis.recommendation
    same = [outcome for outcome in diagnosis.outcomes if outcome.preset == recommended.preset]
    exact = [outcome for outcome in same if dict(outcome.overrides) == dict(recommended.overrides)]
    return (exact or same or [None])[0]


def severity(diagnosis: Diagnosis) -> str:
    """Returns good if k3 is healthy, also with masked responses, and `precision` is all that was found, if anything."""
    harmless = all(cause.name == "precision" for cause in diagnosis.causes) and not faults(diagnosis)
    measured = diagnosis.measured
    k3 = [measured.size.mismatch["k3"], *([measured.origin.masked.k3_with] if measured.origin.masked else [])]
    return "good" if harmless and all(judge(K3, value) == "healthy" for value in k3) else "warn"


def cause_text(cause: Cause | None) -> str:
    """Returns what a cause means and how sure it is; that there is none for None."""
    if cause is None:
        return "Trainer and sampler agree: no cause stands out above the noise floor"
    word = next(word for least, word in CERTAINTY if cause.confidence >= least)
    kind = CAUSES[cause.name]
    meaning = kind.plain if cause.is_stated else kind.unsure or kind.plain
    return f"{meaning} ({cause.name}, {word}, confidence {cause.confidence:.2f})"


def verdict_lines(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Returns the first two causes and what to do first, each after its label ("", Also, First)."""
    causes = [("Also" if index else "", f"{cause_text(cause)}.") for index, cause in enumerate(diagnosis.causes[:2])]
    return [*(causes or [("", f"{cause_text(None)}.")]), ("First", _first_step(diagnosis))]


def _first_step(diagnosis: Diagnosis) -> str:
    """Returns what to do first.

    Log-probs show that a difference is there and how large it is, not that it is meant. So only what the files or the
    recipe state needs no repair, and that only at sizes that are published for working setups.
    """
    wrong, method = faults(diagnosis), f"use the correction {method_text(diagnosis)}"
    if wrong:
        return next(iter(wrong.values()))
    if severity(diagnosis) == "good":
        # Recommended only where trainer and sampler agree to rounding.
        return f"No fault shows: {'no correction is needed' if diagnosis.recommendation.preset == 'grpo' else method}."
    if (doubt := doubtful(diagnosis)) is not None:
        return f"{doubt.test}. If {doubt.intended}, {method}."
    if diagnosis.causes:
        return f"Nothing has to be repaired; {method}."
    return "k3 is outside its healthy range, and the data does not tell why: diagnose more tokens."


def doubtful(diagnosis: Diagnosis) -> CauseKind | None:
    """Returns the kind of the first cause that may be intended or a fault, since neither files nor recipe state it.

    Rounding that is left beside another cause is not doubted.
    """
    is_beyond = diagnosis.measured.size.verdict == "beyond"
    causes = [cause for cause in diagnosis.causes if cause.name != "precision"] or diagnosis.causes
    return next((CAUSES[cause.name] for cause in causes if is_beyond or not cause.is_stated), None)


def advice_text(diagnosis: Diagnosis) -> str:
    """Returns the recommended preset, after the condition under which it is one."""
    doubt = None if faults(diagnosis) or severity(diagnosis) == "good" else doubtful(diagnosis)
    return f"{f'if {doubt.intended}, ' if doubt else ''}{method_text(diagnosis)}"


CERTAINTY = ((0.9, "sure"), (0.7, "likely"), (0.5, "possible"), (0.0, "doubtful"))
