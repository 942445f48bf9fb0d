"""Selects the recommended preset by rules, and by the fair map's measurements of a mismatch like that of the data.

The first rule (rules.toml) whose condition holds decides. The fair map (docs/results) compares methods, each at its
published or its tuned settings, on responses of about 120 tokens; each regime of the map is one kind of mismatch. If a
regime covers the mismatch of the rule, its measurements decide among presets. `benchmarks/fair_map.py --advice` writes
`fair_map.json` from its runs.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trimtab.adapters.config_lines import lines
from trimtab.diagnosis.advice.preset_outcomes import AdviceData, rate_preset, rate_presets
from trimtab.diagnosis.records import MUST_FIX, Cause, Measured, PresetOutcome, Recommendation, read_table
from trimtab.objectives.calibrate import bounds_of
from trimtab.text import short

K3_FACTOR = 3.0  # a regime covers k3 up to this factor beyond the range of its runs
LENGTH_FACTOR = 2.0  # the same for the mean length of responses: methods that read whole responses change with it
NAMED = 4  # number of methods that a sentence names
OUTCOME_TOKENS = 100_000  # most tokens that presets are tried on


def advise(measured: Measured, causes: Sequence[Cause]) -> tuple[tuple[PresetOutcome, ...], Recommendation]:
    """Returns the outcomes of all presets on at most `OUTCOME_TOKENS` tokens, and the recommended one with its reason.

    If a cause must be fixed first (docs/reference-choosing.md), the reason names it, and no preset is recommended.
    """
    sample = measured.sample
    stride = -(-sample.tokens // OUTCOME_TOKENS)  # shares and quantiles need fewer tokens than causes do
    part = sample if stride < 2 else sample.select(np.arange(sample.responses) % stride == 0)
    data = AdviceData.of(part)
    table = rate_presets(data)
    size, origin = measured.size, measured.origin
    failed = [finding.name for finding in origin.findings if finding.status == "fail"]
    facts = CaseFacts(causes, size.verdict, size.mismatch["k3"], table, origin.trained, origin.responses, failed)
    _, preset, overrides, why = choose(facts, load_map())
    if preset and table and (preset, overrides) not in [(row.preset, row.overrides) for row in table]:
        table = (*table, rate_preset(data, preset, overrides))
    return table, Recommendation(preset, dict(overrides), why, lines(preset, overrides) if preset else {})


@dataclass(frozen=True)
class MethodResult:
    """Held-out accuracy of a method, mean over seeds with its interval."""

    accuracy: float
    low: float
    high: float
    best: bool  # whether no method is better beyond the spread of seeds
    rate: float  # the chosen learning rate, relative to the usual one
    settings: Mapping[str, float] = field(default_factory=dict)  # the chosen keywords of the objective
    published: float | None = None  # accuracy at the published settings and usual rate

    @property
    def text(self) -> str:
        usual = "" if self.published is None else f" ({self.published:.2f} at the usual one)"
        rate = "" if self.rate == 1 else f" at {self.rate:g} of the usual learning rate{usual}"
        changes = "".join(f" with {name}={value:g}" for name, value in self.settings.items())
        return f"{self.accuracy:.2f} [{self.low:.2f}, {self.high:.2f}]{changes}{rate}"


@dataclass(frozen=True, eq=False)
class MapRegime:
    """One kind of mismatch that the fair map measured.

    Ranges are the smallest and largest mean over the steps of a run. They cover only runs with the settings of
    `methods`, since k3 grows if a policy collapses.
    """

    name: str
    cause: str  # its name in `diagnose`; "" for reuse of data on which trainer and sampler agree
    description: str
    seeds: int
    before: float  # accuracy before training
    k3: tuple[float, float]  # range, nats per token
    tokens: tuple[float, float]  # range, tokens per response
    methods: Mapping[str, MethodResult]

    def outside(self, k3: float, tokens: float) -> str:
        """Returns why data with this k3 and mean length is not covered; empty if it is."""
        (k3_low, k3_high), (least, most) = self.k3, self.tokens
        if self.cause and not k3_low / K3_FACTOR <= k3 <= k3_high * K3_FACTOR:
            return f"k3 is {short(k3)} here and {short(k3_low)} to {short(k3_high)} there"
        if not least / LENGTH_FACTOR <= tokens <= most * LENGTH_FACTOR:
            return f"responses have {tokens:,.0f} tokens here and {least:.0f} to {most:.0f} there"
        return ""

    def preferred(self, preset: str) -> str:
        """Returns `preset` if it is among the best here, otherwise the method with the highest mean."""
        if preset in self.methods and self.methods[preset].best:
            return preset
        return max(self.methods, key=lambda name: self.methods[name].accuracy)

    def sentence(self, first: str) -> str:
        """Returns a sentence with the results of `first`, of the other best methods, and of the worst method."""
        order = sorted(self.methods, key=lambda name: -self.methods[name].accuracy)
        level = [name for name in order if self.methods[name].best and name != first]
        named = [first, *level[: NAMED - 1]]
        texts = [f"{name} {self.methods[name].text}" for name in named]
        last = "" if order[-1] in named else f"; lowest {order[-1]} {self.methods[order[-1]].text}"
        return (
            f"Measured on responses of {self.tokens[1]:.0f} tokens ({self.description}; each method tuned "
            f"or as published; {self.seeds} seeds; accuracy {self.before:.2f} before training): "
            f"{', '.join(texts)}{last}."
        )


def load_map() -> tuple[MapRegime, ...]:
    rows = json.loads((importlib.resources.files("trimtab.diagnosis.advice") / "fair_map.json").read_text("utf-8"))
    return tuple(
        MapRegime(**row | {"methods": {name: MethodResult(**result) for name, result in row["methods"].items()}})
        for row in rows
    )


def find_regime(regimes: Sequence[MapRegime], cause: str, k3: float, tokens: float) -> tuple[MapRegime | None, str]:
    """Returns the regime that covers a mismatch of this cause, k3 and mean length, or why there is none."""
    reasons = {regime: regime.outside(k3, tokens) for regime in regimes if regime.cause == cause}
    if not reasons:
        return None, "Tuned methods were not yet compared under this kind of mismatch (docs/results)."
    found = next((regime for regime, reason in reasons.items() if not reason), None)
    if found is not None:
        return found, ""
    regime, reason = next(iter(reasons.items()))
    return None, f"The comparison of tuned methods (docs/results, {regime.name}) does not cover this: {reason}."


FEWEST_TOKENS = 100  # fewest trained tokens for which the kind of mismatch is inferred
ACCEPTED = 0.7
"""Share of tokens that a rule per response must keep: trust-region masking monitors 70% (arXiv 2512.23075)."""


@dataclass(frozen=True)
class CaseFacts:
    """What rules know of a case."""

    causes: Sequence[Cause]
    verdict: str
    k3: float
    outcomes: Sequence[PresetOutcome]
    tokens: int  # number of trained tokens
    responses: int  # number of responses
    failed: Sequence[str] = ()  # names of findings about the data that must be repaired

    @property
    def faults(self) -> list[str]:
        """The names of what must be fixed first."""
        return [*(name for name in MUST_FIX if name in self.names), *self.failed]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(cause.name for cause in self.causes)

    def kept(self, preset: str) -> float:
        """Returns the share of tokens that a preset keeps at its published bounds."""
        return next((row.kept for row in self.outcomes if row.preset == preset and not row.calibrated), 0.0)

    def bounds(self, preset: str) -> Mapping[str, float]:
        """Returns a preset's bounds from the data; empty if it has none or there is too little data."""
        return next((row.overrides for row in self.outcomes if row.preset == preset and row.calibrated), {})


