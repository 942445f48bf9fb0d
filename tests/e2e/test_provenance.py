"""A real run that was killed and went on: both starts are in provenance.json, on its page and in the JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import forked

pytestmark = pytest.mark.slow


def test_a_killed_and_a_resumed_start_are_both_known(python: forked.Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sets = ["trainer.steps=40", "trainer.prompts=2", "eval.every=0", "eval.problems=4", "checkpoint.every=1"]
    words = ["train", "laboratory", *(word for change in sets for word in ("--set", change)), "--out", str(out)]
    command = [sys.executable, "-m", "trimtab", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        next(line for line in run.stdout if line.startswith("step 3/"))
        run.send_signal(signal.SIGKILL)
    assert python(*command[1:], "--resume").returncode == 0
    first, second = json.loads((out / "provenance.json").read_text())
    assert (first["first_step"], first["ended"], first["last_step"]) == (1, None, None)
    assert 3 <= second["first_step"] <= 40
    assert second["last_step"] == 40
    assert second["command"].endswith(f"--out {out} --resume")
    assert first["command"].startswith("trimtab train laboratory --set trainer.steps=40")
    assert json.loads(python("-m", "trimtab", "report", out, "--json").stdout)["provenance"] == [first, second]
    page = (out / "report.html").read_text()
    assert "Resumed" in page
    assert second["hardware"]["cpu"] in page
