"""What of a recipe an objective of a comparison is trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.lab.recipe_comparison import plan_from_recipe
from trimtab.trainer.run import check


def configs(recipe: str, *objectives: str, overrides: tuple[str, ...] = ()) -> dict[str, Config]:
    compare = [f"compare.objectives={list(objectives)}", "compare.seeds=[3]"]
    config = load_config(recipe, ["base=laboratory", *overrides, *compare])
    return {run.method.objective: run.config for run in plan_from_recipe(config, Path("out")).runs}


def test_a_section_stays_with_the_objective_it_belongs_to() -> None:
    made = configs("token-alp", "token-alp", "seq-alp", "dapo", "soup")
    assert {name: config.perturbation is not None for name, config in made.items()} == {
        "token-alp": True,
        "seq-alp": True,
        "dapo": False,
        "soup": False,
    }
    assert made["soup"].prefix is not None
    assert made["seq-alp"].objective.keywords == {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0}
    assert all(config.seed == 3 and config.compare is None for config in made.values())


def test_a_section_that_is_not_the_objective_s_own_is_never_dropped() -> None:
    made = configs("m2po", "m2po", "dapo", overrides=("perturbation.std=0.5",))
    assert made["m2po"].perturbation is not None
    assert made["m2po"].perturbation.std == 0.5
    with pytest.raises(TrimtabError, match=r"\[perturbation\] needs .* the behavior policy .*, not 'dapo'"):
        check(made["dapo"])


def test_an_advantage_made_for_one_objective_stays_with_it() -> None:
    made = configs("oapl", "oapl", "token-tis")
    assert (made["oapl"].advantage.kind, made["token-tis"].advantage.kind) == ("optimal", None)
    check(made["token-tis"]).scorer.close()
    shared = configs("m2po", "m2po", "token-tis", overrides=("advantage.kind=rloo",))
    assert shared["token-tis"].advantage.kind == "rloo"


def test_every_objective_with_bounds_takes_them_from_the_data_or_none_does() -> None:
    made = configs(
        "laboratory", "icepop", "token-tis", "grpo", overrides=("objective.name=icepop", "objective.calibrate=true")
    )
    assert {name: config.objective.calibrate for name, config in made.items()} == {
        "icepop": True,
        "token-tis": True,
        "grpo": False,
    }
    for config in made.values():
        check(config).scorer.close()


def test_masks_that_a_recipe_adds_are_added_to_every_objective() -> None:
    veto = {"kind": "veto", "min": 0.01}
    made = configs("laboratory", "token-tis", "icepop", "grpo", overrides=('objective.mask=[{kind="veto", min=0.01}]',))
    assert [config.objective.keywords["mask"] for config in made.values()] == [[veto]] * 3
    for config in made.values():
        check(config).scorer.close()


def test_a_part_that_replaces_one_of_a_method_is_not_given_to_others() -> None:
    with pytest.raises(TrimtabError, match=r"objective.weight belongs to token-tis, and grpo has its own: leave it"):
        configs("laboratory", "token-tis", "grpo", overrides=('objective.weight={level="token", max=3.0}',))


def test_an_objective_of_parts_is_compared_with_presets() -> None:
    parts = ("objective.name=composed", 'objective.surrogate={kind="clipped"}', 'objective.mask=[{kind="veto"}]')
    made = configs("laboratory", "composed", "grpo", overrides=parts)
    assert made["composed"].objective.keywords == {"surrogate": {"kind": "clipped"}, "mask": [{"kind": "veto"}]}
    assert made["grpo"].objective.keywords == {}
    for config in made.values():
        check(config).scorer.close()


def test_an_advantage_that_a_recipe_adds_is_that_of_every_objective() -> None:
    added = ("objective.advantage=rloo", 'objective.mask=[{kind="veto"}]')
    made = configs("laboratory", "token-tis", "grpo", overrides=added)
    assert [config.objective.keywords["advantage"] for config in made.values()] == ["rloo", "rloo"]
    for config in made.values():
        check(config).scorer.close()


def test_parts_that_no_compared_objective_has_are_refused() -> None:
    parts = ('objective.surrogate={kind="clipped"}', 'objective.mask=[{kind="veto"}]')
    with pytest.raises(TrimtabError, match=r"none of grpo, dapo has the parts of \[objective\], .*: add 'composed'"):
        configs("laboratory", "grpo", "dapo", overrides=("objective.name=composed", *parts))
