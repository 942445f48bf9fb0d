"""Recipes: bases, overrides, sections that come with an objective."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config import COMPANIONS, PerturbationConfig, load_config, recipe_names
from trimtab.errors import TrimtabError


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_whole_and_survives_its_own_resolved_copy(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert config.description
    assert config.out == f"runs/{name}"
    copy = tmp_path / "config.toml"
    copy.write_text(config.dump())
    assert load_config(copy) == config


def test_a_recipe_with_a_base_changes_only_what_it_says() -> None:
    base, alp = load_config("quickstart"), load_config("token-alp")
    changed = {key for key, value in alp.model_dump().items() if value != base.model_dump()[key]}
    assert changed == {"description", "out", "objective", "perturbation"}
    # The part of another name does not inherit `weight_max` of the base's.
    assert "weight_max" not in alp.objective.keywords


def test_a_base_can_be_swapped_on_the_command_line() -> None:
    config = load_config("soup", ["base=laboratory", "trainer.steps=3"])
    assert (config.model.path, config.task.name, config.objective.name) == ("laboratory", "sort", "soup")
    assert (config.trainer.steps, config.prefix.ratio if config.prefix else None) == (3, 0.5)
    assert config.out == "runs/soup"


def test_a_user_s_own_recipe_may_build_on_a_shipped_one(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "quickstart"\n[task]\ndigits = 3\n[optim]\nlr = 2e-5\n')
    config = load_config(recipe)
    assert config.task.keywords == {"digits": 3, "examples": 2}
    assert (config.optim.lr, config.optim.betas) == (2e-5, (0.9, 0.95))


@pytest.mark.parametrize(
    ("base", "named"),
    [("quickstrat", "unknown recipe 'quickstrat'.*quickstart"), ("token-alp", "no base itself"), ("3", "base = 3")],
)
def test_a_base_that_cannot_be_is_refused(base: str, named: str) -> None:
    with pytest.raises(TrimtabError, match=named):
        load_config("quickstart", [f"base={base}"])


def test_another_objective_leaves_its_predecessor_s_sections_behind_in_any_order() -> None:
    for overrides in (
        ["objective.name=dapo", "objective.clip_high=0.3"],
        ["objective.clip_high=0.3", "objective.name=dapo"],
    ):
        config = load_config("token-alp", overrides)
        assert config.perturbation is None
        assert config.objective.keywords == {"clip_high": 0.3}
    assert load_config(
        "token-alp", ["objective.name=seq-alp", "perturbation.std=0.5"]
    ).perturbation == PerturbationConfig(std=0.5)


@pytest.mark.parametrize(("objective", "section"), COMPANIONS.items())
def test_an_objective_brings_the_section_it_cannot_work_without(objective: str, section: str) -> None:
    assert getattr(load_config("quickstart"), section) is None
    config = load_config("quickstart", [f"objective.name={objective}"])
    assert getattr(config, section) is not None
    assert f"[{section}]" in config.dump()
