"""A real grid of tiny runs: killed in the middle, resumed, and the same as one that was never stopped."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.support import forked
from tests.support.processes import gone

from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints

pytestmark = pytest.mark.slow

GRID = ("--methods", "dapo", "token-tis:weight_max=3", "--regimes", "on-policy", "stale-32+int3", "--seeds", "2")
TINY = ("--set", "trainer.steps=3", "--set", "trainer.prompts=4", "--set", "eval.problems=16", "--workers", "2")
ONE = (*TINY[:-1], "1")  # a worker more imports as long as few runs take


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "trimtab", "compare", *words, "--out", str(out)]


Grid = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(python: forked.Run) -> Grid:
    return lambda out, *words, folder=None: python(*command(out, *words)[1:], cwd=folder)


def rows(out: Path) -> list[dict[str, Any]]:
    """All that a grid found, without how long it took."""
    return [
        {k: v for k, v in row.items() if "seconds" not in k}
        for row in pq.read_table(out / "results.parquet").to_pylist()
    ]


@pytest.fixture(scope="module")
def whole(run: Grid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grid") / "whole"
    done = run(out, *GRID, *TINY)
    assert done.returncode == 0, done.stderr
    assert "8/8" in done.stdout
    assert "| method | on-policy | stale-32+int3 |" in done.stdout
    assert "| `token-tis:weight_max=3` | 0." in done.stdout
    return out


def test_a_grid_leaves_a_table_a_page_and_small_run_directories(whole: Path) -> None:
    result = rows(whole)
    assert len(result) == 8
    assert all(row["status"] == "done" and row["steps"] == 3 and len(row["curve"]) == 4 for row in result)
    stale = [row for row in result if row["regime"] == "stale-32+int3"]
    assert (
        min(row["k3_worst"] for row in stale)
        > 1e-3
        > max(row["k3_worst"] for row in result if row["regime"] == "on-policy")
    )
    assert "token-tis:weight_max=3" in (whole / "report.html").read_text()
    assert {item.name for item in (whole / "on-policy/dapo/seed0").iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "provenance.json",
        "result.json",
        ".lock",
    }


def test_killed_in_the_middle_it_goes_on_and_ends_bit_for_bit_the_same(run: Grid, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    with subprocess.Popen(command(out, *GRID, *TINY), stdout=subprocess.PIPE, text=True) as grid:
        assert grid.stdout is not None
        next(line for line in grid.stdout if line.startswith("3/8"))
        grid.send_signal(signal.SIGKILL)
    kept = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    assert 3 <= len(kept) < 8
    assert 3 <= len(rows(out)) <= len(kept), "the table is whole whenever the process dies"
    again = run(out, *GRID, *TINY)
    assert again.returncode == 0, again.stderr
    assert "of them finished before" in again.stdout
    assert rows(out) == rows(whole)
    assert kept.items() <= {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}.items()


def test_workers_die_with_the_process_that_started_them(run: Grid, tmp_path: Path) -> None:
    long = ("--methods", "dapo", "--regimes", "on-policy", "--seeds", "1", "--set", "trainer.steps=10000")
    with subprocess.Popen(command(tmp_path / "long", *long), stdout=subprocess.PIPE, text=True) as grid:
        metrics = tmp_path / "long/on-policy/dapo/seed0/metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert grid.poll() is None
            time.sleep(0.05)
        grid.send_signal(signal.SIGKILL)
    # The run's lock is free again only when the worker is gone; a second grid in the folder takes it.
    done = run(tmp_path / "long", *long[:-1], "trainer.steps=10000", "--set", "optim.lr=1e-3")
    assert done.returncode == 2
    assert "optim.lr" in done.stderr
    assert gone(int((metrics.parent / ".lock").read_text().split()[1]))


def test_a_grid_that_is_stopped_saves_its_runs_and_goes_on_with_them(tmp_path: Path) -> None:
    out = tmp_path / "long"
    long = ("--methods", "dapo", "--regimes", "on-policy", "--seeds", "1", "--set", "trainer.steps=10000")
    run, known = out / "on-policy/dapo/seed0", 0
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(command(out, *long), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as grid:
            while not (run / "metrics.jsonl").exists() or len(read_metrics(run / "metrics.jsonl")) < known + 2:
                assert grid.poll() is None
                time.sleep(0.05)
            grid.send_signal(number)
            errors = grid.communicate()[1]
        assert grid.returncode == 128 + number
        assert errors.endswith("trimtab: interrupted; finished runs are kept; the same command goes on\n")
        assert "Traceback" not in errors
        steps = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        assert list_checkpoints(run / "checkpoints")[-1].name == f"step-{len(steps):06d}"
        assert len(steps) >= known + 2
        known = len(steps)


def test_a_diverged_run_is_a_result_and_a_failed_one_does_not_stop_the_others(run: Grid, tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").write_text(json.dumps({"prompt": "1=", "response": "1."}) + "\n")
    methods = ("dapo", f"luffy:demonstrations.path={tmp_path / 'gone.jsonl'}", "token-bypass:optim.lr=1e30")
    done = run(tmp_path / "out", "--methods", *methods, "--seeds", "1", "--regimes", "on-policy", *ONE, "--json")
    values = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(row["method"], row["diverged"]) for row in values["scores"]] == [("dapo", 0), (methods[2], 1)]
    assert values["scores"][1]["accuracy"]["mean"] == 0.0
    (failed,) = values["failed"]
    assert failed["method"] == methods[1]
    assert failed["error"] in done.stderr
    status = {row["method"]: row["status"] for row in rows(tmp_path / "out")}
    assert status == {"dapo": "done", methods[1]: "failed", methods[2]: "diverged"}


def test_a_comparison_of_a_recipe_goes_on_where_it_was_stopped(python: forked.Run, tmp_path: Path) -> None:
    out = tmp_path / "stale"
    sets = ["trainer.steps=2", "trainer.prompts=2", "eval.problems=8", "compare.seeds=[0]", "compare.workers=1"]
    words = ["train", "quickstart-stale", *(word for change in sets for word in ("--set", change)), "--out", str(out)]

    def train(*more: str) -> None:
        assert python("-m", "trimtab", *words, *more).returncode == 0

    train()
    assert {(row["method"], row["regime"], row["status"]) for row in rows(out)} >= {
        ("dapo", "recipe", "done"),
        ("seq-bypass", "recipe", "done"),
    }
    kept, lost = (out / name / "seed0" / "result.json" for name in ("dapo", "seq-bypass"))
    stamp, metrics = kept.stat().st_mtime_ns, (lost.parent / "metrics.jsonl").read_text()
    lost.unlink()  # as if it had been stopped there
    train("--resume")
    assert kept.stat().st_mtime_ns == stamp
    again = [json.loads(line) for line in (lost.parent / "metrics.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in metrics.splitlines()]
    assert [row["eval/sort/greedy"] for row in again if "eval/sort/greedy" in row] == [
        row["eval/sort/greedy"] for row in before if "eval/sort/greedy" in row
    ]
    assert [row["reward/mean"] for row in again] == [row["reward/mean"] for row in before]


def test_a_mask_and_a_surrogate_of_one_s_own_are_compared(run: Grid, tmp_path: Path) -> None:
    """The two files of docs/objectives.md, in the folder where the command is typed, each with two keyword values."""
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    surrogate, mask = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]
    (tmp_path / "my_masks.py").write_text(mask)
    (tmp_path / "my_methods.py").write_text(surrogate)
    methods = ["my_masks:floor", "my_masks:floor:floor_min=0.1", "my_methods:tanh_gap", "my_methods:tanh_gap:tau=0.1"]
    out = tmp_path / "grid"
    done = run(out, "--methods", *methods, "--regimes", "stale-32", "--seeds", "1", *ONE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["method"] for row in rows(out)] == methods

    def largest(metric: str, name: str) -> float:
        return max(step[metric] for step in read_metrics(out / "stale-32" / name / "seed0" / "metrics.jsonl"))

    assert largest("reject/floor", "my_masks_floor") < largest("reject/floor", "my_masks_floor_floor_min_0.1")
    assert 0 < largest("clip/half", "my_methods_tanh_gap") < largest("clip/half", "my_methods_tanh_gap_tau_0.1")


def test_tuned_rows_stand_beside_the_published_and_nothing_is_trained_twice(run: Grid, tmp_path: Path) -> None:
    out, few = tmp_path / "out", ("--regimes", "on-policy", "--seeds", "1", "--tune", "1")
    words = ("--methods", "grpo", "token-tis", *few, *TINY[:-2], "--set", "trainer.steps=1", "--workers", "2")
    done = run(out, *words, "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert [item["method"] for item in values["scores"]] == ["grpo", "grpo (tuned)", "token-tis", "token-tis (tuned)"]
    assert [(item["method"], item["regime"]) for item in values["tuned"]] == [
        ("grpo", "on-policy"),
        ("token-tis", "on-policy"),
    ]
    assert len(rows(out / "tuning")) == 12
    assert all(row["processor_seconds"] > 0 for row in pq.read_table(out / "results.parquet").to_pylist())
    assert "The seeds and problems of the table had no part in the choice." in (out / "report.html").read_text()
    kept = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    again = run(out, *words)
    assert again.returncode == 0, again.stderr
    assert kept == {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
