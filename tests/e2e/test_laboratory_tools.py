"""The laboratory in several turns: one step of the recipe, with and without a perturbation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.turns import check_episodes

from trimtab.runs.trajectories import read
from trimtab.trainer.config import load_config
from trimtab.trainer.environments.formats import Call
from trimtab.trainer.environments.swap_environment import SwapEnvironment
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e

# Rows of three digits: a short warm start solves some of them.
ROWS = ("task.digits=3", "task.min_swaps=1", "task.holdout=100", "sft.steps=55")
SMALL = (
    *ROWS,
    "trainer.steps=1",
    "trainer.prompts=4",
    "trainer.samples=4",
    "eval.problems=4",
    "log.trajectories_every=1",
)


@pytest.mark.parametrize("changes", [[], ["objective.name=seq-alp", "perturbation.layers=0-2", "engine.quantize=int4"]])
def test_a_step_calls_the_tool_and_trains(tmp_path: Path, changes: list[str]) -> None:
    run = train(load_config("laboratory-tools", [*SMALL, *changes]), out=tmp_path / "run", observer=NullObserver()).run
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["episode/calls"] > 0
    assert row["episode/tool_errors"] == row["episode/failed"] == 0
    assert 0 < row["reward/mean"] < 1
    assert row["optim/grad_norm"] > 0
    assert check_episodes(run) > 0


class EveryTurnCalls:
    """Takes every turn for a call, as a model that is not trained writes none."""

    stop = ("=",)

    def parse(self, text: str) -> Call | None:
        del text
        return Call("swap", "12")

    def render(self, result: str) -> str:
        return result or "0"


def test_replayed_experts_and_sampling_masks_go_on_over_turns(tmp_path: Path) -> None:
    changes = ("model.path=laboratory-moe", "sft.steps=5", "routing.replay=rollout", "sampling.top_k=4")
    forced = (f"environment.format={__name__}:EveryTurnCalls", "environment.max_turn_tokens=6")
    config = load_config("laboratory-tools", [*SMALL, *changes, *forced, "objective.entropy_coef=0.01"])
    run = train(config, out=tmp_path / "run", observer=NullObserver()).run
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["episode/calls"] > 0
    assert row["episode/failed"] == row["trajectories/dropped"] == 0
    assert row["optim/grad_norm"] > 0
    assert row["routing/agreement"] == 1.0
    assert row["mismatch/k3"] < 1e-10, "the experts and the ids of every token are those of its own position"
    [file] = (run / "trajectories").iterdir()
    assert max(int(one.trajectory.completion.turn[-1]) for one in read(file)) > 0


class LongRows(SwapEnvironment):
    """Every other row is followed by a text that no context of the model holds."""

    numbers = itertools.count()

    def reset(self, **row: Any) -> str | None:
        super().reset(**row)
        return "1234" * 400 if next(self.numbers) % 2 else None


def test_prompts_that_do_not_fit_the_context_cost_their_episodes(tmp_path: Path) -> None:
    config = load_config("laboratory-tools", SMALL)
    run = train(config, environment=LongRows, out=tmp_path / "run", observer=NullObserver()).run
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["episode/failed"] == row["trajectories/dropped"] == 8
