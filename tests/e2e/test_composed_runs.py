"""Objectives of parts, and presets that read more than log-probs, in the real loop."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.support.run_results import undocumented, untimed

from trimtab.objectives.lookup import from_section
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e

COMPOSED = """
base = "laboratory"
description = "token weights, a band of the sequence ratio over the current policy, a veto"
[objective]
name = "composed"
surrogate = {kind = "clipped", high = 0.28}
weight = {level = "token", bound = "clip", min = 0.5, max = 2.0}
aggregation = "seq-mean-token-mean"
[[objective.mask]]
kind = "band"
level = "sequence"
min = 0.9
max = 1.1
over = "current"
[[objective.mask]]
kind = "veto"
of = "probability"
"""
SMALL = ("trainer.steps=4", "trainer.prompts=4", "trainer.samples=4", "trainer.minibatches=2", "eval.problems=4")
FAST = ("optim.lr=1e-3", "optim.warmup=0")
RUNS: dict[str, tuple[str, ...]] = {
    "composed": (),
    "score-centering": ("sampling.top_logprobs=8", "trainer.sync_every=4"),
}


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    recipe = folder.parent / "mine.toml"
    recipe.write_text(COMPOSED if name == "composed" else 'base = "laboratory"\ndescription = "small"\n')
    named = () if name == "composed" else (f"objective.name={name}",)
    train(load_config(recipe, [*named, *SMALL, *FAST, *RUNS.get(name, ()), *overrides]), out=folder)
    return untimed(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("whole") / "run" for name in RUNS}
    for name, folder in folders.items():
        run(folder, name)
    return folders


def test_a_composed_run_writes_down_what_it_trained(whole: dict[str, Path]) -> None:
    folder = whole["composed"]
    rows = untimed(folder)
    assert undocumented(key for row in rows for key in row) == []
    saved = tomllib.loads((folder / "config.toml").read_text())["objective"]
    built = from_section(load_config(folder.parent / "mine.toml").objective.model_dump())
    assert from_section(saved) == built
    last = rows[-1]
    assert 0 < last["reject/band_sequence"] < 1
    assert last["reject/veto"] == 0
    assert last["mismatch/anchor"] == "proximal"


@pytest.mark.parametrize(
    ("name", "overrides", "without_signal"),
    [("flash-reinforce", (), 0), ("grpo", ("advantage.kind=batch-mean",), 0), ("grpo", (), 4)],
)
def test_groups_have_signal_where_the_whole_batch_is_compared(
    name: str, overrides: tuple[str, ...], without_signal: int, tmp_path: Path
) -> None:
    # One update of the warm start: all responses are wrong.
    rows = run(tmp_path / "run", name, "trainer.steps=1", "sft.steps=1", *overrides)
    assert [(row["groups/no_signal"], row["groups/sampled"]) for row in rows] == [(without_signal, 4)]


def test_centering_reads_the_head_of_the_sampler(whole: dict[str, Path]) -> None:
    rows = untimed(whole["score-centering"])
    assert all(0.9 < row["centering/head_mass"] <= 1.001 for row in rows)
    assert all(row["mismatch/anchor"] == "current" for row in rows)
