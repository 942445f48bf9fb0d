"""What files of newer versions compute: FlashREINFORCE in TRL and Miles, and score centering in Miles.

The pinned peers do not have them. The functions run as they are, from copies of these files in one folder; what their
imports bring is not used in one process, and is replaced by empty names:

    corrections.py               radixark/miles 347a58e6, miles/backends/training_utils/loss/hub/
    score_centering.py           radixark/miles 857598ff, miles/backends/training_utils/loss_hub/
    flash_reinforce_trainer.py   behroozazarkhalili/trl 5ba8d621, a fork of TRL, trl/experimental/flash_reinforce/
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from generate import Batch, Recording, each, with_gradient

VERSIONS = {
    "miles/corrections": "347a58e690ac9d7257b473e5870d64179fee4994",
    "miles/score_centering": "857598ff816b12e6cb53484d03b8bed278b70b06",
    "trl/flash_reinforce": "5ba8d62112b64f3d338ec11516831db7a57af00f",
}
THRESHOLDS = (3e-3, 0.02)
CENTERING: dict[str, dict[str, Any]] = {"none": {"mode": "none"}, "tis-2": {"mode": "tis", "tis_clip": 2.0}}
PLACE = "trl.experimental.flash_reinforce"


def load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"{path} is missing: see the first lines of {Path(__file__).name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_imports() -> None:
    """Empty modules for the imports that the files have and these functions do not use."""
    parents = ("miles", "miles.backends", "miles.backends.training_utils", "miles.backends.training_utils.data")
    for name in (*parents, "miles.utils", "miles.utils.ft_utils", PLACE):
        sys.modules[name] = ModuleType(name)
    names = {
        "miles.backends.training_utils.data.context_parallel": "get_local_response_loss_masks",
        "miles.backends.training_utils.parallel": "ParallelState",
        "miles.utils.ft_utils.process_group_utils": "GroupInfo",
        f"{PLACE}.flash_reinforce_config": "FlashREINFORCEConfig",
    }
    for name, attribute in names.items():
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], attribute, lambda _totals, _lengths, masks, *_: masks)


def record(batches: dict[str, Batch], folder: Path) -> Recording:
    name_imports()
    region = load(folder / "corrections.py", "miles_corrections").binary_kl_trust_region_function
    centered = load(folder / "score_centering.py", "miles_score_centering").score_centering_loss
    trainer = load(folder / "flash_reinforce_trainer.py", f"{PLACE}.flash_reinforce_trainer").FlashREINFORCETrainer
    recording = Recording({**VERSIONS, "torch": torch.__version__})
    for name, batch in each(batches):
        for delta in THRESHOLDS:
            for peer, loss in (("miles", partial(miles_loss, region)), ("trl", partial(trl_loss, trainer))):
                value, gradient = with_gradient(partial(loss, batch, delta), batch["current"])
                recording.add(f"{peer}/flash-{delta:g}", name, {"delta": delta}, loss=value, gradient=gradient)
        for case, call in CENTERING.items():
            recording.add(f"miles/centering-{case}", name, call, **centering(centered, batch, call))
    return recording


def miles_loss(region: Any, batch: Batch, delta: float, logp: torch.Tensor) -> torch.Tensor:
    """REINFORCE of each token through the trust region, as a mean over tokens and then over responses."""
    rows, time = logp.shape
    masks = list(batch["mask"].double())
    loss, _, _ = region(
        SimpleNamespace(use_tis=True, qkv_format="thd", tis_binary_kl_threshold=delta),
        pg_loss=(-batch["advantage"] * logp).reshape(-1),
        train_log_probs=list(logp.detach()),
        rollout_log_probs=list(batch["behavior"]),
        loss_masks=masks,
        total_lengths=[time] * rows,
        response_lengths=[time] * rows,
        parallel_state=SimpleNamespace(cp=SimpleNamespace(size=1)),
    )
    mask = batch["mask"].double()
    return ((loss.view(rows, time) * mask).sum(1) / mask.sum(1)).mean()


def trl_loss(trainer: Any, batch: Batch, delta: float, logp: torch.Tensor) -> torch.Tensor:
    ids = torch.zeros(logp.shape, dtype=torch.long)
    stand_in = SimpleNamespace(
        args=SimpleNamespace(delta=delta),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        use_vllm=True,
        rollout_func=None,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, batch["entropy"], None),
    )
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": batch["mask"].long(),
        "advantages": batch["advantage"][:, 0],
        "sampling_per_token_logps": batch["behavior"],
    }
    return trainer._compute_loss(stand_in, None, inputs)


def centering(loss: Any, batch: Batch, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The mean over the tokens and its gradients, with the five most probable of nine ids as the head."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(*batch["mask"].shape, 9, generator=generator)
    moved = logits + 0.3 * torch.randn(logits.shape, generator=generator)
    heads = [values.log_softmax(-1)[..., :5].double().requires_grad_() for values in (moved, logits)]
    logp = batch["current"].clone().requires_grad_()
    mask = batch["mask"]
    values, _ = loss(
        logp.reshape(-1),
        heads[0].reshape(-1, 5),
        batch["behavior"].reshape(-1),
        heads[1].reshape(-1, 5),
        torch.ones(mask.numel(), 5, dtype=torch.bool),
        batch["advantage"].expand(mask.shape).reshape(-1),
        **call,
    )
    value = (values.view(mask.shape) * mask).sum() / mask.sum()
    gradients = torch.autograd.grad(value, [logp, heads[0]])
    names = ("loss", "gradient", "head_gradient", "head_current", "head_behavior")
    return dict(zip(names, (value.detach(), *gradients, *heads), strict=True))
