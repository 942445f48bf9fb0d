"""Whole runs with `numerics = "invariant"`: the mismatch is exactly zero, and one that is not stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import forked
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trimtab.errors import TrimtabError
from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import METRICS
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.run import train

pytestmark = pytest.mark.slow

INVARIANT = "numerics=invariant"
MIXED = ["engine.dtype=bfloat16", "model.autocast=bfloat16"]
SMALL = ["trainer.steps=3", "trainer.prompts=6", "trainer.samples=4", "eval.problems=8", "log.trajectories_every=1"]


def run(out: Path, *sets: str, recipe: str = "laboratory", **keywords: Any) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    train(load_config(recipe, [*SMALL, *sets]), out=out, **keywords)
    return read_metrics(out / METRICS)


def assert_exact(rows: list[dict[str, Any]]) -> None:
    assert rows
    for row in rows:
        assert row["mismatch/abs_diff_max"] == row["mismatch/k3"] == 0.0
        assert row["mismatch/confirmed"] == row["mismatch/tokens"] > 100
    assert len({row["optim/grad_norm"] for row in rows}) == len(rows)  # it does learn


@pytest.mark.parametrize("sets", [MIXED, []], ids=["bfloat16", "float32"])
def test_a_run_has_no_mismatch_at_all(tmp_path: Path, sets: list[str]) -> None:
    assert_exact(run(tmp_path / "invariant", INVARIANT, *sets))
    native = run(tmp_path / "native", *sets)
    assert all(row["mismatch/k3"] > 0 for row in native)
    assert "mismatch/confirmed" not in native[0]


@pytest.mark.parametrize(
    "sets",
    [
        ["engine.workers=1"],
        ["model.gradient_checkpointing=true", "sampling.top_p=0.9", "sampling.temperature=0.7"],
        ["trainer.minibatches=2", "trainer.epochs=2"],
        ["trainer.micro_batch_tokens=60"],
    ],
    ids=["worker", "checkpointing", "minibatches", "cut groups"],
)
def test_neither_however_it_is_run(tmp_path: Path, sets: list[str]) -> None:
    assert_exact(run(tmp_path / "run", INVARIANT, *MIXED, *sets))


@pytest.mark.parametrize(
    "sets",
    [
        ["objective.name=soup", "objective.clip_high=0.28"],
        ["objective.name=token-alp", "diagnose.every=1"],
        ["trainer.max_lag=2", "trainer.in_flight=continue"],
    ],
    ids=["prefixes", "noise", "lag"],
)
def test_what_was_sampled_under_the_same_weights_is_equal(tmp_path: Path, sets: list[str]) -> None:
    """Tokens of older weights differ; `BitwiseCheck` compares the others, and would stop the run."""
    rows = run(tmp_path / "run", INVARIANT, *MIXED, *sets, recipe="laboratory")
    assert sum(row["mismatch/confirmed"] for row in rows) > 100


def test_one_native_operation_stops_the_run(tmp_path: Path) -> None:
    """In float32: rounding to bfloat16 would hide most of what transformers' norm does otherwise."""

    def engines(*arguments: Any) -> Any:
        [engine] = build_engines(*arguments)
        assert isinstance(engine, EmbeddedEngine)
        engine._model.model.layers[1].input_layernorm.__class__ = LlamaRMSNorm
        return [engine]

    with pytest.raises(TrimtabError, match="log-probs are not the sampler's bit for bit"):
        run(tmp_path / "run", INVARIANT, engines=engines)


@pytest.mark.timeout(300)
def test_two_ranks_score_the_bits_of_one(python: forked.Run, tmp_path: Path) -> None:
    sets = [*SMALL, INVARIANT, *MIXED, "trainer.steps=2"]
    run(tmp_path / "one", *sets)
    changes = [f"--set={entry}" for entry in sets]
    done = python("-m", "trimtab", "train", "laboratory", "--out", tmp_path / "two", *changes, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_exact(read_metrics(tmp_path / "two" / METRICS))
    one, two = (trajectories.read(tmp_path / name / "trajectories" / "step-000001.parquet") for name in ("one", "two"))
    for alone, shared in zip(one, two, strict=True):
        np.testing.assert_array_equal(alone.logp_proximal, shared.logp_proximal)


def test_an_architecture_without_invariant_numerics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="covers llama"):
        run(tmp_path / "run", INVARIANT, "model.path=laboratory-moe")
