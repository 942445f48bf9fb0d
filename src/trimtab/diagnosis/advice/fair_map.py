"""What the fair map measured of a mismatch like that of the data, or that it does not cover it.

The map (docs/results) compares methods, each at its published or its tuned settings, on responses of about 120 tokens,
one kind of mismatch a regime. `fair_map.json` is written by `benchmarks/fair_map.py --advice` from its runs.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

K3_FACTOR = 3.0
"""A regime covers k3 up to this factor beyond the range of its runs."""
LENGTH_FACTOR = 2.0
"""The same for the mean length of responses: methods that read whole responses change with it."""
NAMED = 4
"""Number of methods that a sentence names."""


@dataclass(frozen=True)
class MethodResult:
    """Held-out accuracy of a method, mean over seeds with its interval.

    best: whether no method is better beyond the spread of seeds. rate: the chosen learning rate, relative to the usual
    one. settings: the chosen keywords of the objective. published: accuracy at the published settings and usual rate.
    """

    accuracy: float
    low: float
    high: float
    best: bool
    rate: float
    settings: Mapping[str, float] = field(default_factory=dict)
    published: float | None = None

    @property
    def text(self) -> str:
        usual = "" if self.published is None else f" ({decimal(self.published)} at the usual one)"
        rate = "" if self.rate == 1 else f" at {self.rate:g} of the usual learning rate{usual}"
        return f"{decimal(self.accuracy)} [{decimal(self.low)}, {decimal(self.high)}]{rate}"


@dataclass(frozen=True, eq=False)
class MapRegime:
    """One kind of mismatch. cause: what `diagnose` calls it, "" for reuse of data on which trainer and sampler agree.

    k3, tokens: smallest and largest mean over the steps of a run, nats per token, tokens per response; of the runs with
    the settings of `methods`, since k3 grows where a policy collapses. before: untrained accuracy.
    """

    name: str
    cause: str
    description: str
    seeds: int
    before: float
    k3: tuple[float, float]
    tokens: tuple[float, float]
    methods: Mapping[str, MethodResult]

    def outside(self, k3: float, tokens: float) -> str:
        """Returns why data with this k3 and mean length is not covered; empty if it is."""
        (k3_low, k3_high), (short, long) = self.k3, self.tokens
        if self.cause and not k3_low / K3_FACTOR <= k3 <= k3_high * K3_FACTOR:
            return f"k3 is {k3:.1e} here and {k3_low:.1e} to {k3_high:.1e} there"
        if not short / LENGTH_FACTOR <= tokens <= long * LENGTH_FACTOR:
            return f"responses have {tokens:,.0f} tokens here and {short:.0f} to {long:.0f} there"
        return ""

    def preferred(self, preset: str) -> str:
        """Returns `preset` if it is among the best here, otherwise the method of the highest mean."""
        if preset in self.methods and self.methods[preset].best:
            return preset
        return max(self.methods, key=lambda name: self.methods[name].accuracy)

    def sentence(self, first: str) -> str:
        """Returns the result of `first`, of methods that are level with it, and of the worst."""
        order = sorted(self.methods, key=lambda name: -self.methods[name].accuracy)
        level = [name for name in order if self.methods[name].best and name != first]
        named = [first, *level[: NAMED - 1]]
        texts = [f"{name} {self.methods[name].text}" for name in named]
        last = "" if order[-1] in named else f"; lowest {order[-1]} {self.methods[order[-1]].text}"
        return (
            f"Measured on responses of {self.tokens[1]:.0f} tokens ({self.description}; each method tuned "
            f"or as published; {self.seeds} seeds; accuracy {decimal(self.before)} before training): "
            f"{', '.join(texts)}{last}."
        )


def decimal(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def load_map() -> tuple[MapRegime, ...]:
    rows = json.loads((importlib.resources.files("trimtab.diagnosis.advice") / "fair_map.json").read_text("utf-8"))
    return tuple(
        MapRegime(**row | {"methods": {name: MethodResult(**result) for name, result in row["methods"].items()}})
        for row in rows
    )


def covering(regimes: Sequence[MapRegime], cause: str, k3: float, tokens: float) -> tuple[MapRegime | None, str]:
    """Returns the regime that covers a mismatch of this cause, k3 and mean length, or why there is none."""
    reasons = {regime: regime.outside(k3, tokens) for regime in regimes if regime.cause == cause}
    if not reasons:
        return None, "Tuned methods were not yet compared under this kind of mismatch (docs/results)."
    found = next((regime for regime, reason in reasons.items() if not reason), None)
    if found is not None:
        return found, ""
    regime, reason = next(iter(reasons.items()))
    return None, f"The comparison of tuned methods (docs/results, {regime.name}) does not cover this: {reason}."
