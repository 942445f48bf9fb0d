"""The environment of a recipe: what is refused beside it, and classes that were given in Python."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from trimtab.api import _resolve
from trimtab.errors import TrimtabError
from trimtab.trainer import environments
from trimtab.trainer.config import Config, EnvironmentConfig, load_config
from trimtab.trainer.environments import BuiltEnvironment
from trimtab.trainer.environments.swap_environment import SwapEnvironment
from trimtab.trainer.evaluation import Settings, TaskSpec, compare
from trimtab.trainer.run import RunParts, build_parts
from trimtab.types import Problem, RewardSpec


class Unscored:
    """Swaps digits, and leaves the reward to the recipe."""

    def reset(self, **row: Any) -> None:
        del row

    def swap(self, positions: str) -> str:
        """Swaps.

        Args:
            positions: two.
        """
        return positions


def recipe(*changes: str) -> Config:
    return load_config("laboratory-tools", ["task.holdout=20", *changes])


def mine(completion: str, problem: Problem) -> float:
    del problem
    return float(len(completion))


def names_of(parts: RunParts) -> list[str]:
    try:
        return [reward.name for reward in parts.scorer.rewards]
    finally:
        parts.close()


@pytest.mark.parametrize(
    "config",
    ["laboratory-tools", *({"base": base, "environment": {"max_turns": 3}} for base in ("laboratory", "soup"))],
)
def test_a_class_names_the_environment_of_a_recipe(config: Any) -> None:
    changes = ["environment.format=tag", "objective.name=grpo", "sampling.max_tokens=64"]
    section = _resolve(config, changes, Unscored).environment
    assert section.name == f"{__name__}:Unscored"
    again = _resolve(load_config(config, [*changes, "environment.name=swap"]), (), Unscored).environment
    assert again == section


def test_rewards_that_the_environment_would_replace_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"'SwapEnvironment' has get_reward\(\).* so reward= would never be called"):
        build_parts(recipe(), mine, environment=SwapEnvironment)
    explicit = recipe('reward=[{name="format", pattern="x"}]')
    with pytest.raises(
        TrimtabError, match=r"'swap' has get_reward\(\).* so \[\[reward\]\] would never be called: leave"
    ):
        build_parts(explicit)
    with pytest.raises(TrimtabError, match=r"\[\[reward\]\] would never be called"):
        build_parts(explicit, environment=SwapEnvironment)


def test_rewards_that_nobody_gave_or_that_are_used_are_not() -> None:
    assert names_of(build_parts(recipe())) == ["exact"], "the task's own, which the environment replaces"
    assert names_of(build_parts(recipe('reward=[{name="format", pattern="x"}]', "reward=[]"))) == ["exact"]
    assert names_of(build_parts(recipe(), mine, environment=Unscored)) == ["mine"]
    assert names_of(build_parts(recipe('reward=[{name="format", pattern="x"}]'), environment=Unscored)) == ["format"]


def test_an_evaluation_refuses_them_too() -> None:
    spec = TaskSpec("swap-sort", {"holdout": 20}, (RewardSpec("exact"),), environment=EnvironmentConfig(name="swap"))
    with pytest.raises(TrimtabError, match=r"'swap' has get_reward\(\).* \[\[reward\]\] would never be called"):
        compare(["laboratory-tools"], [spec], Settings())


def test_a_server_that_gives_rewards_can_be_told_not_to() -> None:
    server = BuiltEnvironment(EnvironmentConfig(name="openenv"), "openenv", SwapEnvironment, SwapEnvironment)
    with pytest.raises(TrimtabError, match=r"set environment\.reward = false"):
        server.refuse_unused_rewards("[[reward]]")
    server.refuse_unused_rewards(None)


@pytest.mark.parametrize("name", ["__main__:Half", "tests.some:test_a.<locals>.Half"])
def test_a_class_given_in_python_is_not_found_by_name(name: str) -> None:
    section = EnvironmentConfig(name=name)
    with pytest.raises(TrimtabError) as caught:
        environments.build(section)
    line = str(caught.value)
    assert "was given in Python, trimtab.train(environment=Half)" in line
    assert "--set environment.name=MODULE:Half" in line
    assert environments.build(section, Unscored).kind is Unscored


def test_a_script_finds_the_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Half", Unscored, raising=False)
    assert environments.build(EnvironmentConfig(name="__main__:Half")).kind is Unscored
