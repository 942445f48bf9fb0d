"""The table of presets: parts, complete defaults, refusals, and the printed equation."""

from __future__ import annotations

import math

import pytest

from trimtab.errors import TrimtabError
from trimtab.objectives import (
    OPSM,
    AgedClip,
    Band,
    Banded,
    Clipped,
    Divergence,
    GammaWeight,
    GeometricClip,
    GrowingClip,
    LogProb,
    PrefixBudget,
    QuadraticPenalty,
    Ratio,
    Regression,
    Reinforce,
    SecondMoment,
    Shaped,
    SoftGate,
    Unclipped,
    Weight,
    keywords_of,
    objective,
    objectives,
)

TOKEN, BYPASS = Ratio("token", "proximal"), Ratio("token", "behavior")
PPO, HIGHER, WIDE = Clipped(0.2, 0.2), Clipped(0.2, 0.28), Clipped(0.5, 3.0, 10.0)
BY_TOKEN, BY_SEQUENCE = "token-mean", "seq-mean-token-mean"
GEO = Band("geometric", 0.99, 1.01)


def over_current(kind: str, reduce: str, largest: float) -> Divergence:
    return Divergence(kind, reduce, largest, "current")


def outward(kind: str, largest: float) -> Divergence:
    return Divergence(kind, "token", largest, "current", outward=True)


TABLE = {
    "grpo": (TOKEN, PPO, None, (), BY_SEQUENCE, "grpo"),
    "dapo": (TOKEN, HIGHER, None, (), BY_TOKEN, "grpo"),
    "dr-grpo": (TOKEN, PPO, None, (), "constant", "dr-grpo"),
    "gspo": (Ratio("geometric"), Clipped(3e-4, 4e-4), None, (), BY_SEQUENCE, "grpo"),
    "cispo": (TOKEN, Reinforce(5.0), None, (), BY_TOKEN, "grpo"),
    "reinforce": (TOKEN, LogProb(), None, (), BY_TOKEN, "grpo"),
    "token-bypass": (BYPASS, PPO, None, (), BY_TOKEN, "grpo"),
    "token-alp-bypass": (BYPASS, Clipped(0.2, 0.28, 10.0), None, (), BY_TOKEN, "grpo"),
    "seq-bypass": (Ratio("sequence", "behavior"), WIDE, None, (), BY_TOKEN, "grpo"),
    "token-tis": (TOKEN, PPO, Weight("token", "truncate", max=2.0), (), BY_TOKEN, "grpo"),
    "seq-tis": (TOKEN, PPO, Weight("sequence", "truncate", max=2.0), (), BY_TOKEN, "grpo"),
    "turn-tis": (TOKEN, PPO, Weight("turn", "truncate", max=2.0), (), BY_TOKEN, "grpo"),
    "token-mis": (TOKEN, PPO, Weight("sequence", "mask", 0.0, 2.0), (), BY_TOKEN, "grpo"),
    "seq-mis": (Ratio("sequence"), Clipped(0.5, 3.0), Weight("sequence", "mask", 0.0, 2.0), (), BY_TOKEN, "grpo"),
    "icepop": (TOKEN, PPO, Weight("token", "mask", 0.5, 5.0), (), BY_SEQUENCE, "grpo"),
    "geo-mask": (TOKEN, PPO, None, (GEO,), BY_TOKEN, "grpo"),
    "geo-mask-token-tis": (TOKEN, PPO, Weight("token", "clip", 0.5, 2.0), (GEO,), BY_TOKEN, "grpo"),
    "k3-mask": (TOKEN, PPO, None, (Divergence("k3", "mean", 0.01),), BY_TOKEN, "grpo"),
    "opsm": (TOKEN, PPO, None, (OPSM(0.05),), BY_SEQUENCE, "grpo"),
    "token-alp": (BYPASS, Clipped(0.2, 0.28, 10.0), None, (), BY_TOKEN, "grpo"),
    "seq-alp": (Ratio("sequence", "behavior"), WIDE, None, (), BY_TOKEN, "grpo"),
    "soup": (BYPASS, HIGHER, None, (), BY_TOKEN, "grpo"),
    "oapl": (Ratio("sequence", "behavior"), Regression(1e-3), None, (), "trained-mean-token-sum", "optimal"),
    "m2po": (BYPASS, SecondMoment(0.04), None, (), BY_TOKEN, "grpo"),
    "luffy": (TOKEN, Shaped(0.1), None, (), "constant", "dr-grpo"),
    "dppo": (BYPASS, Reinforce(20.0), None, (outward("binary_tv", 0.15),), BY_TOKEN, "grpo"),
    "dppo-kl": (BYPASS, Reinforce(20.0), None, (outward("binary_kl", 0.05),), BY_TOKEN, "grpo"),
    "ipo": (BYPASS, Unclipped(), None, (over_current("binary_tv", "token", 0.3),), BY_TOKEN, "grpo"),
    "flash-reinforce": (
        BYPASS,
        Reinforce(math.inf),
        None,
        (over_current("binary_kl", "mean", 3e-3),),
        BY_SEQUENCE,
        "batch-mean",
    ),
    "trm": (
        BYPASS,
        Unclipped(),
        None,
        (over_current("k2", "max", 0.05), over_current("k3", "mean", 1e-3)),
        BY_SEQUENCE,
        "grpo",
    ),
    "cppo": (BYPASS, Unclipped(), None, (PrefixBudget(0.15, 0.02, 0.9, 0.8),), BY_TOKEN, "grpo"),
    "ctpo": (Ratio("prefix"), GrowingClip(0.025, 0.05, 0.05, 0.5), None, (), BY_SEQUENCE, "grpo"),
    "pnpo": (Ratio("prefix_geometric"), Banded(0.2, 0.2), None, (), BY_SEQUENCE, "grpo"),
    "a3po": (BYPASS, AgedClip(0.2, 0.2), None, (), BY_TOKEN, "grpo"),
    "sapo": (TOKEN, SoftGate(1.0, 1.05), None, (), BY_SEQUENCE, "grpo"),
    "vespo": (Ratio("sequence", "behavior"), GammaWeight(2.0, 3.0, 3.0, 2.0), None, (), BY_TOKEN, "grpo"),
    "gmpo": (TOKEN, GeometricClip(0.4, 0.4), None, (), BY_SEQUENCE, "grpo"),
    "drpo": (BYPASS, QuadraticPenalty(0.15), None, (), BY_TOKEN, "grpo"),
    "score-centering": (BYPASS, Reinforce(2.0), None, (), BY_TOKEN, "dr-grpo"),
}


