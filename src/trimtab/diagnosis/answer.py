"""The result of a diagnosis, and its answer: figures and sentences that terminal, Markdown, the page and JSON print.

`Diagnosis.answer` writes each sentence once; the modules of `output` only lay the sentences out. A new kind of sentence
is a new field of `Answer`. causes.toml has the meaning and remedy of each cause, known_faults.toml the faults that were
reported in public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from trimtab.diagnosis.advice.rules import FEWEST_TOKENS
from trimtab.diagnosis.causes.candidates import group_by_test
from trimtab.diagnosis.known_faults import find_matches
from trimtab.diagnosis.measure.views import find_hotspots
from trimtab.diagnosis.records import (
    CAUSES,
    MUST_FIX,
    Candidate,
    Cause,
    CauseKind,
    DataSummary,
    KnownFault,
    Measured,
    MismatchSize,
    PresetOutcome,
    Recommendation,
    read_table,
)
from trimtab.errors import Finding
from trimtab.intervals import Interval
from trimtab.runs.metric_catalog import K3, band_text, bounds, judge, k3_ranges
from trimtab.text import beside, format_count, format_percent, number, short, short_exponent

WIDE = 3.0  # if high / low of the mean ratio's interval is larger, it does not support a mean of 1
CLOSE = 1e-3  # a mean ratio this close to 1 is accepted, however narrow its interval is
MOST_KNOWN = 3  # largest number of known faults shown under a cause
MOST_SPOTS = 3  # largest number of hotspots that the answer names
SHOWN = 3  # number of families of candidates that the answer names
PROOF = {"healthy": "", "proven": "Proven: ", "fits": "Fits, but unproven: ", "differential": "Not known: "}
"""How the first line begins for each kind of answer."""
OF_BATCH = ("end token", "repeated", "advantages")
"""Findings about the responses of a batch, which the verdict repeats: the log-probs may be right nevertheless."""
RESCORE = "trimtab rescore FILE --model PATH"
CERTAINTY = ((0.9, "sure"), (0.7, "likely"), (0.5, "possible"), (0.0, "doubtful"))
Kind = Literal["healthy", "proven", "fits", "differential"]
FIGURES: Mapping[str, tuple[str, str]] = {key: tuple(text) for key, text in read_table("texts.toml")["figures"].items()}
"""Name and meaning of each figure, in reading order."""


def format_interval(interval: Interval | None, form: Callable[[float], str] = short) -> str:
    """Formats the ends as `1.7e-4 to 2.1e-4`; empty if they are not known."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    return f"{form(interval.low)} to {form(interval.high)}"


