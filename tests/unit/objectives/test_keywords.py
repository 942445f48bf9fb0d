"""Keywords of presets, each a field of a part, and tables of parts, as in a recipe."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import make_dataclass, replace

import pytest
from tests.support.named_cases import in_one_test

from trimtab import corrections, objectives
from trimtab.errors import TrimtabError
from trimtab.objectives import (
    Aggregation,
    Band,
    Clipped,
    Divergence,
    Objective,
    PrefixBudget,
    Ratio,
    Reinforce,
    Unclipped,
    Veto,
    Weight,
    keywords,
    keywords_of,
    objective,
)
from trimtab.objectives.keywords import PART_KEYS, PATHS, TYPES
from trimtab.objectives.lookup import from_section
from trimtab.objectives.presets import COMPOSED, PRESETS
from trimtab.trainer.config import load_config, recipe_names, training_sections


def test_every_keyword_of_the_table_is_one_of_a_preset_and_the_other_way_round() -> None:
    used = {key for preset in PRESETS.values() for key in preset.paths}
    assert used | set(PART_KEYS) | {"advantage"} == set(TYPES)
    assert set(COMPOSED.paths) == {"aggregation", "length_max", "denominator", "kl", "kl_coef", "entropy_coef"}


def test_a_preset_may_set_a_mask_by_the_keyword_of_a_weight() -> None:
    """`weight_min` is the lower bound of a weight; `cppo` has none, and calls that of its budget so."""
    assert PATHS["weight_min"] == "weight.min"
    assert objective("cppo", weight_min=0.5).masks[0] == replace(objective("cppo").masks[0], weight_min=0.5)
    assert "weight_min" not in keywords_of("token-tis")


def test_the_second_of_two_masks_keeps_its_place_before_those_that_are_added() -> None:
    built = objective("trm", k3_max=0.5, k2_max=0.25, mask=[Veto()])
    assert [getattr(mask, "max", None) for mask in built.masks] == [0.25, 0.5, None]


CLIPPED = {"kind": "clipped", "high": 0.28}


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


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("composed", {}, "it needs a surrogate, such as"),
        ("composed", {"surrogate": {"kind": "cliped"}}, "unknown surrogate 'cliped' .did you mean 'clipped'"),
        ("composed", {"surrogate": {"high": 0.2}}, "surrogate is a table with a `kind`"),
        ("composed", {"surrogate": {"kind": "clipped", "hihg": 0.2}}, "has no 'hihg' .did you mean 'high'"),
        ("composed", {"surrogate": CLIPPED, "ratio": {"level": "word"}}, "ratio: Ratio: unknown level 'word'"),
        ("composed", {"surrogate": CLIPPED, "ratio": {"over": 1}}, "over = 1 has the wrong type"),
        ("composed", {"surrogate": CLIPPED, "clip_high": 0.3}, "no keyword 'clip_high'"),
        ("composed", {"surrogate": CLIPPED, "wieght": {}}, "no keyword 'wieght' .did you mean 'weight'"),
        ("grpo", {"mask": {"kind": "veto"}}, r"write each as \[\[objective.mask\]\]"),
        ("grpo", {"mask": [{"kind": "band", "min": 0.5, "max": 2.0}]}, "mask 'band' needs 'level'"),
        ("grpo", {"mask": [{"kind": "band", "level": "token", "min": 0.5, "max": 0.9}]}, "must enclose 1"),
        ("grpo", {"mask": [{"kind": "veto"}, {"kind": "veto"}]}, "the same rejection rule is given twice"),
        ("grpo", {"mask": [{"kind": "opsm", "delta": 0.1, "sign": "none"}]}, "negative, positive"),
        ("grpo", {"surrogate": CLIPPED, "clip_low": 0.3}, r"clip_low has no effect .*: leave it out \(unset it"),
        ("gmpo", {"ratio": {"level": "sequence"}}, "GeometricClip takes the mean of token ratios itself"),
        ("a3po", {"ratio": {"level": "token"}}, 'use Ratio."token", "behavior"'),
        ("drpo", {"ratio": {"level": "sequence", "over": "behavior"}}, 'use Ratio."token", "behavior"'),
        ("vespo", {"ratio": {"level": "geometric", "over": "behavior"}}, 'use Ratio."sequence", "behavior"'),
        ("reinforce", {"centering": {}}, "centering = {} has the wrong type"),
        ("ctpo", {"ratio": {"level": "token"}}, 'use Ratio."prefix", "proximal"'),
        ("grpo", {"mask": [{"kind": "k3", "reduce": "token", "max": math.inf}]}, "max = inf must lie in"),
        *(("opsm", {"delta": delta}, "OPSM: delta = .* must lie in") for delta in (math.nan, -0.1)),
        *(
            (name, {key: math.inf}, r" = inf must lie in .0, inf\)")
            for name, key in (
                *(("grpo", "entropy_coef"), ("grpo", "kl_coef"), ("vespo", "k1_positive"), ("sapo", "tau_positive")),
                *(("drpo", "epsilon"), ("luffy", "gamma"), ("oapl", "beta"), ("m2po", "tau"), ("opsm", "delta")),
                ("cppo", "divergence_max"),
            )
        ),
        ("vespo", {"k1_positive": 10.0, "k2_positive": 0.0}, "k1_positive, k2_positive: k1, k2 = 10, 0"),
        ("grpo", {"advantage": "rloo"}, r"set \[advantage\] kind = 'rloo' in a recipe"),
        ("geo-mask", {"mask": []}, r"mask = \[\] removes nothing: masks are added to those of geo-mask"),
        # The keywords of the part that is refused, all that were given, and the message of the part.
        ("grpo", {"clip_low": 1.5}, r"'grpo': clip_low: Clipped: low = 1.5 must lie in \[0, 1\]$"),
        ("icepop", {"weight_min": 3.0, "clip_low": 0.1}, "'icepop': weight_min: Weight: "),
        ("cppo", {"divergence_max": 0.0, "weight_min": 0.5}, "'cppo': divergence_max, weight_min: PrefixBudget: "),
        ("trm", {"k2_max": 0.1, "k3_max": -1.0}, "'trm': k3_max: Divergence: max = -1"),
        ("sapo", {"tau_positive": 0.0}, "'sapo': tau_positive: SoftGate: positive = 0"),
        ("ctpo", {"clip_low": math.nan}, "'ctpo': clip_low: GrowingClip: low = nan"),
        ("a3po", {"clip_low": 1.0}, r"'a3po': clip_low: AgedClip: low = 1 must lie in \[0, 1\)"),
        ("pnpo", {"clip_low": 1.5}, "'pnpo': clip_low: Banded: low = 1.5"),
        # A message that names the keyword itself is not preceded by it.
        ("cispo", {"ceiling": 0.5}, "'cispo': Reinforce: ceiling = 0.5"),
        ("dr-grpo", {"aggregation": "mean"}, "Aggregation: unknown kind 'mean'"),
        # Tables of parts.
        ("grpo", {"mask": [{"kind": "k3", "reduce": "tokn", "max": 1}]}, "mask 'k3': Divergence: unknown reduce"),
        ("composed", {"surrogate": {"kind": "clipped", "low": math.nan}}, "surrogate 'clipped': Clipped: low = nan"),
        ("token-alp", {"weight": {}}, "objective 'token-alp': current/behavior already contains"),
        ("grpo", {"denominator": "kept"}, "objective 'grpo': nothing is rejected, so denominator"),
        ("tokentis", {}, "did you mean 'token-tis'"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"weight_max": 2.0}, "no keyword 'weight_max'"),
        ("oapl", {"aggregation": "token-mean"}, "no keyword 'aggregation'"),
        ("grpo", {"length_max": 5}, "length_max has no effect"),
        ("grpo", {"aggregation": "constant"}, "set length_max"),
        ("grpo", {"kl": "k3"}, "no effect without kl_coef"),
        ("grpo", {"kl": "k5", "kl_coef": 1.0}, "KL: unknown kind 'k5'"),
        ("grpo", {"denominator": "keep"}, "did you mean 'kept'"),
        ("grpo", {"clip_low": "0.2"}, "clip_low = '0.2' has the wrong type"),
        ("grpo", {"clip_low": True}, "clip_low = True has the wrong type"),
        ("grpo", {"clip_high": -0.1}, r"clip_high: Clipped: high = -0.1 must lie in \[0, inf\]"),
        ("grpo", {"clip_dual": 0.5}, r"dual = 0.5 must lie in \(1, inf\]"),
        ("m2po", {"form": "masked"}, "unknown form 'masked' .did you mean 'mask'"),
        ("token-tis", {"ratio": {"over": "behavior"}}, 'drop the weight .*name = "composed"'),
    ],
)
def test_mistakes_are_one_line(name, given, line):
    with pytest.raises(TrimtabError, match=line) as error:
        objective(name, **given)
    assert "\n" not in str(error.value)


def test_what_only_looks_without_effect_is_accepted():
    assert objective("grpo", mask=[], centering=False) == objective("grpo")
    assert objective("dr-grpo", length_max=1).aggregation == Aggregation("constant", length_max=1)
    summed = objective("grpo", mask=[{"kind": "binary_tv", "reduce": "sum", "max": 3.0}])
    assert summed.masks == (Divergence("binary_tv", "sum", 3.0),)
    assert objective("grpo", clip_low=1.0, clip_high=math.inf).surrogate == Clipped(1.0, math.inf)
    assert objective("geo-mask", keep_min=0.0, keep_max=math.inf).masks == (Band("geometric", 0.0, math.inf),)
    assert objective("icepop", weight_min=0.0, weight_max=math.inf).weight == Weight("token", "mask", 0.0, math.inf)
    kept = objective("token-tis", weight_max=2.0, clip_low=0.2, mask=[{"kind": "veto"}])
    assert kept == objective("token-tis", mask=[{"kind": "veto"}])


def test_a_part_may_have_annotations_that_are_types(monkeypatch):
    """Without `from __future__ import annotations`, as in a file of one's own."""
    kinds = [("name", str, "a"), ("far", bool, False), ("low", float, 0.2), ("dual", float | None, None)]
    own = make_dataclass("Own", kinds, bases=(Veto,), frozen=True)
    monkeypatch.setitem(keywords.MASKS, "own", own)
    built = objective("grpo", mask=[{"kind": "own", "name": "b", "far": True, "low": 1, "dual": None}])
    assert built.masks == (own(name="b", far=True, low=1, dual=None),)
    for key, value in {"name": 1, "far": 1, "low": None, "dual": "x"}.items():
        with pytest.raises(TrimtabError, match=f"mask 'own': {key} = {value!r} has the wrong type"):
            objective("grpo", mask=[{"kind": "own", key: value}])


