"""Every mistake at the command line: exit code 2, one line on standard error that names the word, no traceback.

All in this process; one of each command also in a process that has imported nothing before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import ENVIRONMENT, here, process

pytestmark = pytest.mark.e2e


MISTAKES = [
    (["trian"], ["'trian'", "'train'"]),
    (["train"], ["'RECIPE'", "trimtab train --help"]),
    (["train", "--stes", "3"], ["--stes", "--set"]),
    (["train", "quickstrat"], ["'quickstrat'", "'quickstart'"]),
    (["train", "absent.toml"], ["absent.toml", "No such file"]),
    (["train", "broken.toml"], ["broken.toml", "not valid TOML"]),
    (["train", "quickstart", "--set", "optim.lrr=1"], ["'optim.lrr'", "'lr'"]),
    (["train", "quickstart", "--set", "optm.lr=1"], ["'optm'", "'optim'"]),
    (["train", "quickstart", "--set", "trainer.steps=many"], ["trainer.steps", "'many'"]),
    (["train", "quickstart", "--set", "trainer.steps=0"], ["trainer.steps", "0"]),
    (["train", "quickstart", "--set", "trainer.steps"], ["'trainer.steps'", "section.key=value"]),
    (["train", "quickstart", "--set", "objective.name=token-tiss"], ["'token-tiss'", "'token-tis'"]),
    (["train", "quickstart", "--set", "objective.weight_mx=2"], ["'weight_mx'", "'weight_max'"]),
    (["train", "quickstart", "--set", "task.name=arithmetics"], ["'arithmetics'", "'arithmetic'"]),
    (["train", "quickstart", "--set", "model.path=./no-model"], ["/no-model", "does not exist"]),
    (["train", "quickstart-stale", "--resume"], ["holds no comparison", "--resume"]),
    (["train", "quickstart", "--out", "occupied"], ["occupied", "already holds a run", "--resume"]),
    (["train", "quickstart", "--out", "nothing-here", "--resume"], ["nothing-here", "no run"]),
    (["explain", "grop"], ["'grop'", "'grpo'"]),
    (["explain", "token-tis", "--set", "objective.weight_max=2"], ["objective.weight_max", "weight_max"]),
    (["explain", "token-tis", "--set", "weight_max=-1"], ["'token-tis'", "-1"]),
    (["eval", "smollm2-135m-instruct"], ["--task", "arithmetic"]),
    (["eval", "smollm2-135m-instruct", "--task", "arithmetics"], ["'arithmetics'", "'arithmetic'"]),
    (["eval", "smollm2-135m-instruct", "--task", "arithmetic", "--set", "digitz=3"], ["'digitz'", "'digits'"]),
    (["eval", "smollm2-135m-instruct", "--task", "arithmetic", "--samples", "0"], ["'--samples'", "1"]),
    (["eval", "./no-model", "--task", "arithmetic"], ["./no-model"]),
    (["report", "no-such-run"], ["no-such-run", "check the path"]),
    (["report", "torn-run"], ["metrics.jsonl, line 1"]),
    (["export", "no-such-run", "model"], ["no-such-run"]),
    (["sft", "quickstrat"], ["'quickstrat'", "'quickstart'"]),
]
# One of each command, each late enough that everything it needs was imported.
REAL = (
    ["train", "quickstart", "--set", "model.path=./no-model"],
    ["sft", "quickstrat"],
    ["explain", "token-tis", "--set", "weight_max=-1"],
    ["eval", "./no-model", "--task", "arithmetic"],
    ["report", "torn-run"],
    ["export", "no-such-run", "model"],
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with files in every wrong state."""
    folder = tmp_path
    (folder / "broken.toml").write_text("seed = = 1\n")
    for name, metrics in (("occupied", None), ("torn-run", '{"step": \n')):
        (folder / name).mkdir()
        (folder / name / "config.toml").write_text("seed = 0\n")
        if metrics is not None:
            (folder / name / "metrics.jsonl").write_text(metrics)
    return folder


def _files(folder: Path) -> dict[Path, bytes]:
    """Everything in the folder but the lock files of readers."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def _check(code: int, stderr: str, named: list[str]) -> None:
    lines = stderr.splitlines()
    assert code == 2, stderr
    assert len(lines) == 1, stderr
    assert lines[0].startswith("trimtab: ")
    for word in named:
        assert word in lines[0]


@pytest.mark.parametrize(("words", "named"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line(place: Path, words: list[str], named: list[str]) -> None:
    before = _files(place)
    done = here(*words, cwd=place)
    _check(done.returncode, done.stderr, named)
    assert _files(place) == before, "a mistake changes nothing, so that the corrected command just works"


ONE_AFTER_THE_OTHER = """
import json, sys
from trimtab.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.slow
def test_a_process_of_its_own_prints_nothing_else(place: Path) -> None:
    """No warning of a library while it is imported, and no message of the model hub."""
    program = [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(REAL)]
    done = subprocess.run(program, cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["2"] * len(REAL), done.stderr
    for words, line in zip(REAL, done.stderr.splitlines(), strict=True):
        _check(2, line, next(named for mistake, named in MISTAKES if mistake == words))


def test_the_console_script_is_the_module(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("trimtab")
    done = subprocess.run([script, "trian"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, process("trian", cwd=tmp_path).stderr)
