"""A `GuardStop` in a worker of Ray reaches the script, which ends with its line and status 3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ray_support import local_cluster

pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import sys
import ray
from trimtab.monitor import Monitor

ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})

@ray.remote
class Worker:
    def train(self):
        from tests.unit.monitor.test_monitor import collapsing
        monitor = Monitor(stop_on=["ess"])
        for step in range(20):
            monitor.observe(**collapsing(step))

Monitor(stop_on=["ess"])
ray.get(Worker.remote().train.remote())
"""


def test_the_script_of_a_ray_run_ends_with_the_line_of_its_worker(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root / "src", root)))
    with local_cluster() as cluster:
        command = [sys.executable, "-c", SCRIPT, cluster.address, path]
        environment = os.environ | {"PYTHONPATH": path}
        ended = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("trimtab.errors.GuardStop: step 10: ess: effective sample size")
