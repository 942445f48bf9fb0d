"""`trimtab report` on real runs: two objectives with two seeds, one of them still on its way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.commands import here

from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e
SMALL = (
    "trainer.prompts=4",
    "trainer.samples=4",
    "eval.every=2",
    "eval.problems=8",
    "log.trajectories_every=0",
    "optim.warmup=0",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("token-tis", "seq-mis"):
        for seed in (0, 1):
            changes = [*SMALL, "trainer.steps=6", f"seed={seed}", f"objective.name={name}"]
            train(load_config("laboratory", changes), out=folder / f"{name}-seed{seed}")
    # As if the last one were still running: four whole lines and the beginning of a fifth.
    file = folder / "seq-mis-seed1" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4]) + lines[4][:50])
    return folder


def test_the_json_says_what_the_runs_logged(runs: Path, tmp_path: Path) -> None:
    done = here("report", runs, "--out", tmp_path, "--json", "--target", "0.1", cwd=runs)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [group["name"] for group in data["groups"]] == ["seq-mis", "token-tis"]
    rows = [read_metrics(runs / f"token-tis-seed{seed}" / "metrics.jsonl") for seed in (0, 1)]
    ends = [result[-1]["eval/sort/greedy"] for result in rows]
    after = data["groups"][1]["results"]["accuracy/after"]
    assert after["mean"] == pytest.approx(sum(ends) / 2)
    assert (after["low"], after["high"]) == (min(ends), max(ends))
    rewards = [result[-1]["reward/mean"] for result in rows]
    assert data["groups"][1]["results"]["reward/last"]["mean"] == pytest.approx(sum(rewards) / 2)
    assert [run["steps"] for run in data["groups"][0]["runs"]] == [6, 4]
    # The warm-started model is right far more often than one time in ten before its first step.
    assert [run["target/steps"] for group in data["groups"] for run in group["runs"]] == [0, 0, 0, 0]
    assert data["target"] == {"accuracy": 0.1, "why": "as asked for"}
    assert {"objective.name"} <= data["differences"].keys()
    assert any(line.startswith("Unfinished: seq-mis seed 1 at step 4 of 6.") for line in data["warnings"])


def test_the_page_and_what_the_terminal_says(runs: Path, tmp_path: Path) -> None:
    done = here("report", runs, "--out", tmp_path, cwd=runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"report: {tmp_path / 'report.html'}\n"
    assert "note: Unfinished: seq-mis seed 1 at step 4 of 6." in done.stderr
    assert "seq-mis against token-tis" in (tmp_path / "report.html").read_text()


def test_a_target_needs_something_to_compare(runs: Path) -> None:
    done = here("report", "token-tis-seed0", "--target", "0.5", cwd=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert "name several runs" in done.stderr
