"""Which curves a report shows, in which order. What each one means comes from the table of metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trimtab.diagnostics.catalog import Metric, metric
from trimtab.diagnostics.read import Run

QUANTILES = ("q01", "q05", "q50", "q95", "q99")
Kind = Literal["lines", "quantiles", "accuracy"]


@dataclass(frozen=True)
class Chart:
    """One figure. `lines` pairs a legend label with a key; a label "" is taken from the `<name>` a pattern matched.

    `about` is the key whose row in the table of metrics gives the caption and the shaded healthy band. `absolute`
    draws magnitudes, for estimates that may be negative on a logarithmic axis. `what` says what several curves have in
    common, where the sentence of one key would not; `each` gives every curve its own healthy range in the caption.
    """

    title: str
    about: str
    lines: tuple[tuple[str, str], ...] = ()
    kind: Kind = "lines"
    log: bool = False
    absolute: bool = False
    shade: bool = True
    each: bool = False
    what: str = ""

    @property
    def caption(self) -> Metric:
        row = metric(self.about)
        if row is None:
            raise KeyError(self.about)
        return row


@dataclass(frozen=True)
class Drawn:
    """A chart with the keys one run really has."""

    chart: Chart
    lines: list[tuple[str, str]] = field(default_factory=list)

    @property
    def healthy(self) -> str:
        """The healthy range in words, one for all curves or one for each."""
        if not self.chart.each:
            return self.chart.caption.healthy
        rows = [(label, metric(key)) for label, key in self.lines]
        return "; ".join(f"{label} {row.healthy}" for label, row in rows if row)


def _quantiles(title: str, prefix: str, about: str) -> Chart:
    return Chart(title, about, tuple((q, f"{prefix}{q}") for q in QUANTILES), kind="quantiles")


LAYOUT: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Learning",
        (
            Chart("Reward", "reward/mean", (("mean", "reward/mean"), ("", "reward/<name>"))),
            Chart("Held-out accuracy", "eval/<task>/greedy", (("", "eval/<task>/greedy"),), kind="accuracy"),
            Chart("Response length", "length/mean", (("mean", "length/mean"), ("longest", "length/max"))),
            Chart(
                "Entropy",
                "entropy/mean",
                (("trainer", "entropy/mean"), ("sampler", "entropy/rollout")),
                what="Mean entropy of the policy per token, as trainer and sampler see it.",
            ),
            Chart("Gradient norm", "optim/grad_norm", (("before clipping", "optim/grad_norm"),), log=True),
            Chart(
                "Lost data and skipped updates",
                "trajectories/dropped",
                (("no signal", "groups/no_signal"), ("dropped", "trajectories/dropped"), ("skipped", "optim/skipped")),
                shade=False,
                what="Groups whose rewards are all equal, trajectories left out, and updates skipped as not finite.",
            ),
        ),
    ),
    (
        "Trainer against sampler",
        (
            Chart(
                "KL estimates",
                "mismatch/k3",
                (("|k1|", "mismatch/k1"), ("k2", "mismatch/k2"), ("k3", "mismatch/k3")),
                log=True,
                absolute=True,
                what="Distance of trainer and sampler from their log-probs of the same tokens; look at k3 first.",
            ),
            Chart(
                "χ² divergence",
                "mismatch/chi2_token",
                (("per token", "mismatch/chi2_token"), ("per sequence", "mismatch/chi2_seq")),
                log=True,
                absolute=True,
                each=True,
                what="What importance weights cost in variance; per sequence it grows exponentially with length.",
            ),
            Chart(
                "Effective sample size",
                "mismatch/ess_token",
                (("token weights", "mismatch/ess_token"), ("sequence weights", "mismatch/ess_seq")),
                each=True,
                what="The share of the data that counts under importance weights, before any bound.",
            ),
            _quantiles("Raw ratio trainer / sampler", "mismatch/ratio_", "mismatch/ratio_q99"),
            Chart("Perplexity ratio", "mismatch/ppl_ratio", (("trainer / sampler", "mismatch/ppl_ratio"),)),
            Chart("Pearson correlation", "mismatch/pearson", (("of token probabilities", "mismatch/pearson"),)),
        ),
    ),
    (
        "The correction at work",
        (
            _quantiles("Weight before its bound", "weight_raw/", "weight_raw/q99"),
            _quantiles("Weight after its bound", "weight/", "weight/q99"),
            Chart("Weights changed by the bound", "weight/changed", (("changed", "weight/changed"),)),
            _quantiles("Ratio in the loss, before clipping", "ratio/", "ratio/q99"),
            Chart(
                "Clipped tokens",
                "clip/high",
                (("low", "clip/low"), ("high", "clip/high"), ("dual", "clip/dual")),
                what="Share of tokens without gradient because their ratio is beyond a clip bound.",
            ),
            Chart(
                "Rejected tokens",
                "reject/tokens",
                (("", "reject/<rule>"), ("any rule", "reject/tokens")),
                what="Share of tokens each rule rejected; they keep their place in the denominator.",
            ),
        ),
    ),
    (
        "Age and speed",
        (
            Chart(
                "Age of the tokens",
                "lag/mean",
                (("mean", "lag/mean"), ("oldest", "lag/max")),
                what="Optimizer updates between sampling a token and training on it.",
            ),
            Chart(
                "Speed",
                "tokens_per_second/rollout",
                (("sampling", "tokens_per_second/rollout"), ("training", "tokens_per_second/train")),
                what="Response tokens per second while sampling and while training.",
            ),
            Chart("Seconds by phase", "time/<phase>", (("", "time/<phase>"),)),
        ),
    ),
)
# Totals of other keys: drawn as curves of their own they would only repeat or dwarf the parts.
_NOT_A_PART = frozenset({"reward/mean", "reward/std", "reward/failed", "reject/tokens", "reject/sequences"})


def resolve(chart: Chart, run: Run) -> Drawn | None:
    """The chart with patterns expanded to the keys that hold numbers in `run`; None when there are none."""
    lines: list[tuple[str, str]] = []
    for line in (found for label, key in chart.lines for found in _expand(label, key, run)):
        # A total with a single part is that part: one curve, not two on top of each other.
        if not any(_same(run, line[1], known) for _, known in lines):
            lines.append(line)
    if chart.kind == "quantiles" and len(lines) < len(QUANTILES):
        return None
    return Drawn(chart, lines) if lines else None


def _same(run: Run, key: str, other: str) -> bool:
    """Whether a pattern's key repeats another curve step by step."""
    family = key.partition("/")[0]
    if family not in ("reward", "reject"):
        return False
    return all(np.array_equal(a, b) for a, b in zip(run.series(key), run.series(other), strict=True))


def _expand(label: str, key: str, run: Run) -> list[tuple[str, str]]:
    if "<" not in key:
        return [(label, key)] if len(run.series(key)[0]) else []
    pattern = re.compile(re.sub(r"<[a-z]+>", "([^/]+)", key))
    found = [(match[1], match[0]) for match in map(pattern.fullmatch, run.keys) if match]
    return [(name, match) for name, match in found if match not in _NOT_A_PART and len(run.series(match)[0])]
