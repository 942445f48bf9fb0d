"""Whole runs on a real Ray cluster: actors are killed, so is the driver; nothing is lost or left behind."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tests.support.commands import begin
from tests.support.engines import forward_logps
from tests.support.ports import free_port
from tests.support.ray_support import Cluster, local_cluster
from tests.support.turns import check_episodes

pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")

from trimtab.api import train
from trimtab.errors import TrimtabError
from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints
from trimtab.trainer.config import load_config
from trimtab.trainer.export import restore
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.observer import NullObserver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS, SAMPLES, MAX_LAG = 8, 4, 4, 2
SMALL = [
    *("placement=ray", "ray.start_timeout=90", f"trainer.steps={STEPS}", f"trainer.prompts={PROMPTS}"),
    *(f"trainer.samples={SAMPLES}", f"trainer.max_lag={MAX_LAG}", "eval.problems=4", "eval.every=0"),
    *("checkpoint.every=1", "checkpoint.keep=99", "log.trajectories_every=1"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster() as cluster:
        yield cluster


class Killer(NullObserver):
    """Kills one rollout actor after step 2 and the other after step 4: without replacement nobody could go on."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.victims: list[int] = []
        self.lines: list[str] = []

    def step(self, metrics: Mapping[str, float | str]) -> None:
        if metrics["step"] == 2:
            self.victims = [process.pid for process in self.cluster.actors("EngineActor")]
            os.kill(self.victims[0], signal.SIGKILL)
        if metrics["step"] == 4:
            os.kill(self.victims[1], signal.SIGKILL)

    def message(self, text: str) -> None:
        self.lines.append(text)


def test_rollout_actors_killed_in_the_middle_are_replaced_and_every_group_is_accounted_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    places = [f"ray.address={cluster.address}", "ray.engines=2", "ray.trainers=2", "ray.shard_mib=1"]
    killer = Killer(cluster)
    result = train(load_config("laboratory", [*SMALL, *places]), out=tmp_path / "run", observer=killer)
    assert len(killer.victims) == 2
    assert any("was lost" in line and "starting it again" in line for line in killer.lines)
    logged = read_metrics(result.run / "metrics.jsonl")
    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    assert all(math.isfinite(row["loss/policy"]) for row in logged)
    assert 1 <= sum(row["engine/restarts"] for row in logged) <= 2
    assert (result.run / "report.html").is_file()
    groups: list[int] = []
    for step in range(1, STEPS + 1):
        rows = trajectories.read(result.run / "trajectories" / f"step-{step:06d}.parquet")
        groups += [row.trajectory.group for row in rows]
        for row in rows:
            versions = row.trajectory.completion.policy_version
            assert step - 1 - MAX_LAG <= versions.min() <= versions.max() <= step - 1
    assert sorted(groups) == [group for group in range(STEPS * PROMPTS) for _ in range(SAMPLES)]
    assert_versions_are_true(result.run)
    assert not everyone(cluster)


def assert_versions_are_true(run: Path) -> None:
    """Every token has, under the weights of the version it carries, the log-prob its sampler reported."""
    policies: dict[int, torch.nn.Module] = {}
    for step in range(1, STEPS + 1):
        for row in trajectories.read(run / "trajectories" / f"step-{step:06d}.parquet"):
            answer, prompt = row.trajectory.completion, row.trajectory.prompt
            for version in np.unique(answer.policy_version):
                if version not in policies:
                    policies[version] = weights_of(run, int(version))
                reported = answer.logp_behavior[answer.policy_version == version]
                [logp] = forward_logps(policies[version], [prompt], [[answer]])
                np.testing.assert_allclose(reported, logp[answer.policy_version == version], atol=2e-5)


def weights_of(run: Path, version: int) -> torch.nn.Module:
    """One update a step: the checkpoint of step v holds version v. Version 0 is the model before training."""
    if version:
        return restore(run, f"step-{version:06d}")[0]
    from trimtab.trainer.build_model import build_model

    loaded: LoadedModel = build_model(load_config(run / "config.toml"))
    return loaded.model.eval()


def test_an_absent_cluster_is_one_line_and_leaves_no_run(tmp_path: Path) -> None:
    config = load_config("laboratory", ["placement=ray", f"ray.address=127.0.0.1:{free_port()}"])
    with pytest.raises(TrimtabError, match=r"no Ray cluster at ray.address = '127.0.0.1:\d+' .*: start one with"):
        train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def started(cluster: Cluster, out: Path, *options: str) -> subprocess.Popen[str]:
    """The command, as far as the end of its first step."""
    sets = [*SMALL, f"ray.address={cluster.address}", "trainer.steps=500", "checkpoint.keep=2", *options]
    resume = ["--resume"] if out.exists() else []
    words = ["-m", "trimtab", "train", "laboratory", *(w for s in sets for w in ("--set", s)), "--out", out, *resume]
    return begin(words, "step ", env=os.environ, stderr=subprocess.STDOUT)


def everyone(cluster: Cluster) -> list[psutil.Process]:
    return [process for kind in ("TrainerRank", "EngineActor") for process in cluster.actors(kind)]


def test_however_a_run_ends_no_actor_stays_and_the_next_command_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"

    driver = started(cluster, out, "ray.trainers=2")
    actors = everyone(cluster)
    assert len(actors) == 3
    cluster.actors("TrainerRank")[1].kill()
    output = driver.communicate()[0]
    assert driver.returncode == 2
    assert re.search(r"trainer rank [01] was lost .* --resume", output)
    assert "Traceback" not in output
    assert not psutil.wait_procs(actors, timeout=60)[1]

    for number, trainers in ((signal.SIGINT, 1), (signal.SIGTERM, 2)):
        driver = started(cluster, out, "checkpoint.every=0", f"ray.trainers={trainers}")
        actors = everyone(cluster)
        assert len(actors) == trainers + 1
        driver.send_signal(number)
        assert "continue with: " in driver.communicate()[0]
        assert driver.returncode == 128 + number
        assert not psutil.wait_procs(actors, timeout=60)[1]
        last = read_metrics(out / "metrics.jsonl")[-1]["step"]
        assert list_checkpoints(out / "checkpoints")[-1].name == f"step-{last:06d}"

    driver = started(cluster, out)
    actors = everyone(cluster)
    assert len(actors) == 2
    driver.kill()
    driver.communicate()
    assert not psutil.wait_procs(actors, timeout=60)[1]
    steps = [row["step"] for row in read_metrics(out / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 3


def test_episodes_over_rollout_actors(cluster: Cluster, tmp_path: Path) -> None:
    """Each turn is a message of the actor that samples; the environments are in the trainer's process."""
    places = [f"ray.address={cluster.address}", "ray.engines=2", "ray.start_timeout=90"]
    sets = ["placement=ray", "trainer.steps=2", "trainer.prompts=4", "trainer.samples=4", "eval.problems=4"]
    config = load_config("laboratory-tools", [*sets, *places, "log.trajectories_every=1", "checkpoint.every=0"])
    run = train(config, out=tmp_path / "run", observer=NullObserver()).run
    logged = read_metrics(run / "metrics.jsonl")
    assert [row["episode/failed"] for row in logged] == [0, 0]
    assert all(row["mismatch/k3"] < 0.05 for row in logged)
    # A call in the last turn is counted and not made.
    assert 0 < check_episodes(run) <= sum(row["episode/calls"] * 16 for row in logged)
    assert not everyone(cluster)
