"""Objectives from the tables of a recipe: presets with further parts, and parts alone."""

from __future__ import annotations

import math

import pytest

from trimtab.errors import TrimtabError
from trimtab.objectives import (
    OPSM,
    Aggregation,
    Band,
    Clipped,
    Divergence,
    Objective,
    PrefixBudget,
    Ratio,
    Reinforce,
    Veto,
    Weight,
    objective,
)

CLIPPED = {"kind": "clipped", "high": 0.28}


def test_a_preset_takes_further_masks_and_keeps_its_own():
    built = objective("geo-mask", mask=[{"kind": "veto", "of": "probability", "min": 1e-6}], keep_max=1.1)
    assert built.masks == (Band("geometric", 0.99, 1.1), Veto(1e-6, "probability"))
    assert built.name == "geo-mask"


def test_opsm_on_bypass_needs_no_proximal_pass():
    built = objective("token-bypass", mask=[{"kind": "opsm", "delta": 0.05}])
    assert built.masks == (OPSM(0.05),)
    assert built.needs == {"behavior"}


def test_miles_dense_configurations():
    """3: token weight and sequence mask; 4: the same with a veto (the seed's dense settings)."""
    third = objective(
        "composed",
        surrogate=CLIPPED,
        weight={"level": "token", "bound": "clip", "min": 0.5, "max": 2.0},
        mask=[{"kind": "band", "level": "sequence", "min": 0.5, "max": 2.0}],
    )
    weight, band = Weight("token", "clip", 0.5, 2.0), Band("sequence", 0.5, 2.0)
    assert third == Objective("composed", Ratio(), Clipped(high=0.28), weight, (band,))
    fourth = objective(
        "token-tis", mask=[{"kind": "band", "level": "sequence", "min": 0.5, "max": 2.0}, {"kind": "veto"}]
    )
    assert fourth.masks == (band, Veto(1e-4))


def test_every_part_can_be_given():
    built = objective(
        "composed",
        ratio={"level": "token", "over": "behavior"},
        surrogate={"kind": "reinforce", "ceiling": 3},
        mask=[
            {"kind": "binary_tv", "reduce": "token", "max": 0.2, "over": "current", "outward": True},
            {"kind": "prefix-budget", "max": 0.2},
        ],
        advantage="dr-grpo",
        aggregation="seq-mean-token-mean",
        kl="k3",
        kl_coef=0.1,
    )
    masks = (Divergence("binary_tv", "token", 0.2, "current", outward=True), PrefixBudget(0.2))
    assert (built.ratio, built.surrogate, built.masks) == (Ratio("token", "behavior"), Reinforce(3), masks)
    assert (built.advantage, built.kl.coef) == ("dr-grpo", 0.1)
    assert built.aggregation == Aggregation("seq-mean-token-mean")


def test_a_surrogate_may_need_another_aggregation_than_the_preset_has():
    surrogate = {"kind": "regression", "beta": 0.1}
    with pytest.raises(TrimtabError, match='use aggregation "trained-mean-token-sum"'):
        objective("gspo", ratio={"level": "sequence"}, surrogate=surrogate)
    built = objective("gspo", ratio={"level": "sequence"}, surrogate=surrogate, aggregation="trained-mean-token-sum")
    assert built.single_behavior is False


