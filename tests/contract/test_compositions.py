"""Properties that hold for every objective, checked on compositions of parts that no preset has."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.conftest import Batch, Laboratory
from torch.testing import assert_close

from trimtab.corrections import LEVELS
from trimtab.objectives import Objective, objective

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

LAB = Laboratory()
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
]


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
        "bound": st.sampled_from(["truncate", "mask"]),
        "max": st.just(1.5),
        "normalize": st.booleans(),
    }
)


@st.composite
def compositions(draw: st.DrawFn) -> Objective:
    """An objective of random parts that fit together."""
    parts: dict[str, Any] = {
        "ratio": {"level": draw(st.sampled_from(LEVELS)), "over": draw(st.sampled_from(["proximal", "behavior"]))},
        "surrogate": draw(st.sampled_from(SURROGATES)),
        "mask": draw(st.lists(masks(), max_size=2, unique_by=str)),
        "aggregation": draw(st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])),
        "denominator": draw(st.sampled_from(["original", "kept"])),
    }
    kind = parts["surrogate"]["kind"]
    fitting: dict[str, dict[str, Any]] = {
        "log-prob": {"ratio": {}},
        "regression": {"ratio": {"level": "sequence"}, "aggregation": "seq-mean-token-sum"},
        "aged-clip": {"ratio": {"level": "token", "over": "behavior"}},
        "gamma-weight": {"ratio": {"level": "sequence", "over": "behavior"}},
        "geometric-clip": {"ratio": {}},
        "quadratic-penalty": {"ratio": {"level": "token", "over": "behavior"}},
    }
    parts |= fitting.get(kind, {})
    weight = draw(WEIGHTS)
    if weight is not None and parts["ratio"].get("over") != "behavior":
        parts["weight"] = weight
    elif kind == "log-prob" or (kind == "reinforce" and parts["ratio"] == {"level": "token", "over": "behavior"}):
        parts["centering"] = not parts["mask"] and draw(st.booleans())
    if not parts["mask"] and parts.get("weight", {}).get("bound") != "mask":
        parts["denominator"] = "original"
    return objective("composed", **parts)


@given(compositions(), st.integers(0, 3))
def test_any_split_into_micro_batches_gives_the_same_update(obj: Objective, seed: int) -> None:
    batch = Batch.random(seed, rows=6, spread=0.4)
    parts = [batch.rows(rows) for rows in torch.arange(6).tensor_split([1, 1, 4])]
    whole = LAB.run(obj, batch)
    state = sum((LAB.prepare(obj, part) for part in parts[1:]), start=LAB.prepare(obj, parts[0]))
    runs = [LAB.run(obj, part, state) for part in parts]
    assert_close(sum(run.loss for run in runs), whole.loss, rtol=1e-9, atol=1e-11)
    assert_close(torch.cat([run.grad for run in runs]), whole.grad, rtol=1e-9, atol=1e-11)


@given(compositions(), st.integers(0, 3))
def test_values_at_padding_change_nothing(obj: Objective, seed: int) -> None:
    batch = Batch.random(seed, spread=0.4)

    def with_junk(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:2] != batch.mask.shape or not tensor.dtype.is_floating_point:
            return tensor
        return torch.where(batch.mask.view(*batch.mask.shape, *[1] * (tensor.ndim - 2)), tensor, batch.junk(tensor))

    clean, dirty = LAB.run(obj, batch), LAB.run(obj, batch.map(with_junk))
    assert_close(dirty.loss, clean.loss, rtol=1e-9, atol=1e-11)
    assert_close(dirty.grad, clean.grad, rtol=1e-9, atol=1e-11)
    assert (dirty.grad[~batch.mask] == 0).all()


@given(compositions(), st.sampled_from([1e4, -1e4, 30.0, -30.0]))
def test_extreme_policies_stay_finite(obj: Objective, far: float) -> None:
    batch = Batch.random(3)
    for changed in ({"current": batch.current + far}, {"behavior": batch.behavior + far}):
        run = LAB.run(obj, batch.changed(**changed))
        assert run.loss.isfinite()
        assert run.grad.isfinite().all()


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
