"""What `diagnose` and `explain --for` print for verl and TRL is accepted by them, and is the loss that it says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-bench" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no peers here: make bench-install installs them"),
]


def run(trainer: str) -> dict[str, Any]:
    command = [str(PYTHON), str(ROOT / "tests" / "programs" / "printed_lines.py"), trainer]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    if "No module named 'hydra'" in ended.stderr:
        pytest.skip("no hydra here: make bench-install installs it")
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


def check_equal(case: dict[str, Any], name: str) -> None:
    assert case["scale"] > 0, name
    assert case["loss"] <= 1e-6, name
    assert case["gradient"] <= 1e-6, name


def test_overrides_for_verl_are_its_own_loss_or_say_what_differs() -> None:
    cases = run("verl")
    equal = {name for name, case in cases.items() if "loss" in case}
    own = {name for name in equal if "loss_mode=trimtab-" not in cases[name]["text"]}
    for name, case in cases.items():
        if name in equal:
            check_equal(case, name)
        else:
            assert "# differs: " in case["text"] or "# verl cannot train" in case["text"], name
    assert {"grpo", "dapo", "dr-grpo", "gspo", "cispo", "reinforce", "token-bypass", "token-alp-bypass"} <= own
    assert {"token-tis", "seq-tis", "seq-mis", "icepop", "dppo", "dppo-kl", "sapo", "geo-mask kept"} <= own
    assert {"m2po", "geo-mask", "gmpo", "oapl", "luffy", "soup", "token-alp"} <= cases.keys() - equal


def test_calls_for_trl_are_its_own_loss_or_name_the_adapter() -> None:
    cases = run("trl")
    for name, case in cases.items():
        if "loss" in case:
            check_equal(case, name)
        elif case.get("calls", "").startswith("trimtab.adapters.trl."):
            assert case["same"] or "# differs: " in case["text"], name
        elif "AsyncGRPOConfig" in case.get("calls", ""):
            # Its loss against the preset: test_trl_async.py.
            assert name == "token-bypass" or "# differs: " in case["text"], name
        else:
            assert "# differs: " in case["text"] or "# TRL cannot train" in case["text"], name
    own = {name for name, case in cases.items() if "loss" in case}
    assert {"grpo", "dapo", "dr-grpo", "gspo", "cispo", "token-tis", "seq-tis", "seq-mis", "icepop"} <= own
    assert {"opsm", "sapo", "vespo", "gmpo"} <= own
    assert cases["token-bypass"]["epsilon"] == [0.2, 0.2]