def test_parts_may_be_given_as_objects():
    assert objective("composed", surrogate=Clipped(), mask=[Veto()]).masks == (Veto(),)


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("composed", {}, "of parts alone needs a surrogate"),
        ("composed", {"surrogate": {"kind": "cliped"}}, "unknown surrogate 'cliped' .did you mean 'clipped'"),
        ("composed", {"surrogate": {"high": 0.2}}, "surrogate is a table with a `kind`"),
        ("composed", {"surrogate": {"kind": "clipped", "hihg": 0.2}}, "has no 'hihg' .did you mean 'high'"),
        ("composed", {"surrogate": {"kind": "clipped", "high": "0.2"}}, "high = '0.2' has the wrong type"),
        ("composed", {"surrogate": CLIPPED, "ratio": {"level": "word"}}, "Ratio: unknown 'word'"),
        ("composed", {"surrogate": CLIPPED, "ratio": {"over": 1}}, "over = 1 has the wrong type"),
        ("composed", {"surrogate": CLIPPED, "clip_high": 0.3}, "no keyword 'clip_high'"),
        ("composed", {"surrogate": CLIPPED, "wieght": {}}, "no keyword 'wieght' .did you mean 'weight'"),
        ("grpo", {"mask": {"kind": "veto"}}, r"write each as \[\[objective.mask\]\]"),
        ("grpo", {"mask": [{"kind": "band", "min": 0.5, "max": 2.0}]}, "mask 'band' needs 'level'"),
        ("grpo", {"mask": [{"kind": "band", "level": "token", "min": 0.5, "max": 0.9}]}, "must enclose 1"),
        ("grpo", {"mask": [{"kind": "veto"}, {"kind": "veto"}]}, "the same rejection rule is given twice"),
        ("grpo", {"mask": [{"kind": "opsm", "delta": True}]}, "delta = True has the wrong type"),
        ("opsm", {"mask": [{"kind": "opsm", "delta": 0.05}]}, "the same rejection rule is given twice"),
        ("token-bypass", {"weight": {"level": "token"}}, "already contains proximal/behavior"),
        ("grpo", {"surrogate": CLIPPED, "clip_low": 0.3}, "clip_low has no effect beside the given surrogate"),
        ("token-tis", {"weight": {"level": "token"}, "weight_max": 3.0}, "weight_max has no effect beside"),
        ("gmpo", {"ratio": {"level": "sequence"}}, "GeometricClip takes the mean of token ratios itself"),
        ("a3po", {"ratio": {"level": "token"}}, 'use a ratio over "behavior"'),
        ("drpo", {"ratio": {"level": "sequence", "over": "behavior"}}, '"token" over "behavior"'),
        ("vespo", {"ratio": {"level": "geometric", "over": "behavior"}}, 'use level "sequence"'),
        ("reinforce", {"centering": {}}, "centering is true or false, not {}"),
        ("ctpo", {"ratio": {"level": "token"}}, 'use level "prefix"'),
        ("grpo", {"denominator": "kept"}, "rejects nothing"),
        ("grpo", {"weight": {"bound": "mask", "max": math.inf}}, "holds every ratio"),
        ("grpo", {"weight": {"bound": "clip", "max": None}}, "holds every ratio"),
        ("grpo", {"mask": [{"kind": "band", "level": "token", "min": 0, "max": math.inf}]}, "holds every ratio"),
        ("grpo", {"mask": [{"kind": "k3", "reduce": "token", "max": math.inf}]}, "or nothing"),
        *(("opsm", {"delta": delta}, "or nothing, use a finite delta") for delta in (math.nan, -0.1, math.inf)),
        ("grpo", {"entropy_coef": math.inf}, "entropy_coef = inf: .* use a finite number"),
        ("grpo", {"kl_coef": math.inf}, "kl_coef = inf: .* use a finite number"),
        ("grpo", {"kl_coef": math.nan}, "kl_coef = nan: .* use a finite number"),
        ("vespo", {"k1_positive": math.inf}, "must be finite"),
        ("vespo", {"k1_positive": 10.0, "k2_positive": 0.0}, r"10, 0: the weight .* grows beyond e\^20"),
        ("vespo", {"k1_negative": 10.0, "k2_negative": 0.1}, r"10, 0.1: the weight .* grows beyond e\^20"),
        ("sapo", {"tau_positive": math.inf}, "must be finite"),
        ("drpo", {"epsilon": math.inf}, "use a finite number"),
        ("luffy", {"gamma": math.inf}, "finite number"),
        ("oapl", {"beta": math.inf}, "finite number"),
        ("m2po", {"tau": math.inf}, "finite and above 0"),
        ("cppo", {"divergence_max": math.inf}, "finite and above 0"),
        ("grpo", {"mask": [], "advantage": "grop"}, "unknown advantage 'grop' .did you mean 'grpo'"),
        ("grpo", {"advantage": "rloo"}, "no keyword 'advantage'"),
    ],
)
def test_mistakes_are_one_line(name, given, line):
    with pytest.raises(TrimtabError, match=line) as error:
        objective(name, **given)
    assert "\n" not in str(error.value)


def test_an_unbounded_weight_is_printed_without_a_bound():
    assert "sg[r_t] A log π" in objective("flash-reinforce").equation()
    assert (
        objective("composed", surrogate={"kind": "reinforce", "ceiling": math.inf}).equation().startswith("loss = −1/D")
    )
