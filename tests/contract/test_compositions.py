"""Properties that hold for every objective, checked on compositions of parts that no preset has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import properties
from tests.contract.conftest import Laboratory

from trimtab.corrections import LEVELS
from trimtab.objectives import Objective, objective

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

OVER = st.sampled_from(["proximal", "current"])
SURROGATES: list[dict[str, Any]] = [
    {"kind": "clipped", "low": 0.2, "high": 0.3, "dual": 2.0},
    {"kind": "reinforce", "ceiling": 2.0},
    {"kind": "unclipped"},
    {"kind": "log-prob"},
    {"kind": "regression", "beta": 0.1},
    {"kind": "second-moment", "tau": 0.02},
    {"kind": "second-moment", "tau": 0.02, "form": "mask"},
    {"kind": "growing-clip"},
    {"kind": "banded"},
    {"kind": "aged-clip"},
    {"kind": "soft-gate"},
    {"kind": "gamma-weight"},
    {"kind": "geometric-clip"},
    {"kind": "quadratic-penalty"},
    {"kind": "shaped"},
]
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "trained-mean-token-sum"]


def masks() -> st.SearchStrategy[dict[str, Any]]:
    band = st.fixed_dictionaries({"level": st.sampled_from(LEVELS), "over": OVER}).map(
        lambda drawn: {"kind": "band", "min": 0.6, "max": 1.5, **drawn}
    )
    divergence = st.builds(
        lambda kind, reduce, over: {"kind": kind, "reduce": reduce, "over": over, "max": 0.1},
        st.sampled_from(["k1", "k2", "k3", "tv", "binary_tv", "binary_kl"]),
        st.sampled_from(["token", "mean", "max", "sum"]),
        OVER,
    )
    veto = st.builds(
        lambda of, over: {"kind": "veto", "min": 0.3, "of": of, "over": over},
        st.sampled_from(["ratio", "probability"]),
        OVER,
    )
    others = st.sampled_from(
        [
            {"kind": "opsm", "delta": 0.05},
            {"kind": "prefix-budget", "max": 0.1},
            {"kind": "binary_tv", "reduce": "token", "max": 0.05, "over": "current", "outward": True},
        ]
    )
    return st.one_of(band, divergence, veto, others)


WEIGHTS = st.none() | st.fixed_dictionaries(
    {
        "level": st.sampled_from(LEVELS),
        "bound": st.sampled_from(["truncate", "mask", "clip"]),
        "max": st.just(1.5),
        "normalize": st.booleans(),
        "over": OVER,
    }
)


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    """Random parts that fit together."""
    parts: dict[str, Any] = {
        "ratio": {"level": draw(st.sampled_from(LEVELS)), "over": draw(st.sampled_from(["proximal", "behavior"]))},
        "surrogate": draw(st.sampled_from(SURROGATES)),
        "mask": draw(st.lists(masks(), max_size=2, unique_by=lambda mask: str(sorted(mask.items())))),
        "aggregation": draw(st.sampled_from(AGGREGATIONS)),
        "denominator": draw(st.sampled_from(["original", "kept"])),
    }
    kind = parts["surrogate"]["kind"]
    fitting: dict[str, dict[str, Any]] = {
        "log-prob": {"ratio": {}},
        "regression": {"ratio": {"level": "sequence"}, "aggregation": "seq-mean-token-sum"},
        "aged-clip": {"ratio": {"level": "token", "over": "behavior"}},
        "gamma-weight": {"ratio": {"level": "sequence", "over": "behavior"}},
        "geometric-clip": {"ratio": {}},
        "growing-clip": {"ratio": {**parts["ratio"], "level": "prefix"}},
        "quadratic-penalty": {"ratio": {"level": "token", "over": "behavior"}},
    }
    parts |= fitting.get(kind, {})
    if parts["aggregation"] == "constant":
        parts["length_max"] = 9
    if kind == "shaped":  # tokens of external traces have no policy that a weight or a mask could read
        return {**parts, "mask": [], "ratio": {}, "denominator": "original"}
    weight = draw(WEIGHTS)
    if weight is not None and parts["ratio"].get("over") != "behavior":
        parts["weight"] = weight
    elif kind == "log-prob" or (kind == "reinforce" and parts["ratio"] == {"level": "token", "over": "behavior"}):
        parts["centering"] = not parts["mask"] and draw(st.booleans())
    if not parts["mask"] and parts.get("weight", {}).get("bound") != "mask":
        parts["denominator"] = "original"
    return parts


def compositions() -> st.SearchStrategy[Objective]:
    return parts().map(lambda drawn: objective("composed", **drawn))


class OneComposition(Laboratory):
    """What the tests of presets take, with a composition in the place of every preset."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def in_turn(self, name: str, cases: Sequence[Any]) -> Any:  # noqa: ARG002 - there is one name
        return cases[len(cases) // 2]

    def objective(self, name: str, **overrides: Any) -> Objective:
        return objective(name, **{**self.parts, **overrides})

    def variants(self, name: str) -> list[Objective]:
        return [self.objective(name), self.objective(name, kl="unbiased", kl_coef=0.3, entropy_coef=0.2)]


@pytest.mark.parametrize("holds", properties.FOR_ALL, ids=lambda one: one.__name__)
@settings(max_examples=max(10, settings().max_examples))
@given(parts())
def test_what_holds_for_presets_holds(holds: Callable[..., None], parts: dict[str, Any]) -> None:
    holds(OneComposition(parts), "composed")


@given(compositions())
def test_its_equation_names_every_part(obj: Objective) -> None:
    text = obj.equation()
    for rule in obj.masks:
        assert f"keep where {rule.equation()}" in text
    if obj.weight is not None:
        assert obj.weight.equation() in text
    assert obj.centering == ("A·C" in text)