def test_the_recipe_knows_the_names_of_the_parts():
    names = (training_sections.COMPOSED, training_sections.OBJECTIVE_PARTS)
    assert (COMPOSED.objective.name, PART_KEYS) == names


def test_a_keyword_that_only_fits_beside_another_one_is_no_mistake():
    """Without `k2_positive` the default beside this `k1_positive` is refused, which says nothing about its effect."""
    with pytest.raises(TrimtabError):
        objective("vespo", k1_positive=20.0)
    built = objective("vespo", k1_positive=20.0, k2_positive=20.0, mask=[{"kind": "veto"}])
    assert built.masks == (Veto(),)


def test_every_part_of_the_library_has_a_kind_in_recipes() -> None:
    """A rule that `trimtab.corrections` or `trimtab.objectives` exports can be named in a recipe."""
    exported = [value for package in (corrections, objectives) for value in vars(package).values()]
    classes = {value for value in exported if isinstance(value, type) and not inspect.isabstract(value)}
    assert {kind for kind in classes if issubclass(kind, corrections.Mask)} == set(keywords.MASKS.values())
    assert {kind for kind in classes if issubclass(kind, objectives.Surrogate)} == set(keywords.SURROGATES.values())


def built(recipe: str, *overrides: str) -> Objective:
    return from_section(load_config(recipe, overrides).objective.model_dump())


