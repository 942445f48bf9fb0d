"""Low-rank adapters (peft), and weights with merged adapters in full precision under the base model's names."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from trimtab.errors import TrimtabError, first_line
from trimtab.trainer.models.sharding import full_tensor, is_sharded, shared_parameters

_BASE = ".base_layer"


def add_lora(model: nn.Module, *, rank: int, alpha: int, targets: str | Sequence[str]) -> nn.Module:
    """Freezes `model` and injects trainable low-rank adapters (peft) in place; returns the same module tree.

    `targets`: names of modules, or `all-linear`. Raises `TrimtabError` if the model has none of them.
    """
    import peft

    target = targets if isinstance(targets, str) else list(targets)
    adapters = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=target, lora_dropout=0.0)
    try:
        wrapped = peft.get_peft_model(model, adapters)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise TrimtabError(f"model.lora.targets = {targets!r}: {first_line(error)}") from None
    if next(model.parameters()).dtype == torch.float32:  # also the dtype of the adapters
        for layer in wrapped.modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.cast_input_dtype_enabled = False  # it would widen what autocast then rounds again
    return wrapped.get_base_model()


def save_adapter(model: Any, folder: Path, base: str) -> None:
    """Writes the adapters of `add_lora` in peft's format. `base`: name of the model that they were trained on."""
    config = copy.copy(model.peft_config["default"])
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    config.save_pretrained(folder)
    weights = {
        f"base_model.model.{name.replace('.default', '')}": weight.contiguous()
        for name, weight in model.state_dict().items()
        if ".lora_" in name
    }
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


@torch.no_grad()
def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every weight, with adapters merged, under the name it has without adapters.

    The merge does not modify the model: peft's merge followed by unmerge is not exact in floating point and would
    slowly change the frozen base. Weights of a sharded model are gathered one at a time: every rank must iterate over
    all of them, and a tied one is yielded once.
    """
    deltas = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    again = shared_parameters(model)
    for name, weight in model.state_dict().items():
        if ".lora_" in name or (is_sharded(weight) and name in again):
            continue
        plain = name.replace(_BASE, "")
        adapted: Any = deltas.get(plain) if _BASE in name else None
        merged = weight if adapted is None else weight + adapted.get_delta_weight("default").to(weight.dtype)
        yield plain, full_tensor(merged)
