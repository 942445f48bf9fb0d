"""The commands of a user, on a real (tiny) model: train, stop, resume, evaluate, export, report."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.support.commands import here
from tests.support.run_results import undocumented

from trimtab.intervals import wilson
from trimtab.report.health import health
from trimtab.runs.directory import read_metrics
from trimtab.runs.reader import read_run
from trimtab.trainer.sft import laboratory_folder

pytestmark = pytest.mark.e2e

RECIPE = """
description = "A few steps of sorting with the laboratory model"
threads = 1

[model]
path = "laboratory"
dtype = "float32"
autocast = "none"

[task]
name = "sort"

[objective]
name = "token-tis"

[engine]
dtype = "float32"

[optim]
lr = 1e-4

[trainer]
steps = 4
prompts = 4
samples = 4

[eval]
problems = 16
every = 1
best = "eval/sort/greedy"

[checkpoint]
every = 1
keep = 4
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recipe and one finished run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "small.toml").write_text(RECIPE)
    done = here("train", "small.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_training_shows_its_equation_every_step_and_where_the_report_is(place: Path) -> None:
    lines = (place / "stdout").read_text().splitlines()
    assert any("min(ρ_t, 2)" in line for line in lines)
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(
        word in steps[-1] for word in ("reward", "k3", "ESS", "clipped", "rejected", "roll tok/s", "train tok/s")
    )
    assert lines[-3].startswith("held-out greedy accuracy (sort, 16 problems): 0.")
    assert lines[-2] == f"verdict: {health(read_run(place / 'runs/small')).text}"
    assert lines[-1] == "report: runs/small/report.html"
    assert (place / "runs/small/report.html").stat().st_size > 100_000


def test_the_problems_that_are_named_are_those_that_were_used(place: Path, tmp_path: Path) -> None:
    """The task has twelve test problems, whatever number the recipe allows."""
    # Another task would have a warm start of its own.
    sets = ("trainer.steps=2", "eval.problems=99999999", "task.holdout=12", f"model.path={laboratory_folder()}")
    words = [word for change in sets for word in ("--set", change)]
    done = here("train", "small.toml", *words, "--out", str(tmp_path / "run"), cwd=place)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("held-out greedy accuracy ("))
    result = re.fullmatch(
        r"held-out greedy accuracy \(sort, 12 problems\): ([\d.]+) -> ([\d.]+), 95% interval (.+)", line
    )
    assert result is not None, line
    before, after, ends = result.groups()
    bounds = [float(end) for end in re.findall(r"[\d.]+", ends)]
    # Half a thousandth in the printed mean and half of one in the printed end; an interval's ends move by at most 1.6
    # times its mean's step at 12 problems.
    assert bounds == pytest.approx([*wilson(float(before), 12), *wilson(float(after), 12)], abs=1.5e-3)
    first, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (first["eval/sort/problems"], f"{first['eval/sort/before']:.3f}") == (12, before)
    assert (last["eval/sort/problems"], f"{last['eval/sort/greedy']:.3f}") == (12, after)


def test_every_key_a_real_run_logs_is_documented(place: Path) -> None:
    keys = read_run(place / "runs/small").keys
    assert len(keys) > 50
    assert undocumented(keys) == []


