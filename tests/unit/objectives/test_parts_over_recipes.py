"""Parts over the shipped recipes: what a recipe sets never keeps a user from replacing a part of its objective."""

from __future__ import annotations

import re

import pytest

from trimtab.config import load_config, recipe_names
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective
from trimtab.objectives.from_section import from_section
from trimtab.objectives.surrogates import Unclipped

UNCLIPPED = 'objective.surrogate={kind="unclipped"}'
WEIGHT = 'objective.weight={level="token", bound="truncate", max=3.0}'


def built(recipe: str, *overrides: str) -> Objective:
    return from_section(load_config(recipe, overrides).objective.model_dump())


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_surrogate_of_every_recipe_can_be_replaced(recipe: str) -> None:
    overrides = [UNCLIPPED]
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


@pytest.mark.parametrize("recipe", ["quickstart", "laboratory", "7b-8gpu", "quickstart-tools"])
def test_the_weight_can_be_replaced_beside_the_default_of_a_base(recipe: str) -> None:
    objective = built(recipe, WEIGHT)
    assert objective.weight is not None
    assert objective.weight.max == 3.0


def test_a_bound_of_a_base_is_taken_back_for_calibration() -> None:
    with pytest.raises(TrimtabError, match=r"leave weight_max out \(unset it where"):
        built("quickstart", "objective.calibrate=true")
    assert "step 0" in built("quickstart", "objective.calibrate=true", "unset=objective.weight_max").equation()
