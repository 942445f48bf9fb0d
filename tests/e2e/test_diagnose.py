"""`trimtab diagnose` on real runs of the laboratory: one whose sampler lags, one without any mismatch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config import load_config

pytestmark = pytest.mark.e2e

TRIMTAB = [sys.executable, "-m", "trimtab"]


def command(*arguments: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [*TRIMTAB, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def laboratory(folder: Path, name: str, *settings: str) -> Path:
    sets = [f"--set={setting}" for setting in ("log.trajectories_every=1", "eval.problems=16", *settings)]
    command("train", "laboratory", *sets, "--out", folder / name, folder=folder)
    return folder / name


def test_a_lagging_sampler_is_named_and_the_page_lies_where_it_says(tmp_path: Path) -> None:
    run = laboratory(tmp_path, "stale", "trainer.steps=16", "trainer.sync_every=8")
    values = json.loads(command("diagnose", run, "--json", folder=tmp_path))
    assert [cause["name"] for cause in values["causes"]] == ["stale"]
    assert values["origin"]["framework"] == "trimtab"
    assert len(values["by_step"]) == 16
    ages = values["views"]["version"]
    assert ages["labels"][0] == "0"
    assert ages["k3"][0] < 1e-8 < 1e-4 < ages["k3"][-1], "float32 on both sides, and older weights"
    assert values["recommendation"]["preset"] in {outcome["preset"] for outcome in values["outcomes"]}
    page = (tmp_path / values["report"]).read_text()
    assert "k3 by age of the weights" in page
    assert "The sampler used older weights than the trainer (stale, " in page


def test_a_clean_run_has_no_cause(tmp_path: Path) -> None:
    run = laboratory(tmp_path, "clean", "trainer.steps=6")
    text = command("diagnose", run, folder=tmp_path)
    assert "causes    none stands out above the noise floor" in text
    assert "nothing dropped" in text
    assert "compute the same" in text


def test_the_picture_of_readme_compares_with_what_is_recommended_for_the_beginning_of_its_run(tmp_path: Path) -> None:
    recipe = load_config("quickstart-stale")
    assert recipe.compare is not None
    uncorrected, corrected = recipe.compare.objectives
    settings = (f"trainer.sync_every={recipe.trainer.sync_every}", f"optim.lr={recipe.optim.lr}", "trainer.steps=16")
    run = laboratory(tmp_path, "stale", f"objective.name={uncorrected}", *settings)
    values = json.loads(command("diagnose", run, "--json", folder=tmp_path))
    assert [cause["name"] for cause in values["causes"]] == ["stale"]
    assert values["recommendation"]["preset"] == corrected
