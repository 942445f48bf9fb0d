"""Keywords of presets: a table of types and fields, in which every preset finds its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.named_cases import in_one_test

from trimtab.errors import TrimtabError
from trimtab.objectives import Band, Clipped, Objective, Ratio, Veto, Weight, keywords_of, objective
from trimtab.objectives.keywords import PART_KEYS, PATHS, TYPES, Preset, convert, value_at
from trimtab.objectives.presets import COMPOSED, PRESETS

SHARED = {"aggregation", "length_max", "denominator", "kl", "kl_coef", "entropy_coef"}


def test_every_keyword_of_the_table_is_one_of_a_preset_and_the_other_way_round() -> None:
    used = {key for preset in PRESETS.values() for key in preset.paths}
    assert used | set(PART_KEYS) | {"advantage"} == set(TYPES)
    assert set(COMPOSED.paths) == SHARED


@in_one_test("preset", PRESETS.values())
def test_defaults_have_the_type_of_their_keyword(preset: Preset) -> None:
    for key, default in preset.defaults.items():
        if (key, default) != ("length_max", None):
            assert convert(key, default, TYPES[key]) == default
    assert preset.defaults == keywords_of(preset.objective.name)


def test_a_keyword_sets_the_field_at_its_path() -> None:
    """Two keywords of one part, one of a mask, and one of the objective itself."""
    given = {"weight_min": 0.25, "weight_max": 3, "keep_max": 1.5, "entropy_coef": 0.1, "clip_dual": 4}
    built = objective("geo-mask-token-tis", **given)
    expected = Objective(
        "geo-mask-token-tis",
        Ratio(),
        Clipped(dual=4.0),
        Weight("token", "clip", 0.25, 3.0),
        masks=(Band("geometric", 0.99, 1.5),),
        entropy_coef=0.1,
    )
    assert built == expected
    assert [value_at(built, PRESETS[built.name].paths[key]) for key in given] == list(given.values())


def test_a_preset_may_set_a_mask_by_the_keyword_of_a_weight() -> None:
    """`weight_min` is the lower bound of a weight; `cppo` has none, and calls that of its budget so."""
    assert PATHS["weight_min"] == "weight.min"
    assert objective("cppo", weight_min=0.5).masks[0] == replace(objective("cppo").masks[0], weight_min=0.5)
    assert "weight_min" not in keywords_of("token-tis")


def test_the_second_of_two_masks_keeps_its_place_before_those_that_are_added() -> None:
    built = objective("trm", k3_max=0.5, k2_max=0.25, mask=[Veto()])
    assert [getattr(mask, "max", None) for mask in built.masks] == [0.25, 0.5, None]


@in_one_test("preset", PRESETS.values())
def test_a_preset_says_what_it_does_when_to_use_it_and_where_it_is_from(preset: Preset) -> None:
    assert preset.when.startswith("Use it")
    assert all(text.endswith(".") and "\n" not in text for text in (preset.does, preset.when, preset.source))


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [(2, float, 2.0), (2, int, 2), (None, float | None, None), ("k1", str, "k1"), (True, bool, True)],
)
def test_values_of_a_type(value: object, kind: type, result: object) -> None:
    found = convert("key", value, kind)
    assert (found, type(found)) == (result, type(result))


@pytest.mark.parametrize(
    ("value", "kind"), [(True, float), (True, int), (1, bool), (1.0, int), (None, float), ("1", float | None)]
)
def test_values_of_another_type_are_refused(value: object, kind: type) -> None:
    with pytest.raises(TrimtabError, match=f"^key = {value!r} has the wrong type$"):
        convert("key", value, kind)
