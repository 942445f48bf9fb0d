"""Properties that hold for every objective, checked on compositions of parts that no preset has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import test_every_preset as presets
from tests.contract import test_gradients as gradients
from tests.contract.conftest import Batch, Laboratory

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


PROPERTIES = [
    partial(presets.test_values_at_padding_change_nothing, seed=0),
    partial(presets.test_an_observation_equals_the_response_with_the_observation_cut_out, seed=1, place=3, length=2),
    partial(presets.test_any_split_into_micro_batches_gives_the_same_update, seed=1, cuts=[0, 3, 3]),
    partial(presets.test_metrics_of_micro_batches_add_up_to_those_of_the_update, seed=0),
    partial(presets.test_order_of_rows_does_not_matter, seed=1),
    partial(presets.test_packed_rows_equal_unpacked_ones, seed=0, width=10),
    partial(presets.test_gradient_reaches_the_current_policy_alone, seed=0),
    partial(presets.test_external_tokens_are_read_by_the_shaped_loss_alone_and_without_their_behavior, seed=0),
    partial(presets.test_extreme_log_ratios_stay_finite_and_are_reported, far=1e4),
    partial(presets.test_extreme_log_ratios_stay_finite_and_are_reported, far=-1e4),
    presets.test_extreme_mismatch_stays_finite,
    presets.test_nothing_to_train_is_zero_and_counted,
    presets.test_a_diverged_model_gives_nan,
    presets.test_a_missing_policy_is_named,
    presets.test_low_precision_inputs_are_computed_in_float32,
    gradients.test_gradient_equals_finite_differences,
    gradients.test_regularizers_use_the_mask_without_keep_and_the_same_aggregation,
]


class OneComposition(Laboratory):
    """What the tests of presets take, with a composition in the place of every preset."""

    names = ("composed",)

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def objective(self, name: str, **overrides: Any) -> Objective:
        return objective(name, **{**self.parts, **overrides})

    def variants(self, name: str) -> list[Objective]:
        return [self.objective(name), self.objective(name, kl="unbiased", kl_coef=0.3, entropy_coef=0.2)]


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda one: getattr(one, "func", one).__name__.removeprefix("test_"))
@settings(max_examples=max(10, settings().max_examples))
@given(parts())
def test_what_holds_for_presets_holds(holds: Callable[..., None], parts: dict[str, Any]) -> None:
    holds(OneComposition(parts), "composed")


@given(compositions())
def test_what_it_says_it_needs_is_enough(obj: Objective) -> None:
    batch = Batch.random(1)
    logps = batch.logps()
    names = (
        "behavior",
        "proximal",
        "reference",
        "entropy",
        "off_policy",
        "turn",
        "age",
        "head_current",
        "head_behavior",
    )
    absent = {name: None for name in names if name not in obj.needs}
    out = obj(replace(logps, **absent), batch.advantage)
    assert out.loss.isfinite()
    rejected = [value for key, value in out.metrics.finalize().items() if key.startswith("reject/")]
    assert all(math.isnan(value) or 0 <= value <= 1 for value in rejected)


@given(compositions())
def test_its_equation_names_every_part(obj: Objective) -> None:
    text = obj.equation()
    for rule in obj.masks:
        assert f"keep where {rule.equation()}" in text
    if obj.weight is not None:
        assert obj.weight.equation() in text
    assert obj.centering == ("A·C" in text)
