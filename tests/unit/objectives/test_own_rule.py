"""A rule defined in one file outside the package: its numbers, its texts, and how a recipe names it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trimtab.adapters.config_lines import lines
from trimtab.errors import TrimtabError
from trimtab.objectives import KL, Band, Clipped, Objective, PolicyLogps, Ratio, keywords_of, objective
from trimtab.objectives.lookup import from_section
from trimtab.report.health import known_objective
from trimtab.report.run_objective import equation_of

DPPO = "tests.unit.objectives.own_rule:dppo"
OWN = DPPO.removesuffix("dppo")


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are found beside the current directory."""
    monkeypatch.chdir(Path(__file__).parents[3])


def test_its_equation_and_its_configuration_lines_need_no_other_file():
    text = objective(DPPO, tv_max=0.2, kl_coef=0.1).equation()
    assert text.splitlines()[0] == "loss = −1/D Σ m·keep·r_t A + 0.1·KL"
    assert "  keep where not (A (π − μ) > 0 and |π(y_t) − μ(y_t)| > 0.2)" in text
    result = lines(DPPO, {"tv_max": 0.2})
    assert from_section(tomllib.loads(result["trimtab"])["objective"]) == objective(DPPO, tv_max=0.2)
    assert f"actor_rollout_ref.actor.policy_loss.loss_mode=trimtab-{DPPO}" in result["verl"].splitlines()
    assert "+actor_rollout_ref.actor.policy_loss.trimtab.tv_max=0.2" in result["verl"].splitlines()


def test_inputs_that_were_not_asked_for_are_refused_not_missing():
    class Forgetful(Band):
        reads = frozenset({"current", "behavior"})

    obj = replace(objective(DPPO), masks=(Forgetful("token", 0.5, 2.0),))
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"looks at inputs.mismatch must have 'proximal' among its `reads`"):
        obj(PolicyLogps(one, one, mask), one)


def test_keywords_are_those_of_the_function_and_the_shared_ones():
    known = keywords_of(DPPO)
    assert known["tv_max"] == 0.15
    assert {"aggregation", "length_max", "denominator", "kl", "kl_coef", "entropy_coef"} < set(known)
    obj = objective(DPPO, tv_max=1, kl="unbiased", kl_coef=0.1, aggregation="seq-mean-token-mean")
    assert obj.masks[0] == type(obj.masks[0])(1.0)
    assert (obj.kl.kind, obj.kl.coef, obj.aggregation.kind) == ("unbiased", 0.1, "seq-mean-token-mean")
    assert objective(f"{OWN}needy", bound=0.2).name == "needy-2"
    assert objective(f"{OWN}needy", bound=0.2, label="mine").name == "mine"
    kept = objective(f"{OWN}with_kl", clip_low=0.1)
    assert (kept.kl.coef, kept.aggregation.kind, kept.entropy_coef) == (0.5, "seq-mean-token-sum", 0.25)
    assert objective(f"{OWN}with_kl", clip_low=0.1, kl="k2").kl.kind == "k2"


@pytest.mark.parametrize(
    ("name", "keywords", "line"),
    [
        ("dppo", {"tv_mx": 0.1}, "has no keyword 'tv_mx' .did you mean 'tv_max'"),
        ("dppo", {"tv_max": "0.1"}, "tv_max = '0.1' has the wrong type"),
        ("dppo", {"calibrate": True}, "has no bound that calibrate can find"),
        ("needy", {}, "needs the keyword 'bound': give it a value"),
        ("needy", {"bound": 0.1, "sides": 1.5}, "sides = 1.5 has the wrong type"),
        ("dpo", {}, "no 'dpo' in 'tests.unit.objectives.own_rule' .did you mean 'dppo'"),
        ("ROUNDS", {}, "is int, not a function"),
        ("broken", {}, "it ended in KeyError: 'no such thing'"),
        ("refused", {}, "it ended in ValueError: bad bound"),
        ("nothing", {}, "it returned NoneType, not a trimtab.Objective"),
        ("loose", {}, "[*][*]keywords.* cannot be given from a recipe"),
    ],
)
def test_mistakes_are_one_line_that_names_the_function(name, keywords, line):
    with pytest.raises(TrimtabError, match=f"^objective '{OWN}{name}'.*{line}") as error:
        from_section({"name": f"{OWN}{name}", **keywords})
    assert "\n" not in str(error.value)
    assert (error.value.__cause__ is not None) == ("ended in" in line)  # The traceback is that of the function.


def test_the_error_for_a_missing_module_names_the_folder_that_was_searched():
    with pytest.raises(TrimtabError, match=r"objective 'nowhere:dppo': cannot import 'nowhere'.*current directory"):
        objective("nowhere:dppo")


@pytest.mark.parametrize(
    ("section", "equation"),
    [
        ({"name": "os:abort"}, "trimtab: its config.toml has no equation of 'os:abort'"),
        ({"name": "os:abort", "equation": "loss = 1"}, "loss = 1"),
        ({"name": "x", "code": "Objective(...)", "equation": "loss = 1"}, "loss = 1"),
        ("grpo", "trimtab: its config.toml has objective = 'grpo', which is not a section"),
    ],
)
def test_a_page_does_not_run_code_that_a_run_names(section, equation):
    """A run directory is data: `os:abort` would end this process."""
    assert equation_of({"objective": section}, {}).removeprefix("not known to this version of ") == equation
    assert known_objective({"objective": section}) is None


def test_a_page_names_the_advantage_of_the_recipe_and_knows_objectives_of_parts():
    section = {"name": "composed", "surrogate": {"kind": "unclipped"}}
    equation = equation_of({"objective": section, "advantage": {"kind": "rloo"}}, {})
    assert equation.startswith("loss = −1/D Σ m·r_t A\n")
    assert equation.endswith("A: rloo advantage")


class OwnKL(KL):
    """A KL term of a user's own class."""


def with_own_kl() -> Objective:
    return replace(objective("grpo"), name="own-kl", kl=OwnKL("k2", 0.1))


def test_parts_of_own_classes_stay_and_their_fields_are_keywords():
    name = f"{__name__}:with_own_kl"
    assert type(objective(name, entropy_coef=0.1).kl) is OwnKL
    assert objective(name, kl_coef=0.2).kl == OwnKL("k2", 0.2)


def test_objectives_that_learn_without_advantages_declare_it():
    assert not objective("grpo").learns_without_advantage
    assert objective("grpo", kl_coef=0.1).learns_without_advantage
    assert objective("grpo", entropy_coef=0.1).learns_without_advantage
    assert objective("oapl").learns_without_advantage

    class Whole(Clipped):
        single_policy = True

    assert not Objective("mine", Ratio("token", "behavior"), Whole()).learns_without_advantage
