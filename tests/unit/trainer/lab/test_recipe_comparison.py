"""What of a recipe an objective of a comparison is trained with."""

from __future__ import annotations

from pathlib import Path

from trimtab.trainer.config import Config, load_config
from trimtab.trainer.lab.experiment import plan_from_recipe
from trimtab.trainer.run import build_parts


def configs(recipe: str, *objectives: str, overrides: tuple[str, ...] = ()) -> dict[str, Config]:
    compare = [f"compare.objectives={list(objectives)}", "compare.seeds=[3]"]
    config = load_config(recipe, ["base=laboratory", *overrides, *compare])
    made = {run.method.objective: run.config for run in plan_from_recipe(config, Path("out")).runs}
    for one in made.values():
        build_parts(one).close()
    assert all(one.seed == 3 and one.compare is None for one in made.values())
    return made


def test_a_section_stays_with_the_objective_it_belongs_to() -> None:
    made = configs("token-alp", "token-alp", "dapo", "soup")
    assert [config.perturbation is not None for config in made.values()] == [True, False, False]
    assert made["soup"].prefix is not None


def test_only_the_objective_of_the_recipe_has_its_keywords_and_advantage() -> None:
    added = ("objective.weight_max=9.0", 'objective.mask=[{kind="veto"}]', "advantage.kind=rloo")
    made = configs("laboratory", "token-tis", "icepop", "grpo", overrides=("objective.name=token-tis", *added))
    assert made["token-tis"].objective.keywords.items() >= {"weight_max": 9.0, "mask": [{"kind": "veto"}]}.items()
    assert made["icepop"].objective.keywords == made["grpo"].objective.keywords == {}
    assert [config.advantage.kind for config in made.values()] == ["rloo", None, None]


def test_an_objective_of_parts_is_compared_with_presets() -> None:
    parts = ("objective.name=composed", 'objective.surrogate={kind="clipped"}', 'objective.mask=[{kind="veto"}]')
    made = configs("laboratory", "composed", "grpo", overrides=parts)
    assert made["composed"].objective.keywords == {"surrogate": {"kind": "clipped"}, "mask": [{"kind": "veto"}]}
