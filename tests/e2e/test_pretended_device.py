"""Training on a pretended accelerator gives the CPU's numbers, and waits for the device where it must only.

On a GPU each of these waits would leave it idle until the next operations are queued.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

SIZES = ("trainer.steps=2", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8")

RUNS: dict[str, tuple[str, ...]] = {
    "references": ("objective.name=grpo", "objective.kl_coef=0.1"),
    "noise": ("objective.name=token-alp", "trainer.minibatches=2", "trainer.max_lag=2"),
    "noise on logits": ("objective.name=token-alp", "perturbation.layers=logits", "perturbation.std=0.01"),
    "adapters": ("objective.name=seq-mis", "model.lora.rank=4", "model.autocast=bfloat16"),
    "invariant": ("objective.name=oapl", "numerics=invariant"),
    "top-p": ("sampling.top_p=0.9", "sampling.temperature=0.8"),
    "experts": ("model.path=laboratory-moe", "routing.replay=rollout"),
}
UPDATES = {"noise": 4}
"""Updates of a run, where they are not 2."""
PER_CALL = {"references": 14, "adapters": 14, "top-p": 14}
"""Waits of one call of `generate`, whatever its number of tokens."""


def worker(*arguments: str) -> Any:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "e2e" / "pretended_worker.py"), *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "references" else name for name in RUNS]
)
def test_a_run_on_the_device(name: str, tmp_path: Path) -> None:
    """Weights as on the CPU up to rounding; no waits in micro-batches, few an update, one a token of decoding."""
    result = worker(str(tmp_path), "laboratory", *SIZES, *RUNS[name])
    counts = result["counts"]
    print(name, counts)
    # Noise is drawn by the device's own generator, and bfloat16 rounds larger differences.
    assert result["weights"] < {"noise": 1e-3, "noise on logits": 1e-3, "adapters": 1e-3}.get(name, 2e-6)
    reward = [[row["reward/mean"] for row in result["rows"][device]] for device in ("cpu", "pretended")]
    assert reward[0] == reward[1]
    assert counts.get("micro-batch", 0) == 0, result["micro"]
    # The sum of losses, the norm of the gradient and the check of the new weights; with noise also its sigmas.
    per_update = 6 if name.startswith("noise") else 3
    assert counts["update"] == per_update * UPDATES.get(name, 2)
    if name == "noise":  # its engine is another process
        assert "token" not in counts
        return
    # Two steps and two greedy evaluations of at most 11 tokens: one copy for each token of a batch.
    assert 4 < counts["token"] <= 4 * 11
    if name in PER_CALL:
        # Half of the tokens are sampled: the sampling mask of each is two more copies.
        more = counts["token"] if name == "top-p" else 0
        assert counts["generation"] <= 4 * PER_CALL[name] + more


@pytest.mark.slow
def test_waits_do_not_grow_with_micro_batches(tmp_path: Path) -> None:
    one, many = (
        worker(str(tmp_path / size), "laboratory", *SIZES, f"trainer.micro_batch_tokens={size}")["counts"]
        for size in ("4096", "64")
    )
    assert one == many


@pytest.mark.slow
def test_a_run_is_resumed_exported_and_evaluated_on_the_device(tmp_path: Path) -> None:
    sizes = ("trainer.steps=4", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8")
    result = worker(
        str(tmp_path), "continued", *sizes, "checkpoint.every=2", "model.lora.rank=4", "objective.name=token-alp"
    )
    assert result["rows"][0] == result["rows"][1]
    assert result["equal"] == {"model": True, "optimizer": True}
    here, there = result["accuracy"]
    assert here == there > 0


def test_every_preset_on_the_device(tmp_path: Path) -> None:
    """Loss and gradients have the CPU's bits, and nothing waits for the device."""
    results = worker(str(tmp_path), "presets")
    assert len(results) > 40
    assert {name: result for name, result in results.items() if result["difference"] or result["waits"]} == {}


def test_a_token_outside_its_sampling_mask_is_nan_on_the_device(tmp_path: Path) -> None:
    assert worker(str(tmp_path), "outside") == [[False, True, False]]


def test_operations_on_two_devices_are_refused(tmp_path: Path) -> None:
    """The pretended device refuses what a GPU refuses, so that the runs above mean something."""
    assert worker(str(tmp_path), "refusals") == [
        "aten.add.Tensor: expected all tensors to be on the same device, found ['cpu', 'pretended:0']",
        "a tensor of the pretended device has no NumPy array: use .cpu()",
    ]
