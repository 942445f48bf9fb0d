"""The sandbox "bubblewrap" of a trainer that is an ordinary user, and of a root that may not make namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.trainer.sandbox.python_pool import sandbox_unavailable

USER = 61234  # a user of this machine without an account
ROOT = Path(__file__).parents[2]
MINUTES = 60  # seconds
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user: the other tests run as one"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


def run_as_user(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),  # Monty's binary is found there
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), sysconfig.get_path("purelib")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        command,
        user=USER,
        group=USER,
        extra_groups=[],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=15 * MINUTES,
        check=False,
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the user. Those of pytest lie in one that is closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, USER, USER)
        yield Path(name)


def interpreter(folder: Path) -> str:
    """Returns a Python that the user can start with the packages of this one."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if (
                run_as_user([python, "-c", "import pytest, trimtab.trainer.sandbox.python_pool"], folder).returncode
                == 0
            ):
                return python
        except OSError:
            continue
    pytest.skip("no Python that another user can start: this one lies in a folder of root")


@pytest.mark.slow
def test_every_attack_is_held_for_an_ordinary_user(folder: Path) -> None:
    tests = ["tests/e2e/test_sandbox_attacks.py", "tests/e2e/test_python_pool.py"]
    options = ["-q", "-k", "attack or bubblewrap or note or written or disabled", "-p", "no:cacheprovider"]
    run = run_as_user([interpreter(folder), "-m", "pytest", *tests, *options, f"--basetemp={folder}/base"], folder)
    last = run.stdout.strip().splitlines()[-1]
    assert run.returncode == 0, run.stdout[-3000:]
    assert "skipped" not in last
    assert int(last.split()[0]) > 250


@pytest.mark.e2e
@pytest.mark.parametrize("capability", ["sys_admin", "setuid"])
def test_root_without_a_right_is_refused_in_one_line(capability: str) -> None:
    """As root is in a container of Docker."""
    if missing := sandbox_unavailable("bubblewrap"):
        pytest.skip(missing)
    code = "from trimtab.trainer.sandbox.python_pool import sandbox_unavailable as f; print(f('bubblewrap'))"
    without = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}", sys.executable, "-c", code]
    message = subprocess.run(without, capture_output=True, text=True, check=True).stdout
    assert "this process is root in a container that may not" in message
    assert message.count("\n") == 1
