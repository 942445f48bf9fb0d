"""A run with compiled decoder layers learns as one without, and its checkpoint has the same names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.run_results import untimed, weights
from torch._dynamo.utils import counters

from trimtab.trainer import run
from trimtab.trainer.config import load_config

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]


def test_compiled_layers_train_alike(tmp_path: Path) -> None:
    sizes = ["trainer.steps=2", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8"]
    plain, compiled = (
        run.train(load_config("laboratory", [*sizes, f"model.compile={flag}"]), out=tmp_path / flag).run
        for flag in ("false", "true")
    )
    here, there = weights(plain), weights(compiled)
    assert here.keys() == there.keys()
    moved = max((here[name] - there[name]).abs().max() for name in here)
    assert moved < 1e-3  # bfloat16 rounds elsewhere; AdamW moves a weight by up to its rate in a step
    for one, other in zip(untimed(plain), untimed(compiled), strict=True):
        assert other["mismatch/k3"] == pytest.approx(one["mismatch/k3"], abs=1e-3)
    assert counters["stats"]["unique_graphs"] > 0
