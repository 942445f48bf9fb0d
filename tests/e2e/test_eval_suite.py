"""`trimtab eval` with the laboratory model: tables, a real kill, and checkpoints of a run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked

from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train
from trimtab.trainer.sft import laboratory_folder

pytestmark = pytest.mark.slow
KILLER = Path(__file__).parents[1] / "programs" / "eval_killed.py"
WORDS = ["eval", "laboratory", "--task", "sort:holdout=100", "--samples", "32", "--greedy", "--dtype", "float32"]
PARTS = 2 + 4  # 100 problems: 64 a greedy batch, 32 of 32 samples


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def trimtab(python: forked.Run) -> Command:
    return lambda *words, cwd, program=("-m", "trimtab"): python(*program, *words, cwd=cwd)


def without_seconds(text: str) -> Any:
    return json.loads(text, object_hook=lambda item: {key: value for key, value in item.items() if key != "seconds"})


def batches(folder: Path) -> int:
    """Finished batches on the disk: whole lines but the headers."""
    files = list((folder / "parts").iterdir()) if (folder / "parts").is_dir() else []
    return sum(file.read_bytes().count(b"\n") for file in files) - sum(b"\n" in file.read_bytes() for file in files)


@pytest.fixture(scope="module")
def whole(trimtab: Command, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uninterrupted evaluation, without --out."""
    laboratory_folder()
    done = trimtab(*WORDS, "--json", cwd=tmp_path_factory.mktemp("whole"))
    assert done.returncode == 0, done.stderr
    return without_seconds(done.stdout)


@pytest.mark.parametrize("killer", [("inside", 1), ("between", 3), ("inside", 5), ("between", PARTS)])
def test_a_kill_costs_one_batch_and_changes_no_bit(
    trimtab: Command, tmp_path: Path, whole: Any, killer: tuple[str, int]
) -> None:
    moment, number = killer
    killed = trimtab(*WORDS, "--out", "kept", cwd=tmp_path, program=(KILLER, moment, number))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert batches(tmp_path / "kept") == number - (moment == "inside")
    assert not (tmp_path / "kept" / "results.json").exists()

    again = trimtab(*WORDS, "--out", "kept", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert without_seconds(again.stdout) == whole
    assert without_seconds((tmp_path / "kept" / "results.json").read_text()) == whole
    assert batches(tmp_path / "kept") == PARTS


def test_other_settings_and_other_weights_are_refused(trimtab: Command, tmp_path: Path) -> None:
    words = ["--task", "sort:holdout=100", "--problems", "8", "--samples", "2", "--out", "kept"]
    done = trimtab("eval", "laboratory", *words, "--markdown", "first.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    refusals = {
        ("laboratory", *words, "--seed", "1"): "kept was measured with seed = 0, this command has 1",
        ("laboratory", *words, "--temperature", "0.5"): "temperature = 1.0, this command has 0.5",
        ("laboratory", *words, "--set", "seed=3"): 'task.options.seed = nothing, this command has "3"',
    }
    for changed, line in refusals.items():
        done = trimtab("eval", *changed, cwd=tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert line in done.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()} == kept
    more = trimtab("eval", "laboratory", *words, "--greedy", "--markdown", "-", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "sort greedy" in more.stdout, "a column may be added"
    assert (tmp_path / "kept" / "results.md").read_text() == more.stdout
    assert "sort greedy" not in (tmp_path / "first.md").read_text()


RECIPE = {
    "threads": 1,
    "model": {"path": "laboratory", "dtype": "float32", "autocast": "none"},
    "task": {"name": "sort"},
    "engine": {"dtype": "float32"},
    "optim": {"lr": 1e-3},
    "trainer": {"steps": 3, "prompts": 4, "samples": 4},
    "eval": {"problems": 48, "every": 1, "best": "eval/sort/greedy"},
    "checkpoint": {"every": 1, "keep": 3},
    "log": {"trajectories_every": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy changes a lot from one checkpoint to the next."""
    return train(load_config(RECIPE), out=tmp_path_factory.mktemp("runs") / "run").run


def test_a_run_its_checkpoints_and_its_start_side_by_side(trimtab: Command, trained: Path, tmp_path: Path) -> None:
    steps = [f"{trained}/checkpoints/step-{step:06d}" for step in (1, 2, 3)]
    done = trimtab("eval", str(trained), *steps, "--problems", "48", "--out", "kept", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    actual = {item["model"]: item["accuracy"] for item in json.loads(done.stdout)["results"]}
    logged = {row["step"]: row["eval/sort/greedy"] for row in read_metrics(trained / "metrics.jsonl")}
    # The trainer's own measurements: same problems, same weights, greedy, float32.
    assert [actual[name] for name in steps] == [logged[1], logged[2], logged[3]]
    assert actual[str(trained)] == logged[3]
    assert len(set(logged.values())) > 1, "the checkpoints differ, so naming the wrong one would show"
    best = trimtab("eval", str(trained), "--which", "best", "--problems", "48", "--json", cwd=tmp_path)
    [result] = json.loads(best.stdout)["results"]
    assert (result["model"], result["accuracy"]) == (f"{trained} (best)", max(logged.values()))
    absent = trimtab("eval", f"{trained}/checkpoints/step-000009", cwd=tmp_path)
    assert (absent.returncode, len(absent.stderr.splitlines())) == (2, 1)
    assert "step-000009" in absent.stderr


def test_the_same_name_with_new_weights_is_refused(trimtab: Command, trained: Path, tmp_path: Path) -> None:
    """A run that trained on is another model; the kept counts are not its own."""
    shutil.copytree(trained, tmp_path / "run")
    words = ["eval", "run", "--problems", "8", "--out", "kept"]
    assert trimtab(*words, cwd=tmp_path).returncode == 0
    assert trimtab(*words, cwd=tmp_path).returncode == 0, "exported twice, it is the same model"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    done = trimtab(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "model.weights" in done.stderr
