"""Training on an accelerator gives the CPU's numbers, and waits for the device where it must only.

They run on a GPU where there is one, elsewhere on the pretended device.

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
import torch

pytestmark = pytest.mark.slow

HAS_GPU = torch.cuda.is_available()
on_devices = pytest.mark.parametrize(
    "device",
    [
        # PyTorch's backward expects streams of every device where it has a GPU.
        pytest.param("pretended", marks=pytest.mark.skipif(HAS_GPU, reason="needs PyTorch without a GPU")),
        pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")),
    ],
)

SIZES = ("trainer.steps=2", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8")

RUNS: dict[str, tuple[str, ...]] = {
    "references": ("objective.name=grpo", "objective.kl_coef=0.1"),
    "noise": ("objective.name=token-alp", "trainer.minibatches=2", "trainer.max_lag=2"),
    "noise on logits": ("objective.name=token-alp", "perturbation.layers=logits", "perturbation.std=0.01"),
    "adapters": ("objective.name=seq-mis-seq-ratio", "model.lora.rank=4", "model.autocast=bfloat16"),
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
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "programs" / "device_worker.py"), *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process, which imports torch once, has done on the device."""
    out = tmp_path_factory.mktemp("devices")
    return worker("cuda" if HAS_GPU else "pretended", str(out), "everything", *SIZES, *RUNS["references"])


@on_devices
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device(name: str, device: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Weights as on the CPU up to rounding; no waits in micro-batches, few an update, one a token of decoding."""
    if name == "references":
        result = request.getfixturevalue("everything")["run"]
    else:
        result = worker(device, str(tmp_path), "laboratory", *SIZES, *RUNS[name])
    counts = result["counts"]
    print(name, counts)
    # Noise is drawn by the device's own generator, and bfloat16 rounds larger differences.
    assert result["weights"] < {"noise": 1e-3, "noise on logits": 1e-3, "adapters": 1e-3}.get(name, 2e-6)
    reward = [[row["reward/mean"] for row in result["rows"][side]] for side in ("cpu", "device")]
    assert reward[0] == reward[1]
    if name != "experts" or device == "pretended":  # transformers' experts wait on a GPU
        assert counts.get("micro-batch", 0) == 0, result["micro"]
    # The sum of losses, the norm of the gradient and the check of the new weights; with noise also its sigmas.
    per_update = 6 if name.startswith("noise") else 3
    assert counts["update"] == per_update * UPDATES.get(name, 2)
    if name == "noise":  # its engine is another process
        assert "token" not in counts
        return
    # Two steps and two greedy evaluations of at most 11 tokens: one copy for each token of a batch.
    assert 4 < counts["token"] <= 4 * 11
    if name in PER_CALL and device == "pretended":  # a GPU also waits for each copy to it: of draws and prompts
        # Half of the tokens are sampled: the sampling mask of each is two more copies.
        more = counts["token"] if name == "top-p" else 0
        assert counts["generation"] <= 4 * PER_CALL[name] + more


@on_devices
def test_waits_of_updates_do_not_grow_with_micro_batches(device: str, tmp_path: Path) -> None:
    one, many = (
        worker(device, str(tmp_path / size), "laboratory", *SIZES, f"trainer.micro_batch_tokens={size}")["counts"]
        for size in ("4096", "64")
    )
    parts = one if device == "pretended" else ("update", "micro-batch")  # a GPU waits for each copy to it
    assert {part: one.get(part) for part in parts} == {part: many.get(part) for part in parts}


@on_devices
def test_a_run_is_resumed_exported_and_evaluated_on_the_device(device: str, tmp_path: Path) -> None:
    sizes = ("trainer.steps=4", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8", "checkpoint.every=2")
    result = worker(device, str(tmp_path), "continued", *sizes, "model.lora.rank=4", "objective.name=token-alp")
    assert result["rows"][0] == result["rows"][1]
    assert result["equal"] == {"model": True, "optimizer": True}
    here, there = result["accuracy"]
    assert here == there > 0


@on_devices
def test_every_preset_on_the_device(device: str, everything: Any) -> None:
    """Loss and gradients have the CPU's bits (a GPU's sums another order), and nothing waits for the device."""
    results = everything["presets"]
    assert len(results) > 40
    bound = 0 if device == "pretended" else 1e-15
    assert {
        name: result for name, result in results.items() if not result["difference"] <= bound or result["waits"]
    } == {}


def test_a_token_outside_its_sampling_mask_is_nan_on_the_device(everything: Any) -> None:
    assert everything["outside"] == [[False, True, False]]


@pytest.mark.skipif(HAS_GPU, reason="needs PyTorch without a GPU")
def test_operations_on_two_devices_are_refused(everything: Any) -> None:
    """The pretended device refuses what a GPU refuses, so that the runs above mean something."""
    assert everything["refusals"] == [
        "aten.add.Tensor: expected all tensors to be on the same device, found ['cpu', 'pretended:0']",
        "a tensor of the pretended device has no NumPy array: use .cpu()",
    ]