def test_the_table_is_complete():
    assert set(objectives()) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_its_row_of_the_table(name):
    obj = objective(name)
    parts = (obj.ratio, obj.surrogate, obj.weight, obj.masks, obj.aggregation.kind, obj.advantage)
    assert parts == TABLE[name]
    assert (obj.name, obj.aggregation.denominator, obj.kl.coef, obj.entropy_coef) == (name, "original", 0, 0)
    assert obj.centering == (name == "score-centering")


@pytest.mark.parametrize("name", TABLE)
def test_every_keyword_changes_the_objective_and_the_equation(name):
    changed = {
        "aggregation": "seq-mean-token-sum",
        "length_max": 7,
        "denominator": "kept",
        "kl": "k1",
        "form": "mask",
    }
    bases = {"length_max": {"aggregation": "constant", "length_max": 6}, "kl": {"kl_coef": 0.1}}
    if name not in ("luffy", "score-centering"):  # they take no mask, without which `denominator` has no effect
        bases["denominator"] = {"mask": [{"kind": "veto"}]}
    for key, default in keywords_of(name).items():
        if key == "denominator" and key not in bases:
            continue
        if key in changed:
            value = changed[key]
        elif isinstance(default, bool):
            value = not default
        else:
            value = {"weight_min": 0.25, "keep_min": 0.25, "quantile": 0.5}.get(key, (default or 1.0) * 1.5)
        base = bases.get(key, {})
        before, after = objective(name, **base), objective(name, **{**base, key: value})
        assert before != after, key
        assert before.equation() != after.equation(), key


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("tokentis", {}, "did you mean 'token-tis'"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"weight_max": 2.0}, "no keyword 'weight_max'"),
        ("cispo", {"clip_low": 0.2}, "no keyword 'clip_low'"),
        ("oapl", {"aggregation": "token-mean"}, "no keyword 'aggregation'"),
        ("m2po", {"clip_dual": 3.0}, "no keyword 'clip_dual'"),
        ("token-tis", {"weight_min": 0.5}, "no keyword 'weight_min'"),
        ("grpo", {"length_max": 5}, "length_max has no effect"),
        ("grpo", {"aggregation": "constant"}, "set length_max"),
        ("dr-grpo", {"length_max": 0}, "set length_max"),
        ("grpo", {"kl": "k3"}, "no effect without kl_coef"),
        ("grpo", {"kl": "k5", "kl_coef": 1.0}, "unknown kl 'k5'"),
        ("grpo", {"aggregation": "tokenmean"}, "did you mean 'token-mean'"),
        ("grpo", {"denominator": "keep"}, "did you mean 'kept'"),
        ("grpo", {"clip_low": "0.2"}, "clip_low = '0.2' has the wrong type"),
        ("grpo", {"clip_low": True}, "wrong type"),
        ("grpo", {"clip_low": None}, "wrong type"),
        ("token-tis", {"normalize": 1}, "wrong type"),
        ("dr-grpo", {"length_max": 7.5}, "wrong type"),
        ("grpo", {"clip_low": 1.5}, "clip_low: low = 1.5: the bound is 1 - low"),
        ("grpo", {"clip_high": -0.1}, "clip_high: high = -0.1: the bound is 1 + high"),
        ("grpo", {"clip_dual": 0.5}, "more than 1"),
        ("token-tis", {"weight_max": 0.2}, "must enclose 1"),
        ("geo-mask", {"keep_min": -0.01, "keep_max": 0.01}, "must enclose 1"),
        ("cispo", {"ceiling": 0.2}, "1 or more"),
        ("oapl", {"beta": 0.0}, "finite number > 0"),
        ("luffy", {"gamma": 0.0}, "finite number > 0"),
        ("m2po", {"tau": 0.0}, "above 0"),
        ("m2po", {"tau": None}, "tau = None has the wrong type"),
        ("m2po", {"form": "masked"}, "unknown form 'masked' .did you mean 'mask'"),
        ("m2po", {"form": 1}, "form = 1 has the wrong type"),
        ("m2po", {"form": None}, "form = None has the wrong type"),
    ],
)
def test_mistakes_are_one_line_that_names_the_word(name, keywords, message):
    with pytest.raises(TrimtabError, match=message.replace("+", r"\+")) as error:
        objective(name, **keywords)
    assert "\n" not in str(error.value)