@dataclass(frozen=True)
class Rule:
    """A row of rules.toml, where each key is explained."""

    name: str
    when: str
    preset: str
    what: str
    why: str
    own_bounds: bool = True
    measured: str | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)


CONDITIONS: Mapping[str, Callable[[CaseFacts], bool]] = {
    "fault": lambda facts: bool(facts.faults),
    "floor": lambda facts: facts.verdict in ("exact", "rounding"),
    "tiny": lambda facts: facts.tokens < FEWEST_TOKENS and not facts.names,
    "stale, short": lambda facts: "stale" in facts.names and facts.kept("seq-bypass") >= ACCEPTED,
    "stale, long": lambda facts: "stale" in facts.names,
    "quantized": lambda facts: "quantized" in facts.names,
    "moe": lambda facts: "routing" in facts.names or (facts.verdict == "moe" and "precision" not in facts.names),
    "precision": lambda facts: "precision" in facts.names or facts.verdict in ("dense", "small-dense"),
    "beyond": lambda facts: True,  # noqa: ARG005
}
"""The condition of each rule by name."""
RULES = tuple(Rule(**row) for row in read_table("rules.toml")["rule"])


class Choice(NamedTuple):
    """A row of the list "which method when"; the first row that fits a run decides."""

    rule: str  # name of the rule
    when: str
    preset: str  # "" if something must be repaired first
    bounds: str  # where the bounds are from
    regime: str = ""  # the runs that measured the preset; "" for none
    accuracy: str = ""  # held-out accuracy of the preset
    uncorrected: str = ""  # held-out accuracy of `grpo` in the same regime


