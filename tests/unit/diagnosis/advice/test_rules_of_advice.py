"""Which preset is recommended, and that its configuration can be used as printed."""

from __future__ import annotations

import ast
import tomllib
from typing import Any

import numpy as np
import pytest
import yaml

import trimtab
from trimtab.adapters.config_lines import NEAREST, lines
from trimtab.config import load_config
from trimtab.corrections.protocols import FRAMEWORKS
from trimtab.diagnosis.advice import advise
from trimtab.diagnosis.advice.rules import MUST_FIX, RULES, RuleInputs, choose
from trimtab.diagnosis.records import Cause, DataSummary, DriftSplit, Measured, MismatchSize, PresetOutcome
from trimtab.diagnosis.tokens import TokenTable
from trimtab.objectives import objectives
from trimtab.objectives.from_section import from_section


def case(
    *causes: str, verdict: str = "dense", k3: float = 3e-4, seq_kept: float = 0.9, tokens: int = 5000
) -> RuleInputs:
    table = (
        PresetOutcome("seq-bypass", seq_kept, 0.0, 0.5, 0.1),
        PresetOutcome("geo-mask", 0.3, 0.0, 0.3, 0.1),
        PresetOutcome("token-tis", 1.0, 0.0, 0.9, 0.1, {"weight_max": 1.7}, calibrated=True),
        PresetOutcome("icepop", 0.998, 0.0, 0.9, 0.1, {"weight_min": 0.3, "weight_max": 3.0}, calibrated=True),
        PresetOutcome("geo-mask-token-tis", 0.9, 0.0, 0.9, 0.1, {"keep_min": 0.97, "keep_max": 1.03}, calibrated=True),
    )
    return RuleInputs([Cause(name, 0.9, "seen") for name in causes], verdict, k3, table, tokens)


@pytest.mark.parametrize(
    ("findings", "rule", "preset", "overrides"),
    [
        (case(verdict="exact", k3=1e-12), "floor", "grpo", {}),
        (case("precision", verdict="rounding", k3=1e-8), "floor", "grpo", {}),
        (case(), "precision", "token-tis", {"weight_max": 1.7}),
        (case("precision", verdict="moe", k3=2e-3), "precision", "token-tis", {"weight_max": 1.7}),
        (case("routing", verdict="small-dense", k3=3e-3), "moe", "geo-mask-token-tis", {"keep_min": 0.97}),
        (case("quantized", "precision", verdict="moe"), "quantized", "icepop", {"weight_min": 0.3}),
        (case(verdict="moe"), "moe", "geo-mask-token-tis", {"keep_max": 1.03}),
        (case(verdict="beyond", k3=0.8), "beyond", "geo-mask-token-tis", {"keep_max": 1.03}),
        (case("stale", "quantized", verdict="moe"), "stale, short", "seq-bypass", {}),
        (case("stale", verdict="beyond", seq_kept=0.69), "stale, long", "m2po", {}),
        (case("stale", "temperature", verdict="exact"), "fault", "", {}),
        (case(verdict="moe", tokens=99), "tiny", "token-tis", {}),
        (case("quantized", verdict="moe", tokens=99), "quantized", "icepop", {"weight_min": 0.3}),
        (case(verdict="exact", k3=0.0, tokens=1), "floor", "grpo", {}),
    ],
)
def test_the_first_row_that_holds_decides(
    findings: RuleInputs, rule: str, preset: str, overrides: dict[str, float]
) -> None:
    chosen, result, why = choose(findings)
    assert (chosen.name, chosen.preset) == (rule, preset)
    assert overrides.items() <= dict(result).items()
    assert bool(result) == bool(overrides)
    assert why.endswith(".")
    assert "{" not in why
    assert "\n" not in why


@pytest.mark.parametrize("fault", MUST_FIX)
def test_a_fault_comes_first_and_no_bound_is_taken_from_it(fault: str) -> None:
    chosen, overrides, why = choose(case(fault, "precision"))
    assert chosen.name == "fault"
    assert not overrides
    assert why.startswith(f"Fix {fault} first")


def test_faults_are_named_worst_first() -> None:
    assert choose(case("truncated-sampling", "misaligned"))[2].startswith("Fix misaligned and truncated-sampling first")


def test_the_last_row_holds_for_everything_and_every_preset_exists() -> None:
    assert RULES[-1].applies(RuleInputs([], "nonsense", float("nan"), (), 1000))
    assert {rule.preset for rule in RULES} <= {*objectives(), ""}
    _, overrides, why = choose(RuleInputs([], "beyond", float("nan"), (), 1000))
    assert not overrides
    assert why.endswith("these are the published ones.")


@pytest.mark.parametrize("preset", objectives())
def test_configuration_lines_are_valid_in_every_framework(preset: str) -> None:
    result = lines(preset, {})
    assert list(result) == ["trimtab", "verl", "trl", "miles"]
    assert from_section(tomllib.loads(result["trimtab"])["objective"]) == trimtab.objective(preset)
    verl = yaml.safe_load(result["verl"])
    assert verl is None or verl["actor_rollout_ref"]["rollout"]["calculate_log_probs"] is True
    ast.parse(result["trl"])
    for line in result["miles"].partition("# mis.yaml")[0].splitlines():
        assert line.startswith(("--", "# "))
    native = {name: text.partition("\n# exactly this loss, with Trimtab's adapter")[0] for name, text in result.items()}
    absent = [name for name, text in native.items() if text.startswith("#") and "\n" not in text]
    built = trimtab.objective(preset)
    has = built.surrogate.peers(built.ratio.level)
    expected = [name.lower() for name in FRAMEWORKS if name not in has and name not in NEAREST.get(preset, {})]
    assert absent == ([name.lower() for name in FRAMEWORKS] if preset == "soup" else expected)


