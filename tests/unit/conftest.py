"""Runs to read, made once and never changed; tests that damage one copy it.

What writes them is imported when a run is asked for: tests of the core do without, and need none of its packages.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

FEW = ("step", "reward/mean", "mismatch/ess_token", "eval/arithmetic/greedy", "eval/arithmetic/before")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in this process, which must end with `code`: standard output, or of a mistake (2) the error."""
    from trimtab.cli import main

    def run(*words: object, code: int = 0) -> str:
        assert main.run([str(word) for word in words]) == code
        output = capsys.readouterr()
        return output.err if code == 2 else output.out

    return run


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """`fake_run` of fake_run.py: writes a whole run directory."""
    from tests.support.fake_run import fake_run

    return fake_run


@pytest.fixture(scope="session")
def evil_text() -> str:
    """Text by which a model might break a page."""
    from tests.support.fake_run import EVIL

    return EVIL


@pytest.fixture(scope="session")
def finished_run(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of 12 steps. Read only."""
    return make_run(tmp_path_factory.mktemp("runs") / "finished", steps=12, every=4)


@pytest.fixture
def small_run(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    """A run that logged little, so that its page is drawn quickly."""
    return make_run(tmp_path / "small", steps=3, every=2, keys=FEW)


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, which the test may change."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))
