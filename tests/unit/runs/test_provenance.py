"""provenance.json: one object for each start, complete at any moment, and nothing of the machine that is not meant."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from trimtab.errors import Stopped, TrimtabError
from trimtab.runs import provenance
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import METRICS
from trimtab.runs.provenance import read_starts
from trimtab.trainer.config import load_config

CONFIG = load_config("laboratory")


def started(
    run: RunDirectory, command: str = "x", first: int = 1, at: datetime | None = None
) -> AbstractContextManager[None]:
    at = at or datetime.now(UTC)
    return provenance.record_start(run, CONFIG.engine.type, command, at, first_step=first, ranks=1)


def test_a_start_is_there_while_it_runs_and_complete_when_it_ends(tmp_path: Path) -> None:
    at = datetime.now(UTC) - timedelta(seconds=90)
    with RunDirectory.create(tmp_path, CONFIG.dump()) as run:
        with started(run, "trimtab train it", at=at):
            (begun,) = read_starts(tmp_path)
            assert (begun["ended"], begun["seconds"], begun["last_step"]) == (None, None, None)
            run.log({"step": 1})
            run.log({"step": 2})
        (part,) = read_starts(tmp_path)
    assert (part["command"], part["first_step"], part["last_step"], part["ranks"]) == ("trimtab train it", 1, 2, 1)
    assert part["started"] == at.isoformat(timespec="seconds")
    assert datetime.fromisoformat(part["ended"]) >= at + timedelta(seconds=89)
    assert part["seconds"] >= 90
    assert part["versions"]["torch"] == importlib.metadata.version("torch")
    assert part["versions"].keys() == {"python", "trimtab", "torch", "transformers"}
    assert part["versions"]["python"] == platform.python_version()
    assert part["hardware"]["threads"] == torch.get_num_threads()
    assert 1 <= part["hardware"]["cores"] <= (os.cpu_count() or 1)
    assert part["hardware"]["memory"] > 2**28
    assert len(part["hardware"]["gpus"]) == torch.cuda.device_count()


def test_every_start_of_a_run_is_kept_also_one_that_failed_or_was_killed(tmp_path: Path) -> None:
    def start(run: RunDirectory, first: int, command: str) -> None:
        with started(run, command, first):
            run.log({"step": first})
            if command == "fails":
                raise TrimtabError("no")

    with RunDirectory.create(tmp_path, CONFIG.dump()) as run:
        # What a process leaves that is killed inside the block.
        killed = started(run, "killed")
        killed.__enter__()
        run.log({"step": 1})
        left = (tmp_path / "provenance.json").read_bytes()
        killed.__exit__(None, None, None)
        (tmp_path / "provenance.json").write_bytes(left)
        with pytest.raises(TrimtabError, match="no"):
            start(run, 2, "fails")
        start(run, 3, "ends")
        with started(run, "without a step", 4):
            pass
    result = read_starts(tmp_path)
    assert [part["command"] for part in result] == ["killed", "fails", "ends", "without a step"]
    assert [part["last_step"] for part in result] == [None, 2, 3, None]
    assert [part["ended"] is None for part in result] == [True, False, False, False]
    assert [part["outcome"] for part in result] == [None, "failed", "finished", "finished"]
    assert [part["error"] for part in result] == [None, "no", None, None]


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (Stopped(signal.SIGTERM), "stopped", None),
        (KeyboardInterrupt(), "stopped", None),
        (TrimtabError("not finite: lower optim.lr"), "failed", "not finite: lower optim.lr"),
        (OSError(28, "No space left on device"), "failed", "OSError: [Errno 28] No space left on device"),
        (RuntimeError("first\nsecond"), "failed", "RuntimeError: first"),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
    ],
)
def test_why_a_start_ended(tmp_path: Path, error: BaseException, outcome: str, message: str | None) -> None:
    with RunDirectory.create(tmp_path, CONFIG.dump()) as run:
        run.log({"step": 1})
        with pytest.raises(type(error)), started(run):
            raise error
    (part,) = read_starts(tmp_path)
    assert (part["outcome"], part["error"]) == (outcome, message)


def test_a_damaged_file_does_not_hide_why_a_start_failed(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG.dump()) as run:
        run.log({"step": 1})
        (tmp_path / METRICS).write_text("not JSON\n" * 2)
        with pytest.raises(ZeroDivisionError), started(run):
            raise ZeroDivisionError


def test_nothing_of_the_environment_goes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    monkeypatch.setenv("HOME", str(tmp_path / "home-of-somebody"))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "home-of-somebody/venv/bin/trimtab"), "train", "my recipe.toml"])
    with RunDirectory.create(tmp_path / "run", CONFIG.dump()) as run:
        with started(run, provenance.command()):
            pass
        text = (run.path / "provenance.json").read_text()
    assert json.loads(text)[0]["command"] == "trimtab train 'my recipe.toml'"
    for word in ("a-secret", "somebody", platform.node(), str(tmp_path), str(provenance.PACKAGE)):
        assert word not in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/usr/bin/trimtab", "train", "quickstart"], "trimtab train quickstart"),
        (["/opt/src/trimtab/__main__.py", "compare", "--seeds", "2"], "trimtab compare --seeds 2"),
        # Another program's words are its own: a notebook's name a file of the session, Ray's an address.
        (["/home/me/mine.py", "--token", "secret"], "trimtab.train() in mine.py"),
        ([""], "trimtab.train() in an interactive session"),
    ],
)
def test_the_command(monkeypatch: pytest.MonkeyPatch, argv: list[str], expected: str) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.command() == expected


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "repository" / "trimtab"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert provenance.commit(package) is None, "no checkout"
    git(package.parent, "init", "-q")
    assert provenance.commit(package) is None, "installed inside a checkout that does not track it"
    git(package.parent, "add", "trimtab")
    git(package.parent, "commit", "-qm", "first")
    head = git(package.parent, "rev-parse", "HEAD")
    assert provenance.commit(package) == {"id": head, "modified": False}
    (package / "__init__.py").write_text("changed = True\n")
    assert provenance.commit(package) == {"id": head, "modified": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit(package) is None, "no git"
