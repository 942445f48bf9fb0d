"""With rounded weights in the trainer's forward, a quantized sampler has the mismatch of an exact one, in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.run_results import untimed, weights

from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.weight_quantization import BITS, quantize
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e
SMALL = ("trainer.prompts=4", "trainer.samples=4", "trainer.steps=3", "trainer.minibatches=2", "eval.problems=4")


def run(out: Path, *changes: str) -> list[dict[str, Any]]:
    train(load_config("laboratory", [*SMALL, *changes]), out=out)
    return untimed(out)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_the_mismatch_of_rounding_is_gone(bits: str, tmp_path: Path) -> None:
    without = run(tmp_path / "without", f"engine.quantize={bits}")
    both = run(tmp_path / "both", f"engine.quantize={bits}", "model.quantized_forward=true")
    for left, right in zip(without, both, strict=True):
        assert right["mismatch/k3"] < 1e-9 < 1e-6 < left["mismatch/k3"]
    assert both[0]["optim/grad_norm"] > 0
    for name, saved in weights(tmp_path / "both").items():
        if "_proj" in name:
            assert not torch.equal(quantize(saved, BITS[bits]), saved), f"{name} was saved rounded"
