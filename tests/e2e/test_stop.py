"""Ctrl-C and SIGTERM, sent to real processes: what was trained is saved, and what the last line promises holds."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import ENVIRONMENT, begin

from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints

pytestmark = pytest.mark.slow

SMALL = ("trainer.prompts=2", "trainer.samples=4", "eval.problems=4", "checkpoint.every=0", "log.trajectories_every=0")
ENGINES = {"in this process": (), "in a worker": ("engine.workers=1", "trainer.max_lag=1")}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def recipe(*changes: str) -> list[str]:
    return ["laboratory", *(word for change in (*SMALL, *changes) for word in ("--set", change))]


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send the signal; the last line on standard error."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == CODES[number], errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    return errors.splitlines()[-1]


def saved(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(run / "checkpoints")]


def steps(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_saved_where_it_stands_and_goes_on_from_there(number: signal.Signals, tmp_path: Path) -> None:
    words = ["-m", "trimtab", "train", *recipe("trainer.steps=4000"), "--out", "a run"]
    process = begin(words, "step 2/", cwd=tmp_path)
    last = end(process, number)
    run = tmp_path / "a run"
    [step] = saved(run)
    assert steps(run) == list(range(1, step + 1)), "the checkpoint is of the last step that was finished"
    assert step >= 2
    promise = "trimtab: interrupted; continue with: "
    assert last.startswith(promise)
    again = shlex.split(last.removeprefix(promise))
    assert again[-1] == "--resume"
    resumed = begin(["-m", *again], "step ", cwd=tmp_path)
    end(resumed, signal.SIGINT)
    assert steps(run) == list(range(1, saved(run)[-1] + 1))
    assert saved(run)[-1] > step


@pytest.mark.parametrize("engine", ENGINES)
def test_ctrl_c_in_a_terminal_reaches_every_process_and_the_step_is_still_finished(engine: str, tmp_path: Path) -> None:
    """Rewards are scored, and responses may be generated, in processes of the same terminal."""
    words = ["-m", "trimtab", "train", *recipe("trainer.steps=4000", *ENGINES[engine]), "--out", "run"]
    process = begin(words, "step 2/", cwd=tmp_path, start_new_session=True)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("trimtab: interrupted; continue with: ")
    [step] = saved(tmp_path / "run")
    assert steps(tmp_path / "run") == list(range(1, step + 1))


def test_before_the_first_step_nothing_is_kept_and_nothing_else_is_promised(tmp_path: Path) -> None:
    words = ["-m", "trimtab", "train", *recipe("eval.problems=4096", "task.holdout=4096"), "--out", "run"]
    # The line comes before 4096 problems are evaluated, which takes seconds; the signal takes milliseconds.
    process = begin(words, "run ", cwd=tmp_path)
    last = end(process, signal.SIGINT)
    assert last.startswith("trimtab: interrupted; nothing was written yet, start again with: trimtab train laboratory")
    assert "--resume" not in last
    assert [item.name for item in (tmp_path / "run").iterdir()] == [".lock"], "the same command is not refused"


# Modules of Trimtab and of others in whose import the signal arrives.
@pytest.mark.parametrize("module", ["typer", "trimtab.cli.train", "torch", "transformers", "trimtab.trainer.run"])
def test_during_imports_the_process_just_ends(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", *recipe(), "--out", "run"],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "\ntrimtab: interrupted; nothing had been started\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("every", "promise"),
    [(1, "continue with: trimtab train"), (0, "no checkpoint was written yet, this begins again: trimtab train")],
)
def test_a_second_signal_ends_the_step_and_what_is_saved_is_whole(every: int, promise: str, tmp_path: Path) -> None:
    # A reward that waits while there is a file named `hold`, and says so.
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def score(completion, problem):\n"
        "    while Path('hold').exists():\n"
        "        Path('held').touch()\n"
        "        time.sleep(0.01)\n"
        "    return float(len(completion) % 3)\n"
    )
    changes = [f"checkpoint.every={every}", "trainer.steps=4000", 'reward=[{name="slow:score", timeout=600}]']
    words = ["-m", "trimtab", "train", *recipe(*changes), "--out", "run"]
    process = begin(words, "step 2/", cwd=tmp_path)
    (tmp_path / "hold").touch()
    while not (tmp_path / "held").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("stopping: this step is finished and saved first; once more")
    last = end(process, signal.SIGINT)
    assert last.startswith(f"trimtab: interrupted; {promise}")
    run = tmp_path / "run"
    assert not [item for item in run.rglob("*") if item.name.startswith(".trimtab-")]
    done = len(steps(run))
    assert saved(run) == ([done - 1, done] if every else [])
    (tmp_path / "hold").unlink()
    again = shlex.split(last.partition("trimtab train")[2])
    resumed = begin(["-m", "trimtab", "train", *again], "step ", cwd=tmp_path)
    end(resumed, signal.SIGINT)
    assert steps(run) == list(range(1, saved(run)[-1] + 1))
    assert saved(run)[-1] > (done if every else 0)