def test_settings_that_no_peer_has_and_settings_that_one_lacks() -> None:
    for preset in ("soup", "oapl", "luffy", "reinforce"):
        result = lines(preset, {})
        assert all(result[name.lower()].startswith(f"# {name} has no equivalent of {preset}: ") for name in FRAMEWORKS)
    assert lines("cispo", {})["miles"] == "# Miles has no equivalent of cispo"


def options(text: str) -> dict[str, Any]:
    call = ast.parse(text).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    return {word.arg: ast.literal_eval(word.value) for word in call.value.keywords if word.arg}


def test_the_words_of_the_mismatch_corrections() -> None:
    tis = lines("token-tis", {"weight_max": 1.5})
    correction = yaml.safe_load(tis["verl"])["algorithm"]["rollout_correction"]
    assert correction == {"rollout_is": "token", "rollout_is_threshold": 1.5}
    assert (
        options(tis["trl"]).items()
        >= {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.5,
        }.items()
    )
    assert "--use-tis\n--tis-clip 1.5\n--tis-clip-low 0" in tis["miles"]
    assert "calibrate = true" in tis["trimtab"]

    icepop = lines("icepop", {"weight_min": 0.5, "weight_max": 5.0})
    # Quoted: unquoted, YAML reads 0.5_5 as the number 0.55.
    assert yaml.safe_load(icepop["verl"])["algorithm"]["rollout_correction"]["rollout_is_threshold"] == "0.5_5"
    assert options(icepop["trl"])["vllm_importance_sampling_clip_min"] == 0.5
    assert "icepop_function\n--tis-clip 5\n--tis-clip-low 0.5" in icepop["miles"]


def test_verl_gets_the_reciprocals_of_a_geometric_band() -> None:
    findings = {"keep_min": 0.8, "keep_max": 1.25, "weight_min": 0.5, "weight_max": 2.0}
    result = lines("geo-mask-token-tis", findings)
    correction = yaml.safe_load(result["verl"])["algorithm"]["rollout_correction"]
    assert correction["rollout_rs"] == "seq_mean_k1"
    assert correction["rollout_rs_threshold"] == "0.8_1.25"
    lopsided = lines("geo-mask", {"keep_min": 0.99, "keep_max": 1.001})["verl"]
    threshold = yaml.safe_load(lopsided)["algorithm"]["rollout_correction"]["rollout_rs_threshold"]
    assert threshold == "0.999001_1.0101"
    mis = yaml.safe_load(result["miles"].partition("# mis.yaml")[2])
    assert mis == {
        "use_tis": True,
        "tis_level": "token",
        "tis_mode": "clip",
        "tis_lower_bound": 0.5,
        "tis_upper_bound": 2.0,
        "tis_batch_normalize": False,
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.8,
        "rs_upper_bound": 1.25,
        "rs_veto_threshold": None,
    }
    assert "# TRL has no geometric mask [0.8, 1.25]" in result["trl"]


def test_a_setting_that_a_peer_lacks_is_named_with_the_nearest_one() -> None:
    result = lines("m2po", {})
    assert result["trl"].startswith("# TRL has no equivalent of m2po")
    assert options(result["trl"])["vllm_importance_sampling_mode"] == "token_truncate"
    assert yaml.safe_load(result["verl"])["algorithm"]["rollout_correction"]["bypass_mode"] is True
    assert result["miles"].endswith("--use-rollout-logprobs")


def measured(sample: TokenTable, verdict: str, k3: float) -> Measured:
    origin = DataSummary("columns", 1, sample.responses, sample.tokens, sample.tokens, "proximal")
    size = MismatchSize({"k3": k3}, {}, 0.0, "", verdict)
    return Measured(origin, size, {}, DriftSplit(False, ""), np.zeros((2, 2)), sample)


def test_advise_recommends_a_row_of_its_own_table_and_a_recipe_takes_it() -> None:
    rng = np.random.default_rng(0)
    behavior = rng.normal(-1.0, 0.3, 600).astype(np.float32)
    log = rng.normal(-0.0008, 0.04, 600).astype(np.float32)
    starts = np.arange(0, 601, 10, dtype=np.int64)
    sample = TokenTable(starts, np.ones(600, dtype=np.bool_), behavior, proximal=behavior + log)
    table, wanted = advise(measured(sample, "moe", 8e-4), [Cause("quantized", 0.8, "seen")])
    row = next(row for row in table if row.preset == wanted.preset and row.overrides == wanted.overrides)
    assert row.calibrated
    assert row.kept >= 0.98
    section = tomllib.loads(wanted.lines["trimtab"])["objective"]
    config = load_config({"objective": section})
    assert from_section(config.objective.model_dump()) == trimtab.objective(wanted.preset, **wanted.overrides)
