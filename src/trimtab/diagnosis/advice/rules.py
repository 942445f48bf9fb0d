"""The rules that select the recommended preset; the first one that applies decides.

Where the fair map covers the mismatch of a rule, what it measured decides among presets. The reason of a rule names the
measurement that supports it; docs/choosing.md lists the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.diagnosis.advice.fair_map import MapRegime, covering
from trimtab.diagnosis.records import MUST_FIX, Cause, PresetOutcome
from trimtab.objectives.calibrate import bounds_of

FEWEST = 100
"""Fewest trained tokens for which the kind of mismatch is inferred."""

ACCEPTED = 0.7
"""Share of tokens that a rule per response must keep: trust-region masking monitors 70% (arXiv 2512.23075)."""


@dataclass(frozen=True)
class RuleInputs:
    """The inputs of a rule: causes, verdict and k3, outcomes of presets, number of trained tokens and of responses.

    failed: names of findings about the data that must be repaired.
    """

    causes: Sequence[Cause]
    verdict: str
    k3: float
    outcomes: Sequence[PresetOutcome]
    tokens: int
    responses: int
    failed: Sequence[str] = ()

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
    """A preset ("" for none) and the condition under which it is recommended.

    what, why: format strings of what the mismatch is and of the reason for the preset (fields: `choose`). own_bounds:
    whether bounds are taken from the data. measured: the cause that the fair map is asked for, None for no question.
    fixed: bounds that do not come from the data.
    """

    name: str
    applies: Callable[[RuleInputs], bool]
    preset: str
    what: str
    why: str
    own_bounds: bool = True
    measured: str | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)


RULES = (
    Rule(
        "fault",
        lambda inputs: bool(inputs.faults),
        "",
        "Fix {faults} first: no correction makes up for that, and the figures measure the fault.",
        "Then run diagnose again.",
        own_bounds=False,
    ),
    Rule(
        "floor",
        lambda inputs: inputs.verdict in ("exact", "rounding"),
        "grpo",
        "Trainer and sampler agree to rounding (k3 {k3}): every correction would multiply by 1.",
        "Use any method without one; token-bypass saves the proximal forward pass. With many updates per batch the "
        "learning rate decides more than the method: try half and a quarter of it first.",
        measured="",
    ),
    Rule(
        "tiny",
        lambda inputs: inputs.tokens < FEWEST and not inputs.names,
        "token-tis",
        "{tokens} trained tokens are too few to tell what the mismatch is (k3 {k3}).",
        "Until there is more data, use token-tis at its published bound, which changes almost nothing while trainer "
        "and sampler agree.",
        own_bounds=False,
    ),
    Rule(
        "stale, short",
        lambda inputs: "stale" in inputs.names and inputs.kept("seq-bypass") >= ACCEPTED,
        "seq-bypass",
        "Where the sampler's weights are old, refreshing them more often removes the cause.",
        "Without a correction, training collapses; the ratio of the whole response, clipped to [0.5, 4], was best "
        "(laboratory, weights refreshed every 32 updates, accuracy of five seeds: grpo 0.13, token-tis 0.70, m2po "
        "0.82, seq-bypass 0.85). Here it keeps {seq_bypass} of the tokens.",
        measured="stale",
    ),
    Rule(
        "stale, long",
        lambda inputs: "stale" in inputs.names,
        "m2po",
        "Where the sampler's weights are old, refreshing them more often removes the cause. The ratio of a whole "
        "response has drifted too far (seq-bypass would keep {seq_bypass} of the tokens).",
        "m2po bounds the second moment of the ratio per token; it was designed for old data (arXiv 2510.01161) and "
        "reached 0.82 in the laboratory, where grpo fell to 0.13 and token-tis to 0.70.",
        measured="stale",
    ),
    Rule(
        "long-context",
        lambda inputs: "long-context" in inputs.names,
        "icepop",
        "The mismatch grows with depth in the context (k3 {k3}), so that the last tokens dominate a product over a "
        "long response. Computing attention alike on both sides removes the cause.",
        "Weights per token, and a mask of the few tokens beyond bounds from this data, work at any length. This is an "
        "argument, not a measured comparison.",
        measured="long-context",
    ),
    Rule(
        "quantized",
        lambda inputs: "quantized" in inputs.names,
        "icepop",
        "A quantized sampler causes a heavy tail of tokens (k3 {k3}).",
        "Weights correct most of them, and the few tokens beyond the bounds, quantiles of this data, are masked at any "
        "length. In the laboratory (sampler of three bits, mean of five seeds) IcePop was level with token-tis (0.81 "
        "and 0.82) and with a geometric mask (0.79).",
        measured="quantized",
    ),
    Rule(
        "moe",
        lambda inputs: "routing" in inputs.names or (inputs.verdict == "moe" and "precision" not in inputs.names),
        "geo-mask-token-tis",
        "Where tokens are routed to other experts, a few of them have a large mismatch (k3 {k3} over all); replaying "
        "the sampler's routing would remove the cause.",
        "Bounded token weights correct most tokens, and the geometric mask drops responses that drifted, at any "
        "length. Miles' 30B-A3B runs, one each, needed both: weights up to 1.5 with the mask stayed stable, without it "
        "they collapsed, and so did weights up to 2 with it. So weights end at 1.5; the other bounds are quantiles of "
        "this data: the mask's published ones keep {geo_mask}.",
        measured="routing",
        fixed={"weight_max": 1.5},
    ),
    Rule(
        "precision",
        lambda inputs: "precision" in inputs.names or inputs.verdict in ("dense", "small-dense"),
        "token-tis",
        "The mismatch is that of numerical precision (k3 {k3}): small, centred, without a heavy tail.",
        "Truncated token weights remove its bias at almost no variance, and mask no token.",
        measured="precision",
    ),
    Rule(
        "beyond",
        lambda inputs: True,  # noqa: ARG005
        "geo-mask-token-tis",
        "k3 {k3} is more than precision, quantization or routing explain, and no cause was identified: look for it "
        "first (weights that were not loaded, another chat template, another adapter).",
        "Until then, the geometric mask with bounds from this data drops the worst responses.",
    ),
)


def choose(inputs: RuleInputs, regimes: Sequence[MapRegime] = ()) -> tuple[Rule, str, Mapping[str, float], str]:
    """Returns the first rule that holds, the recommended preset, its overrides, and the reason with the data's numbers.

    The preset is the rule's, unless one of the map's `regimes` covers the case and it is not among the best there.
    """
    rule = next(rule for rule in RULES if rule.applies(inputs))
    fields = {
        "faults": " and ".join(inputs.faults),
        "k3": f"{inputs.k3:.1e}",
        "seq_bypass": f"{inputs.kept('seq-bypass'):.0%}",
        "geo_mask": f"{inputs.kept('geo-mask'):.0%}",
        "tokens": inputs.tokens,
    }
    what, why = rule.what.format(**fields), rule.why.format(**fields)
    regime, note = None, ""
    if rule.measured is not None and regimes:
        regime, note = covering(regimes, rule.measured, inputs.k3, inputs.tokens / max(inputs.responses, 1))
    if not rule.measured:  # log-probs say nothing of reuse, which is advice for those who do it
        note = "" if regime is None or rule.preset not in regime.methods else regime.sentence(rule.preset)
    elif regime is not None:
        preset = regime.preferred(rule.preset)
        return rule, preset, regime.methods[preset].settings, f"{what} {regime.sentence(preset)}"
    overrides = inputs.bounds(rule.preset) if rule.own_bounds else {}
    if rule.own_bounds and not overrides and bounds_of(rule.preset):
        why += " There are too few responses here to take bounds from, so these are the published ones."
    return rule, rule.preset, {**overrides, **rule.fixed}, " ".join(filter(None, (what, why, note)))
