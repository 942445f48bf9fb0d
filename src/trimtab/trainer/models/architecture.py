"""The model families that can be trained, and the parts of their models: backbone, head, decoder layers.

A family is a `model_type` of transformers whose forward is `head(backbone(x))`, followed by at most
`config.final_logit_softcapping`. Other families scale logits or hidden states (Granite, Cohere): scoring them this way
would be silently wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.models.packed_attention import PACKED_IMPLEMENTATION

INVARIANT_IMPLEMENTATION = "trimtab-invariant"
"""Name of the attention of models with batch-invariant numerics."""


class Gates(NamedTuple):
    """How a mixture computes gates: a float32 softmax over all experts, then the values of the chosen experts.

    (A softmax over the chosen experts only is the same as renormalizing.)
    """

    router: str  # class name of the router in transformers
    renormalized: bool | None  # whether chosen gates are scaled to sum to 1; None: as `norm_topk_prob` says
    float32: bool  # whether gates stay float32; otherwise they get the dtype of the scores


class Family(NamedTuple):
    """What a family can do beyond training."""

    gates: Gates | None = None  # of a mixture of experts, whose routing can be replayed
    invariant: bool = False  # batch-invariant numerics (`models/invariant`)
    shared_prompts: bool = False  # whether `engines/embedded` can run a prompt once for all responses


FAMILIES = {
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(),
    "gpt2": Family(),
    "llama": Family(invariant=True, shared_prompts=True),
    "mistral": Family(shared_prompts=True),
    "mixtral": Family(Gates("MixtralTopKRouter", True, True)),
    "olmo2": Family(),
    "olmoe": Family(Gates("OlmoeTopKRouter", None, False)),
    "phi3": Family(),
    "qwen2": Family(invariant=True, shared_prompts=True),
    "qwen3": Family(invariant=True, shared_prompts=True),
    "qwen3_moe": Family(Gates("Qwen3MoeTopKRouter", None, False), shared_prompts=True),
    "smollm3": Family(),
}
MIXTURES = {name: family.gates for name, family in FAMILIES.items() if family.gates is not None}
INVARIANT = tuple(name for name, family in FAMILIES.items() if family.invariant)


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model: `logits = softcap * tanh(head / softcap)` with `head = backbone @ weight.T`."""

    backbone: nn.Module
    weight: Tensor  # (vocabulary, hidden)
    softcap: float | None
    invariant: bool = False  # whether the model uses `models/invariant`
    head: object = None  # the head module: its weight is another object while a sharded model is gathered


def check_architecture(kind: str, where: str = "") -> None:
    """Raises `TrimtabError` for a `model_type` that is not in `FAMILIES`; `where`: the start of the message."""
    if kind not in FAMILIES:
        raise TrimtabError(
            f"{where}cannot score architecture {kind!r}{did_you_mean(kind, FAMILIES)}: use a text model of "
            "a family in docs/models.md"
        )


def model_parts(model: Any) -> ModelParts:
    """Returns the parts of a causal language model; peft adapters inside its backbone are kept."""
    kind, attention = model.config.model_type, model.config._attn_implementation
    check_architecture(kind)
    if attention not in (PACKED_IMPLEMENTATION, INVARIANT_IMPLEMENTATION):
        raise TrimtabError(
            f"attention {attention!r} cannot read packed rows: call "
            f"model.set_attn_implementation({PACKED_IMPLEMENTATION!r}), as trimtab.trainer.models.load does"
        )
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise TrimtabError(
            f"the head of this {kind!r} model is a {type(head).__name__}, not a plain linear layer without bias; "
            "leave the head out of adapters and quantisation"
        )
    return ModelParts(
        backbone=model.base_model,
        weight=head.weight,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        invariant=is_invariant(model),
        head=head,
    )


def is_invariant(model: Any) -> bool:
    """Whether a model computes by `models/invariant`."""
    return model.config._attn_implementation == INVARIANT_IMPLEMENTATION


class DecoderStack(NamedTuple):
    """The decoder layers in order, and the norms that follow the last layer."""

    layers: tuple[nn.Module, ...]
    final_norms: tuple[nn.Module, ...]
    dtype: torch.dtype  # of the model's own residual stream, given by its embedding


def decoder_stack(model: Any) -> DecoderStack:
    """Returns the decoder layers of a model of `FAMILIES`: the only list in its backbone."""
    check_architecture(model.config.model_type)
    parts = list(model.base_model.children())
    [layers] = (part for part in parts if isinstance(part, nn.ModuleList))
    return DecoderStack(
        layers=tuple(layers),
        final_norms=tuple(part for part in parts if is_norm(part)),
        dtype=model.get_input_embeddings().weight.dtype,
    )


def is_norm(module: nn.Module) -> bool:
    """Whether all parameters of a module are vectors: scales and shifts of channels."""
    shapes = [parameter.ndim for parameter in module.parameters()]
    return bool(shapes) and max(shapes) <= 1


def is_block(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: attention, a feed-forward network, a linear layer."""
    return any(parameter.ndim > 1 for parameter in module.parameters())