def list_choices() -> Iterator[Choice]:
    """Yields a row for each rule. docs/choosing.py writes them into pages, `trimtab explain` prints them."""
    regimes = {regime.cause: regime for regime in load_map()}
    for rule in RULES:
        regime = None if rule.measured is None else regimes.get(rule.measured)
        bounds = "published" if rule.preset else ""
        if rule.own_bounds and rule.preset and bounds_of(rule.preset):
            bounds = ", ".join(["from your data", *(f"{key}={value:g}" for key, value in rule.fixed.items())])
        measured = ("", "", "")
        if regime is not None:
            uncorrected = "" if rule.preset == "grpo" else regime.methods["grpo"].text
            measured = (regime.description, regime.methods[rule.preset].text, uncorrected)
        yield Choice(rule.name, rule.when, rule.preset, bounds, *measured)


def choose(facts: CaseFacts, regimes: Sequence[MapRegime] = ()) -> tuple[Rule, str, Mapping[str, float], str]:
    """Returns the first rule that holds, the recommended preset, its overrides, and the reason with the data's numbers.

    The preset is the rule's, unless one of the map's `regimes` covers the case and other presets are better there.
    """
    rule = next(rule for rule in RULES if CONDITIONS[rule.name](facts))
    fields = {
        "faults": " and ".join(facts.faults),
        "k3": short(facts.k3),
        "seq_bypass": f"{facts.kept('seq-bypass'):.0%}",
        "geo_mask": f"{facts.kept('geo-mask'):.0%}",
        "tokens": facts.tokens,
    }
    what, why = rule.what.format(**fields), rule.why.format(**fields)
    regime, note = None, ""
    if rule.measured is not None and regimes:
        regime, note = find_regime(regimes, rule.measured, facts.k3, facts.tokens / max(facts.responses, 1))
    if not rule.measured:  # log-probs do not show reuse of data: advice for those who reuse it
        note = "" if regime is None or rule.preset not in regime.methods else regime.sentence(rule.preset)
    elif regime is not None:
        preset = regime.preferred(rule.preset)
        return rule, preset, regime.methods[preset].settings, f"{what} {regime.sentence(preset)}"
    overrides = facts.bounds(rule.preset) if rule.own_bounds else {}
    if rule.own_bounds and not overrides and bounds_of(rule.preset):
        why += " There are too few responses here to take bounds from, so these are the published ones."
    return rule, rule.preset, {**overrides, **rule.fixed}, " ".join(filter(None, (what, why, note)))