def overrides_text(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={number(value)}" for name, value in overrides.items())


def _form(key: str) -> Callable[[float], str]:
    if key in ("ratio_mean", "ppl_ratio", "pearson"):  # near 1, where four digits are too few
        return lambda value: short_exponent(f"{value:.5g}") if math.isfinite(value) else "–"
    return short if key in ("k1", "k2", "k3", "chi2_token") else number


@dataclass(frozen=True)
class Figure:
    """A statistic of the mismatch as text."""

    name: str
    meaning: str
    value: str  # with enough digits to tell it from the ends of its healthy range
    interval: str  # at 95%; "" without an interval
    healthy: str  # the healthy range
    judged: str  # healthy or outside, as report.html marks it; "" without a healthy range

    @classmethod
    def of(cls, size: MismatchSize, key: str) -> Figure:
        metric, value, form = f"mismatch/{key}", size.mismatch[key], _form(key)
        interval = format_interval(size.intervals.get(key), form)
        text = beside(value, bounds(metric), form)
        return cls(*FIGURES.get(key, (key, "")), text, interval, band_text(metric), judge(metric, value))

    @property
    def text(self) -> str:
        """The value as `1.9e-4 (1.7e-4 to 2.1e-4)`, or alone if its interval is missing or has no width."""
        has_width = self.interval and self.interval != f"{self.value} to {self.value}"
        return f"{self.value} ({self.interval})" if has_width else self.value


def range_text(size: MismatchSize) -> str:
    """Returns the description of the published range that contains k3."""
    if size.verdict == "rounding":
        return "no more than the rounding of the stored log-probs causes"
    k3_range = k3_ranges()[size.verdict]
    return k3_range.below if size.mismatch["k3"] < k3_range.low else k3_range.text


class Family(NamedTuple):
    """Candidates that one test tells apart: the likely candidates, and the test with its result for each."""

    likely: Sequence[Candidate]
    test: str

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Family:
        """Takes candidates with at least a tenth of the first one's odds as likely; only the test names the others."""
        results = "; ".join(f"it is {one.name} if {one.result}" for one in candidates)
        likely = [one for one in candidates if one.odds >= 0.1 * candidates[0].odds]
        return cls(likely, f"{candidates[0].test}: {results}")

    @property
    def text(self) -> str:
        """The likely candidates, the signs for and against each, and their test."""
        parts = []
        for one in self.likely:
            signs = "; but ".join(filter(None, (one.speaks_for, one.speaks_against)))
            parts.append(f"{one.plain} ({one.name}){f': {signs}' if signs else ''}.")
        return f"{' Or '.join(parts)} Test: {self.test}."


@dataclass(frozen=True)
class Answer:
    """The sentences and figures of a diagnosis."""

    severity: str  # good or warn
    # healthy; proven: undoing the cause removes the mismatch, or the files state it; fits: only size and shape of the
    # mismatch match the first cause; differential: no cause is named.
    kind: Kind
    cause: str  # what the first cause means, and how certain it is
    # Texts after their labels: the first two causes ("", Also), candidates unless a cause is proven (Candidate 1), and
    # what to do first (First).
    verdict: tuple[tuple[str, str], ...]
    read: str
    size: str
    masked: str  # responses that the trainer masks out; "" without any
    mean_ratio: tuple[str, str]  # good, warn or plain (undecided), and the sentence
    where: str
    split: str
    figures: Mapping[str, Figure]  # statistics of the mismatch by key
    outside: Mapping[str, str]  # by key: the healthy range of each figure outside it
    faults: Mapping[str, str]  # remedies, by name, of causes and findings to repair before any correction
    findings: tuple[Finding, ...]  # all findings, the causes first
    families: tuple[Family, ...]  # the candidates that are shown
    known: Mapping[str, tuple[KnownFault, ...]]  # faults that were reported in public, by cause
    method: str  # the recommended preset, after its condition if it has one
    outcome: PresetOutcome | None  # effect of the recommended preset on the data


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result of `trimtab diagnose`."""

    measured: Measured
    causes: tuple[Cause, ...]
    outcomes: tuple[PresetOutcome, ...]
    recommendation: Recommendation
    texts: Mapping[int, str] = field(default_factory=dict)  # texts of the views' token ids, if a tokenizer is known
    candidates: tuple[Candidate, ...] = ()  # possible causes of an unproven difference, most likely first

    @cached_property
    def answer(self) -> Answer:
        measured, causes, recommended = self.measured, self.causes, self.recommendation
        origin = measured.origin
        found = [
            Finding("fail" if cause.name in MUST_FIX else "note", cause.name, cause.evidence, cause.fix)
            for cause in causes
        ]
        findings = (*found, *origin.findings)
        faults = {finding.name: finding.next_step for finding in findings if finding.status == "fail"}
        severity = _severity(measured, causes, faults)
        kind = _kind(causes, self.candidates, severity)
        doubt = None if faults or severity == "good" else _doubtful(causes, measured.size.verdict)
        overrides = overrides_text(recommended.overrides)
        method = f"{recommended.preset} with {overrides}" if overrides else recommended.preset or "no correction yet"
        shown = () if kind == "healthy" else tuple(map(Family.of, group_by_test(self.candidates)[:SHOWN]))
        repair = next(iter(faults.values()), None)
        first = _first_step(self, shown, repair, kind, doubt, f"use the correction {method}")
        nothing = _text_without_cause(kind, recommended.preset, origin.trained)
        wrong = next((finding.detail for finding in findings if finding.status == "fail"), nothing)
        texts = [cause_text(cause) for cause in causes] or [wrong]
        chosen = recommended.preset, recommended.overrides
        figures = {key: Figure.of(measured.size, key) for key in measured.size.mismatch}
        return Answer(
            severity=severity,
            kind=kind,
            cause=texts[0],
            verdict=_verdict(kind, texts, shown, origin.findings, first),
            read=read_text(origin),
            size=_size_text(measured),
            masked=_masked_text(origin),
            mean_ratio=mean_ratio_text(measured.size),
            where=_where_text(measured, causes, self.texts),
            split=_split_text(measured),
            figures=figures,
            outside={key: figure.healthy for key, figure in figures.items() if figure.judged == "outside"},
            faults=faults,
            findings=findings,
            families=shown,
            known={cause.name: _shown(cause.name, origin, faults, severity) for cause in causes},
            method=f"if {doubt.intended}, {method}" if doubt else method,
            outcome=next((one for one in self.outcomes if (one.preset, one.overrides) == chosen), None),
        )


def _kind(causes: Sequence[Cause], candidates: Sequence[Candidate], severity: str) -> Kind:
    if severity == "good":
        return "healthy"
    if (causes and causes[0].is_proven) or (candidates and candidates[0].found):
        return "proven"
    return "fits" if causes and causes[0].name != "unexplained" else "differential"


def _text_without_cause(kind: Kind, preset: str, trained: int) -> str:
    if kind != "healthy":
        return "k3 is outside its healthy range, in too few tokens to tell why"
    if preset != "grpo" and trained < FEWEST_TOKENS:
        return f"{format_count(trained, 'trained token')}: too few to tell whether both sides agree"
    return cause_text(None)


def _verdict(
    kind: Kind, texts: Sequence[str], families: Sequence[Family], findings: Sequence[Finding], first: str
) -> tuple[tuple[str, str], ...]:
    """Returns `Answer.verdict`. texts: a sentence per cause, or one if there is none; findings: of the files."""
    if families and (likeliest := families[0].likely[0]).found:
        texts = [f"{likeliest.plain} ({likeliest.name}), as its test found"]
    opening = f"{PROOF[kind]}{texts[0][0].lower()}{texts[0][1:]}." if PROOF[kind] else f"{texts[0]}."
    odd = [one.detail for one in findings if one.name in OF_BATCH]
    return (
        ("", opening),
        *(("Also", f"{text}.") for text in texts[1:2]),
        *((f"Candidate {place}", family.text) for place, family in enumerate(families, start=1)),
        *(("Also", f"{detail[0].upper()}{detail[1:]}.") for detail in odd),
        ("First", first),
    )


def cause_text(cause: Cause | None) -> str:
    """Returns what a cause means and how certain it is; for None, that no cause stands out."""
    if cause is None:
        return "Trainer and sampler agree: no cause stands out above the noise floor"
    word = next(word for least, word in CERTAINTY if cause.confidence >= least)
    kind = CAUSES[cause.name]
    meaning = kind.plain if cause.is_stated else kind.unsure or kind.plain
    return f"{meaning} ({cause.name}, {word}, confidence {cause.confidence:.2f})"


def _severity(measured: Measured, causes: Sequence[Cause], faults: Mapping[str, str]) -> str:
    """Returns good if k3 is healthy, with masked responses too, and no fault and no cause but `precision` is found."""
    harmless = all(cause.name == "precision" for cause in causes) and not faults
    k3 = [measured.size.mismatch["k3"], *([measured.origin.masked.k3_with] if measured.origin.masked else [])]
    return "good" if harmless and all(judge(K3, value) == "healthy" for value in k3) else "warn"


def _doubtful(causes: Sequence[Cause], verdict: str) -> CauseKind | None:
    """Returns the kind of the first cause that may be a fault: it is not stated, or k3 is beyond every range.

    Skips `precision` if there is another cause.
    """
    causes = [cause for cause in causes if cause.name != "precision"] or causes
    return next((CAUSES[cause.name] for cause in causes if verdict == "beyond" or not cause.is_stated), None)


def _first_step(
    diagnosis: Diagnosis, shown: Sequence[Family], repair: str | None, kind: Kind, doubt: CauseKind | None, method: str
) -> str:
    """Returns what to do first. repair: the next step of the first failed finding.

    Log-probs show that there is a difference and its size, not whether it is intended. So a cause needs no repair only
    if the files or the recipe state it, and if k3 is in a range published for working setups.
    """
    if shown and diagnosis.candidates[0].found:
        return "Repair that, then run diagnose again."
    for finding in diagnosis.measured.origin.findings:  # findings about the files
        if finding.status == "fail":
            return finding.next_step
    if kind == "differential" and shown:
        first = shown[0].test
        otherwise = "" if diagnosis.measured.rescored else f" Otherwise `{RESCORE}` says which side is off."
        return f"{first[0].upper()}{first[1:]}.{otherwise}"
    if repair is not None:
        return repair
    if kind == "healthy":
        # `grpo` is recommended only if trainer and sampler agree up to rounding.
        use = "no correction is needed" if diagnosis.recommendation.preset == "grpo" else method
        odd = [f"{one.next_step}." for one in diagnosis.measured.origin.findings if one.name in OF_BATCH]
        return (
            f"{odd[0][0].upper()}{odd[0][1:]} The log-probs show no fault: {use}." if odd else f"No fault shows: {use}."
        )
    if doubt is not None:
        return f"{doubt.test}. If {doubt.intended}, {method}."
    if diagnosis.causes:
        return f"Nothing has to be repaired; {method}."
    return "k3 is outside its healthy range, and the data does not tell why: diagnose more tokens."


def read_text(origin: DataSummary) -> str:
    """Returns what was read and what was dropped."""
    trained = "" if origin.trained == origin.tokens else f", {origin.trained:,} of them trained"
    reasons = ", ".join(f"{count:,} {why}" for why, count in origin.dropped.items() if count)
    dropped = f"dropped {sum(origin.dropped.values()):,} ({reasons})" if reasons else "nothing dropped"
    text = f"{format_count(origin.files, 'file')} ({origin.framework}): {format_count(origin.responses, 'response')}"
    return f"{text}, {format_count(origin.tokens, 'token')}{trained}; {dropped}"


def _size_text(measured: Measured) -> str:
    size, difference = measured.size, measured.size.mismatch["abs_diff_mean"]
    by = f"{100 * math.expm1(difference):.2g}%" if difference < 0.4 else f"a factor of e^{difference:.2g}"
    apart = f"; the two probabilities of a token differ by {by} on average" if math.isfinite(difference) else ""
    text = f"k3 (KL divergence) {Figure.of(size, 'k3').text} nats per token: {range_text(size)}"
    return f"{text}{apart}; rounding alone causes {short(size.floor)}"


def _masked_text(origin: DataSummary) -> str:
    if (masked := origin.masked) is None:
        return ""
    return (
        f"without {format_count(masked.responses, 'response')} ({masked.share:.0%}) that the trainer masks out of its "
        f"loss: k3 is {short(masked.k3)} over them, {short(masked.k3_with)} over all"
    )


def mean_ratio_text(size: MismatchSize) -> tuple[str, str]:
    """Tests whether the mean ratio is 1, as it must be if the log-probs are of the sampling distribution.

    Returns good, warn or plain (undecided), and the result in words.
    """
    mean, interval = size.mismatch["ratio_mean"], size.intervals.get("ratio_mean")
    figure = Figure.of(size, "ratio_mean")
    text = f"mean ratio {figure.text}"
    if interval is None or not figure.interval:
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


def _split_text(measured: Measured) -> str:
    split = measured.split
    if not split.separable or split.mismatch is None or split.staleness is None:
        return f"mismatch and staleness are not separable: {split.why}"
    if split.staleness == 0:
        return split.why
    parts = []
    for name, value in (("mismatch", split.mismatch), ("staleness", split.staleness)):
        ends = format_interval(split.intervals.get(name))
        parts.append(f"{name} {short(value)}{f' ({ends})' if ends else ''}")
    return f"k3 of the drift: {', '.join(parts)}"


def _where_text(measured: Measured, causes: Sequence[Cause], texts: Mapping[int, str]) -> str:
    """Lists the largest hotspots of the mismatch, after the tokens that the first cause concerns."""
    spots = find_hotspots(measured, texts)
    if not measured.size.mismatch["k3"] > 0:
        text = "nowhere: there is no mismatch"
    elif not spots:
        text = "spread evenly: no part of the data has much more of the mismatch than its share of the tokens"
    else:
        text = "; ".join(
            f"{spot.what} ({format_percent(spot.tokens)} of the tokens, {format_percent(spot.k3)} of the mismatch)"
            for spot in spots[:MOST_SPOTS]
        )
    first = next(iter(causes), None)
    if first is None or first.name not in MUST_FIX:
        return text
    left_out = measured.removed or (first.tokens if first.name == "non-finite" else 0)
    tokens = measured.size.mismatch["tokens"] + left_out
    if not 0 < first.tokens < tokens:
        return text
    concerned = f"{format_count(first.tokens, 'token')} ({format_percent(first.tokens / tokens)} of all)"
    return f"{concerned}; {'without them: ' if left_out else ''}{text}"


def _shown(cause: str, data: DataSummary, faults: Mapping[str, str], severity: str) -> tuple[KnownFault, ...]:
    """Returns the known faults to show under a cause.

    A fault is shown if it affects the versions of the data, or if the cause must be repaired. Any other fault must be
    of the same trainer, nothing may need repair first, and the data must not be healthy.
    """
    loud = not faults and severity != "good"
    found = [
        match
        for match in find_matches(cause, data)
        if match.certain or cause in faults or (loud and data.framework in match.trainers)
    ]
    return tuple(found[:MOST_KNOWN])
