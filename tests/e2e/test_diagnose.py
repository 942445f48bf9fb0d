"""`trimtab diagnose` on real runs of the laboratory: one whose sampler lags, one without any mismatch."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.support.commands import here

from trimtab.trainer.config import load_config

pytestmark = pytest.mark.e2e


def command(*words: str | Path, folder: Path) -> str:
    done = here(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def laboratory(folder: Path, name: str, *settings: str) -> Path:
    sets = [f"--set={setting}" for setting in ("log.trajectories_every=1", "eval.problems=16", *settings)]
    command("train", "laboratory", *sets, "--out", folder / name, folder=folder)
    return folder / name


def test_a_lagging_sampler_is_named_and_the_page_lies_where_it_says(tmp_path: Path) -> None:
    """The beginning of a run of README's picture, whose other run is the one with what is recommended here."""
    recipe = load_config("quickstart-stale")
    assert recipe.compare is not None
    uncorrected, corrected = recipe.compare.objectives
    settings = (f"trainer.sync_every={recipe.trainer.sync_every}", f"optim.lr={recipe.optim.lr}", "trainer.steps=16")
    run = laboratory(tmp_path, "stale", f"objective.name={uncorrected}", *settings)
    values = json.loads(command("diagnose", run, "--json", folder=tmp_path))
    assert [cause["name"] for cause in values["causes"]] == ["stale"]
    assert values["origin"]["framework"] == "trimtab"
    assert len(values["by_step"]) == 16
    ages = values["views"]["version"]
    assert ages["labels"][0] == "0"
    assert ages["k3"][0] < 1e-8 < 1e-4 < ages["k3"][-1], "float32 on both sides, and older weights"
    assert values["recommendation"]["preset"] == corrected
    assert corrected in {outcome["preset"] for outcome in values["outcomes"]}
    page = (tmp_path / values["report"]).read_text()
    assert "k3 by age of the weights" in page
    assert "the sampler used older weights than the trainer (stale, " in page


def test_a_clean_run_has_no_cause(tmp_path: Path) -> None:
    run = laboratory(tmp_path, "clean", "trainer.steps=6")
    text = command("diagnose", run, folder=tmp_path)
    assert "causes    none stands out above the noise floor" in text
    assert "nothing dropped" in text
    assert "compute the same" in text


def in_columns_of_trl(run: Path, folder: Path) -> list[Path]:
    """Writes the trajectories of a run under the names of TRL, which has no versions of the weights."""
    names = {"prompt_id": "prompt", "response_ids": "completion_ids", "loss_mask": "completion_mask"}
    names |= {"logp_behavior": "sampling_per_token_logps", "logp_proximal": "old_per_token_logps"}
    names |= {name: name for name in ("step", "reward", "advantage")}
    folder.mkdir()
    files = []
    for file in sorted((run / "trajectories").glob("*.parquet")):
        table = pq.read_table(file, columns=list(names))
        files.append(folder / file.name)
        pq.write_table(table.rename_columns([names[name] for name in table.column_names]), files[-1])
    return files


@pytest.mark.slow
def test_updates_that_never_arrive_are_named_in_the_columns_of_trl(tmp_path: Path) -> None:
    """The sampler keeps the first weights, also until k3 no longer rises."""
    run = laboratory(tmp_path, "lost", "trainer.steps=24", "trainer.sync_every=1000")
    files = in_columns_of_trl(run, tmp_path / "trl")
    for count in (8, 24):
        text = command("diagnose", *files[:count], folder=tmp_path)
        assert "(undelivered, possible, confidence 0.65)." in text
        assert "since TRL's GRPOTrainer sends its weights before every generation" in text
        unknown = command("diagnose", *files[:count], "--columns", "policy_version=", folder=tmp_path)
        assert (
            "verdict   Fits, but unproven: either the sampler lags on purpose, or new weights do not arrive (stale, "
            in unknown
        )
        assert "First: Compare a checksum of the sampler's weights" in unknown
        assert "Nothing has to be repaired" not in text + unknown