@in_one_test("recipe", recipe_names())
def test_the_surrogate_of_every_recipe_can_be_replaced(recipe: str) -> None:
    overrides = ['objective.surrogate={kind="unclipped"}']
    while (keyword := keyword_without_effect(recipe, overrides)) is not None:
        overrides.append(f"unset=objective.{keyword}")
    assert isinstance(built(recipe, *overrides).surrogate, Unclipped)


def keyword_without_effect(recipe: str, overrides: list[str]) -> str | None:
    """The keyword that the message of a refusal names."""
    try:
        built(recipe, *overrides)
    except TrimtabError as error:
        named = re.search(r"(\w+) has no effect beside the given surrogate: leave it out \(unset it", str(error))
        if named is None:
            raise
        return named[1]
    return None


@in_one_test("recipe", ["quickstart", "laboratory", "7b-8gpu", "quickstart-tools"])
def test_the_weight_can_be_replaced_beside_the_default_of_a_base(recipe: str) -> None:
    assert built(recipe, 'objective.weight={level="token", bound="truncate", max=3.0}').weight.max == 3.0


def test_a_bound_of_a_base_is_taken_back_for_calibration() -> None:
    with pytest.raises(TrimtabError, match=r"leave weight_max out \(unset it where"):
        built("quickstart", "objective.calibrate=true")
    assert "step 0" in built("quickstart", "objective.calibrate=true", "unset=objective.weight_max").equation()
