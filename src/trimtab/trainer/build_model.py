"""Loads the models of a recipe, prepares them for training, and rebuilds them from the files of a run.

build_model       loads `model.path`; a laboratory model is warm-started on first use
prepare_model     training mode, gradient checkpointing, LoRA adapters, fused norms, shards of several ranks
save_model_files  config, generation config and tokenizer, for engines and exports
empty_model       a model built from these files; a checkpoint replaces its weights
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from trimtab.errors import TrimtabError, first_line
from trimtab.files import new_folder
from trimtab.trainer.config import LABORATORY_MODELS, Config
from trimtab.trainer.models import invariant
from trimtab.trainer.models.architecture import decoder_stack
from trimtab.trainer.models.load import LoadedModel, default_device, load
from trimtab.trainer.models.matmul import on_accelerator, use_fast_linear
from trimtab.trainer.models.sharding import apply_fsdp
from trimtab.trainer.ranks import current_ranks
from trimtab.trainer.seeds import derive
from trimtab.trainer.sft import laboratory_folder


def build_model(config: Config) -> LoadedModel:
    """Loads the trainable model in its master dtype; a laboratory model is warm-started on first use.

    With one process the model is moved to the device, where the embedded engine copies it. With several ranks only the
    leader loads weights, into CPU memory; `prepare_model` sends them to the other ranks.
    """
    path, ranks = config.model.path, current_ranks()
    if path in LABORATORY_MODELS:
        path = str(laboratory_folder(path, config))
    loaded = load(path, dtype=getattr(torch, config.model.dtype), weights=ranks.is_leader)
    if config.numerics == "invariant":
        invariant.make_invariant(loaded.model)
    if ranks.size == 1:
        loaded.model.to(default_device())  # pyright: ignore[reportArgumentType]
    return loaded


def prepare_model(model: nn.Module, config: Config) -> nn.Module:
    """Puts `model` into training mode, with the recipe's gradient checkpointing and LoRA adapters, and shards it.

    Changes the model in place. Call it before building the optimizer. Gradient checkpointing needs training mode;
    `load` has disabled dropout. With several ranks, all get the leader's weights, sharded as `[sharding]` says.
    """
    ranks, lora = current_ranks(), config.model.lora
    device = ranks.device or default_device()
    model.train()
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    if lora.rank:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # peft draws from the global generator
            torch.manual_seed(derive(config.seed, "adapters"))
            model = add_lora(model, **lora.model_dump())
        use_fast_linear(model.base_model)  # pyright: ignore[reportArgumentType]
    if on_accelerator(device) and config.numerics != "invariant":
        use_fused_norms(model)
    if config.model.compile:
        for layer in decoder_stack(model).layers:
            layer.compile(dynamic=True)
    if ranks.size > 1:
        from torch.distributed.device_mesh import init_device_mesh

        assert ranks.device is not None
        apply_fsdp(
            model,
            init_device_mesh(ranks.device.type, (ranks.size,)),
            compute=torch.bfloat16 if config.model.autocast == "bfloat16" else None,
            offload=config.sharding.offload,
            reshard=config.sharding.reshard,
        )
    return model


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


# Families whose norms in transformers compute `weight * x / sqrt(mean(x^2) + variance_epsilon)`.
_NORM_FAMILIES = ("Llama", "Mistral", "Mixtral", "Olmoe", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")
_NORMS = {f"{family}RMSNorm" for family in _NORM_FAMILIES}
# Norms whose output only linear layers read, each of which would round it to autocast's dtype.
_BEFORE_PRODUCTS = ("input_layernorm", "post_attention_layernorm")


class FusedRMSNorm(nn.Module):
    """transformers' RMSNorm as one operation in float32. If `narrow`, the result has autocast's dtype."""

    weight: nn.Parameter
    variance_epsilon: float
    narrow: bool

    def forward(self, hidden_states: Tensor) -> Tensor:
        device = hidden_states.device.type
        cast = torch.is_autocast_enabled(device)
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        with torch.autocast(device, enabled=False):
            result = F.rms_norm(
                hidden_states.to(dtype), self.weight.shape, self.weight.to(dtype), self.variance_epsilon
            )
        return result.to(torch.get_autocast_dtype(device)) if cast and self.narrow else result


def use_fused_norms(model: nn.Module) -> None:
    """Changes the norms of known classes to `FusedRMSNorm` in place; parameters, names and hooks are unchanged.

    For accelerators, which then start one operation instead of eight. On a CPU transformers' own norms are as fast.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in _NORMS and type(module).__module__.startswith("transformers.models."):
            module.__class__ = FusedRMSNorm
            vars(module)["narrow"] = name.rsplit(".", 1)[-1] in _BEFORE_PRODUCTS


def save_model_files(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the files that engines and `empty_model` need: config, generation config, tokenizer."""
    with new_folder(folder, replace=True) as temporary:
        model.config.save_pretrained(temporary)
        if model.generation_config is not None:
            # Not save_pretrained, which refuses generation settings that some published models have.
            model.generation_config.to_json_file(temporary / "generation_config.json")
        tokenizer.save_pretrained(temporary)


def empty_model(files: Path, config: Config, *, adapters: bool = False) -> PreTrainedModel:
    """Returns a model built from `files`, with LoRA adapters if `adapters`. Its weights (not buffers) are random."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(files, trust_remote_code=False),
            dtype=getattr(torch, config.model.dtype),
            trust_remote_code=False,
        )
        if adapters:
            add_lora(model, **config.model.lora.model_dump())
        return model
