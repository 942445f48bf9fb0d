"""Whole runs on real vLLM: the laboratory, stopped and resumed, with the canary at every step; episodes with a tool."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.run_results import undocumented
from tests.support.vllm_support import needs_vllm

from trimtab.cli.doctor import vllm
from trimtab.runs.directory import read_metrics
from trimtab.runs.trajectories import read
from trimtab.trainer.config import load_config
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train
from trimtab.trainer.sandbox.python_pool import sandbox_unavailable

pytestmark = [pytest.mark.slow, needs_vllm]

SETS = ["engine.type=vllm", "engine.vllm.memory=0.05", "eval.problems=16", "eval.every=0", "checkpoint.every=2"]


def test_a_run_and_its_continuation_agree_with_the_trainer_at_every_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(load_config("laboratory", [*SETS, "trainer.steps=4"]), out=out, observer=NullObserver())
    train(load_config("laboratory", [*SETS, "trainer.steps=6"]), out=out, observer=NullObserver(), resume=True)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row in rows:
        # Both sides compute in float32: a weight that was not taken over would be seen at once.
        assert row["mismatch/k3"] < 1e-9
        assert row["policy_version"] == row["step"]
        assert row["canary/abs_diff"] < 1e-4
        assert not undocumented(row)
    assert rows[-1]["reward/mean"] > 0.2


@pytest.mark.skipif(sandbox_unavailable("monty") is not None, reason="pydantic-monty is not installed beside vLLM")
def test_turns_of_a_run_begin_in_the_prefix_cache(tmp_path: Path) -> None:
    shown = [
        f"Question: {a} * {b} =\nAnswer: <python>{a} * {b}</python><output>{a * b}</output> {a * b}\n\n"
        for a, b in ((412, 739), (127, 856))
    ]
    sets = [f"environment.instructions={json.dumps(''.join(shown))}", "trainer.prompts=2", "trainer.steps=1"]
    sets += ["trainer.samples=4"]
    config = load_config("quickstart-tools-vllm", [*sets, "eval.problems=2"])
    train(config, out=tmp_path / "run", observer=NullObserver())
    [row] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["episode/calls"] > 0.3
    assert row["mismatch/k3"] < 0.01
    trajectories = [one.trajectory for one in read(tmp_path / "run" / "trajectories" / "step-000001.parquet")]
    sent = sum(len(one.prompt.ids) + begin for one in trajectories for begin in turn_starts(one.completion.sampled))
    assert row["tokens/prefilled"] < 0.5 * sent


def turn_starts(sampled: np.ndarray) -> list[int]:
    """The number of tokens before each turn: what a request for it sends, without the prompt."""
    return np.flatnonzero(sampled & ~np.concatenate([[False], sampled[:-1]])).tolist()


def test_the_doctor_finds_this_vllm_sound() -> None:
    found = vllm()
    assert found.status == "ok"
    assert found.detail.endswith("works")