def test_a_recipe_may_write_whole_numbers():
    assert objective("token-tis", weight_max=3, kl_coef=1) == objective("token-tis", weight_max=3.0, kl_coef=1.0)
    assert objective("seq-bypass", clip_dual=None).surrogate == Clipped(0.5, 3.0)
    assert objective("dr-grpo", aggregation="constant").aggregation.length_max == 1024


EQUATIONS = {
    "token-tis": "loss = −1/D Σ m·sg[min(ρ_t, 2)]·min(r_t A, clip(r_t, 0.8, 1.2) A)",
    "gspo": "loss = −1/D Σ m·min(r_geo A, clip(r_geo, 0.9997, 1.0004) A)",
    "seq-alp": "loss = −1/D Σ m·max[A<0](min(r A, clip(r, 0.5, 4) A), 10 A)",
    "icepop": "loss = −1/D Σ m·sg[ρ_t·1[0.5 ≤ ρ_t ≤ 5]]·min(r_t A, clip(r_t, 0.8, 1.2) A)",
    "geo-mask": "loss = −1/D Σ m·keep·min(r_t A, clip(r_t, 0.8, 1.2) A)",
    "oapl": "loss = −1/D Σ m·−(0.001·log r − A)²/T",
    "luffy": "loss = −1/D Σ m·(r_t A on-policy, π/(π + 0.1) A off-policy)",
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_equation_shows_its_numbers(name):
    assert objective(name).equation().splitlines()[0] == EQUATIONS[name]


def test_the_equation_explains_its_symbols_and_warns():
    text = objective("token-mis", kl="unbiased", kl_coef=0.01, entropy_coef=0.002).equation()
    assert "+ 0.01·KL − 0.002·H" in text
    assert "ρ = Π_t π_old(y_t)/μ(y_t)" in text
    assert "KL: π/μ·(π_ref/π − log(π_ref/π) − 1), gradient through both" in text
    external = objective("luffy", kl="unbiased", kl_coef=0.01).equation()
    assert "KL: π/μ (1 at off-policy tokens, which have no μ)·(π_ref/π" in external
    assert "not (A < 0 and mean_t(log μ − log π) > 0.05)" in objective("opsm").equation()
    assert "the dual clip at 3 is inside the clip range" in objective("seq-bypass", clip_dual=3.0).equation()
    assert "is inside" not in objective("seq-bypass").equation()
    assert "harmful |log r| whose capped second moment stays below 0.1" in objective("m2po", tau=0.1).equation()
    masked = objective("m2po", form="mask", tau=0.1).equation()
    assert "1[|log r_t| ≤ c]·r_t A" in masked
    assert "up to which the mean of log² r is at most 0.1" in masked
    assert "what is rejected is not counted" in objective("geo-mask", denominator="kept").equation()
