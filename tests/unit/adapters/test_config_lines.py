"""Configuration lines are valid where they are read, and name what they leave out and what leaves out nothing."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from typing import Any

import pytest
import yaml
from tests.support.named_cases import in_one_test

import trimtab
from trimtab.adapters.adapter_lines import written
from trimtab.adapters.config_lines import lines, lines_for
from trimtab.adapters.hooks import HOOKS
from trimtab.errors import TrimtabError
from trimtab.objectives import objective, objectives
from trimtab.objectives.lookup import from_section


def overrides(text: str) -> dict[str, str]:
    """The overrides of a command line, by key, as a shell passes them on."""
    return dict(word.split("=", 1) for word in shlex.split(text, comments=True))


def options(text: str) -> dict[str, Any]:
    call = ast.parse(text).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    return {word.arg: ast.literal_eval(word.value) for word in call.value.keywords if word.arg}


@in_one_test("preset", objectives())
def test_lines_are_valid_in_every_framework(preset: str) -> None:
    """What they mean in verl and TRL: tests/e2e/test_printed_lines.py."""
    result = lines(preset, {})
    assert list(result) == ["trimtab", "verl", "trl", "miles"]
    assert from_section(tomllib.loads(result["trimtab"])["objective"]) == trimtab.objective(preset)
    keys = overrides(result["verl"])
    assert all(re.fullmatch(r"\+?(algorithm|actor_rollout_ref)\.[\w.]+", key) for key in keys)
    ast.parse(result["trl"])
    miles = [line for line in result["miles"].splitlines() if not line.startswith(("--", "# "))]
    assert isinstance(yaml.safe_load("\n".join(miles) or "{}"), dict)
    assert "=inf" not in "".join(result.values())
    # A ratio to the sampler is never written as that to the proximal policy.
    if objective(preset).ratio.over == "behavior":
        assert not result["trl"].startswith("GRPOConfig(")


def test_the_adapter_is_named_where_the_trainer_s_own_loss_differs_and_only_there() -> None:
    for preset, parts in (
        ("geo-mask-token-tis", {}),
        ("token-tis", {"weight": {"bound": "clip", "min": 0.5}}),
        ("gspo", {"clip_dual": 3.0}),
        ("sapo", {"aggregation": "token-mean"}),
        ("seq-bypass", {}),
    ):
        text = lines_for("verl", preset, parts)
        assert f"policy_loss.loss_mode=trimtab-{preset}" in text, preset
        assert "# with Trimtab's adapter" in text
    for preset, parts in (
        ("dapo", {"clip_dual": 1.1}),
        ("token-tis", {"normalize": True}),
        ("grpo", {"kl_coef": 0.1}),
        ("m2po", {"tau": 0.1}),
        ("grpo", {"mask": [{"kind": "opsm", "delta": 0.1, "sign": "positive"}]}),
    ):
        text = lines_for("trl", preset, parts)
        assert f'trimtab.adapters.trl.GRPOTrainer(..., objective=trimtab.objective("{preset}"' in text
    assert 'AsyncGRPOTrainer(..., objective=trimtab.objective("a3po"' in lines_for("trl", "a3po", {})
    assert "trimtab.adapters" not in lines_for("trl", "opsm", {})
    assert "trimtab" not in lines_for("verl", "token-tis", {"weight_max": 1.5})


def test_what_no_adapter_carries_is_one_comment_with_the_reason() -> None:
    for trainer, preset in (("verl", "m2po"), ("verl", "score-centering"), ("trl", "oapl"), ("miles", "token-alp")):
        text = lines_for(trainer, preset, {})
        assert re.fullmatch(rf"# \w+ cannot train {preset}: .+", text)


def test_the_words_of_the_mismatch_corrections() -> None:
    tis = lines("token-tis", {"weight_max": 1.5})
    correction = "algorithm.rollout_correction"
    verl = overrides(tis["verl"])
    assert (verl[f"{correction}.rollout_is"], verl[f"{correction}.rollout_is_threshold"]) == ("token", "1.5")
    assert options(tis["trl"])["vllm_importance_sampling_mode"] == "token_truncate"
    assert options(tis["trl"])["vllm_importance_sampling_clip_max"] == 1.5
    assert "calibrate = true" in tis["trimtab"]
    icepop = lines("icepop", {"weight_min": 0.5, "weight_max": 5.0})
    # Quoted: unquoted, Hydra and YAML read 0.5_5 as the number 0.55.
    assert overrides(icepop["verl"])[f"{correction}.rollout_is_threshold"] == '"0.5_5"'
    assert options(icepop["trl"])["vllm_importance_sampling_clip_min"] == 0.5
    # verl reads a lower bound of 0 as none: the smallest number it accepts stands for it.
    assert overrides(lines_for("verl", "seq-mis", {}))[f"{correction}.rollout_is_threshold"] == '"1e-06_2"'
    assert overrides(lines_for("verl", "cispo", {}))["actor_rollout_ref.actor.clip_ratio_high"] == "4"


@in_one_test("trainer", [*HOOKS, "trimtab"])
def test_every_trainer_has_lines_for_what_its_hook_carries(trainer: str) -> None:
    text = lines_for(trainer, "geo-mask-token-tis", {"weight_max": 1.5})
    assert "1.5" in text
    assert "cannot train" not in text
    assert "# differs: prime-rl divides by token-mean" in lines_for("prime-rl", "icepop", {})
    kwargs = tomllib.loads(lines_for("prime-rl", "icepop", {"normalize": False}))["trainer"]["loss"]["kwargs"]
    assert kwargs == {"objective": "icepop", "normalize": False, "aggregation": "token-mean"}
    parts = {"mask": [{"kind": "k3", "reduce": "mean", "max": 0.1}]}
    settings = yaml.safe_load(lines_for("slime", "grpo", parts).partition("# trimtab.yaml\n")[2])
    assert settings == {"trimtab_objective": {"name": "grpo", **parts}}


def test_an_unknown_trainer_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(TrimtabError, match=r"^unknown trainer 'prime_rl' \(did you mean 'prime-rl'"):
        lines_for("prime_rl", "grpo", {})


def test_values_are_written_in_each_language() -> None:
    value = {"a": [1, float("inf"), True], "b": "x y", "c": "token-mean"}
    assert ast.literal_eval(written({"a": [1, True, None], "b": "x"}, "python")) == {"a": [1, True, None], "b": "x"}
    assert written(float("inf"), "python") == 'float("inf")'
    assert yaml.safe_load(written(value, "yaml")) == value
    assert tomllib.loads(f"v = {written(value, 'toml')}")["v"] == value
    assert written(value, "hydra") == '{a:[1, inf, True], b:"x y", c:token-mean}'
