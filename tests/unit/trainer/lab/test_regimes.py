"""Regimes: what they change, how they add up, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import load_config
from trimtab.trainer.lab.regimes import PARTS, RECIPE, regime


@pytest.mark.parametrize("name", PARTS)
def test_every_regime_is_a_recipe_that_differs_from_on_policy_by_its_mechanism(name: str) -> None:
    config = load_config(RECIPE, regime(name).settings)
    plain = load_config(RECIPE, regime("on-policy").settings)
    assert (config == plain) == (name == "on-policy")
    assert config.trainer.steps * config.trainer.minibatches * config.trainer.epochs >= 80


def test_updates_are_what_a_batch_makes_of_the_steps() -> None:
    assert regime("reuse-16").overrides == {
        "trainer.minibatches": 4,
        "trainer.epochs": 4,
        "trainer.steps": 16,
        "optim.lr": 1e-4,
    }
    assert regime("reuse-4").overrides["trainer.steps"] == 64


def test_a_mixture_has_both_mechanisms_the_longer_budget_and_the_lower_rate() -> None:
    mixed = regime("int3+stale-32")
    assert mixed.overrides == {
        "engine.quantize": "int3",
        "trainer.sync_every": 32,
        "trainer.steps": 128,
        "optim.lr": 5e-5,
    }
    assert mixed.name == "int3+stale-32"
    assert regime("stale-32+int3").overrides == mixed.overrides


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int5", ["unknown regime 'int5'", "did you mean"]),
        ("stale-32+", ["unknown regime ''"]),
        ("int8+int3", ["'int8' and 'int3' both set engine.quantize"]),
        ("stale-8+stale-32", ["both set trainer.sync_every"]),
        ("moe+int8+int3", ["both set engine.quantize"]),
        ("moe+moe+bf16", ["names 'moe' twice"]),
    ],
)
def test_invalid_settings_are_refused_in_one_line(name: str, words: list[str]) -> None:
    with pytest.raises(TrimtabError) as caught:
        regime(name)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_two_parts_of_different_kinds_always_add_up() -> None:
    kinds = {name: frozenset(part.changes) for name, part in PARTS.items()}
    for first, second in itertools.combinations(kinds, 2):
        if not kinds[first] & kinds[second]:
            mixed = regime(f"{first}+{second}").overrides
            assert set(mixed) == kinds[first] | kinds[second] | {"trainer.steps", "optim.lr"}