def test_resume_takes_an_older_checkpoint_where_the_newest_is_damaged(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "runs" / "small", tmp_path / "run")
    (run / "checkpoints" / "step-000004" / "manifest.json").write_text("[" * 100_000)
    done = here("train", "small.toml", "--out", str(run), "--resume", cwd=place)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert "step-000004 is damaged: manifest.json cannot be read; using step-000003 instead" in text
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_its_checkpoints_and_its_best_are_evaluated_like_models(place: Path) -> None:
    steps = [f"runs/small/checkpoints/step-{step:06d}" for step in (1, 2, 3, 4)]
    done = here("eval", "runs/small", *steps, "--problems", "16", "--dtype", "float32", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert {(one["task"], one["problems"], one["samples"]) for one in results} == {("sort", 16, 1)}
    accuracy = {one["model"]: one["accuracy"] for one in results}
    # The same 16 problems, the same weights, both greedy in fp32: the trainer's own measurements.
    logged = [row["eval/sort/greedy"] for row in read_run(place / "runs/small").rows]
    assert [accuracy[name] for name in steps] == logged
    assert accuracy["runs/small"] == logged[-1]
    best = here("eval", "runs/small", "--which", "best", "--problems", "16", "--dtype", "float32", "--json", cwd=place)
    [result] = json.loads(best.stdout)["results"]
    assert (result["model"], result["accuracy"]) == ("runs/small (best)", max(logged))
    absent = here("eval", "runs/small/checkpoints/step-000009", cwd=place)
    assert (absent.returncode, len(absent.stderr.splitlines())) == (2, 1)
    assert "step-000009" in absent.stderr


def test_an_exported_run_is_evaluated_the_same(place: Path) -> None:
    exported = here("export", "runs/small", "model", cwd=place)
    assert (exported.returncode, exported.stdout) == (0, "model: model\n"), exported.stderr
    words = ["--task", "small.toml", "--problems", "16", "--json"]
    done = here("eval", "model", *words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["accuracy"] == read_run(place / "runs/small").last["eval/sort/greedy"]


def test_a_warm_start_is_a_model(place: Path) -> None:
    done = here("sft", "laboratory", "--set", "sft.steps=2", "--out", "warm", cwd=place)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split()[3]) for line in lines if line.startswith("step ")]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert lines[-1] == "model: warm"
    measured = here("eval", "warm", "--task", "sort", "--problems", "8", "--json", cwd=place)
    assert json.loads(measured.stdout)["results"][0]["problems"] == 8


def test_json_of_a_run_is_all_of_standard_output_whatever_a_reward_prints(place: Path) -> None:
    (place / "loud.py").write_text(
        "import os\nprint('imported')\n"
        "def score(completion, problem):\n"
        "    print('scored')\n    os.system('echo shouted')\n"
        "    return float(len(completion) % 3)\n"
    )
    words = ["--set", "trainer.steps=1", "--set", 'reward=[{name="loud:score"}]', "--out", "runs/loud", "--json"]
    done = here("train", "small.toml", *words, cwd=place)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == "runs/loud"
    assert (result["metrics"]["step"], result["metrics"]["reward/failed"]) == (1, 0)
    assert result["verdict"]["text"] == health(read_run(place / "runs/loud")).text
    lines = done.stderr.splitlines()
    assert {"imported", "scored", "shouted"} <= set(lines)
    assert any(line.startswith("step 1/1") for line in lines)


def test_a_run_is_evaluated_from_anywhere(place: Path, tmp_path: Path) -> None:
    """The recipe names its data relative to itself; it is trained from one folder and evaluated from another."""
    home = place / "home"
    home.mkdir()
    numbers = ("3142", "2718", "1618", "5772")
    rows = [{"question": f"{digits}=", "answer": "".join(sorted(digits)) + "."} for digits in numbers]
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = 'name = "file"\npath = "data.jsonl"\nholdout = 0.5\nstyle = "plain"\ntemplate = "{question}"'
    recipe = RECIPE.replace('name = "sort"', task).replace("eval/sort", "eval/data").replace("steps = 4", "steps = 1")
    (home / "mine.toml").write_text(recipe)
    trained = here("train", "home/mine.toml", "--out", "runs/mine", "--set", "sampling.max_tokens=8", cwd=place)
    assert trained.returncode == 0, trained.stderr
    done = here("eval", str(place / "runs/mine"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)["results"]
    assert (result["problems"], result["accuracy"]) == (2, read_run(place / "runs/mine").last["eval/data/greedy"])


def test_waiting_for_a_server_that_does_not_answer_is_reported(place: Path) -> None:
    words = ["engine.type=server", 'engine.server.urls=["http://127.0.0.1:9"]', "engine.server.reconnect_timeout=1"]
    sets = [word for change in words for word in ("--set", change)]
    done = here("train", "small.toml", *sets, "--out", "runs/alone", cwd=place)
    assert done.returncode == 2
    assert "waiting up to 1 s for 1 of 1 inference servers (http://127.0.0.1:9/health: " in done.stdout
    assert done.stderr.startswith("trimtab: 1 of 1 inference servers did not answer within 1 s")
