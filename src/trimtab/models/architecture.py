"""The parts of a transformers causal language model that scoring needs: backbone, head, final transforms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trimtab.errors import TrimtabError, nearest
from trimtab.models.invariant.invariant_attention import IMPLEMENTATION as INVARIANT
from trimtab.models.packed_attention import IMPLEMENTATION

# Architectures whose forward is `head(backbone(x))`, with at most `config.final_logit_softcapping` after it. Others
# scale logits or hidden states in ways of their own (Granite, Cohere): scoring them this way would be silently wrong.
KNOWN = frozenset(
    {
        *("gemma", "gemma2", "gpt2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"),
        *("mixtral", "olmoe", "qwen3_moe"),
    }
)


@dataclass(frozen=True)
class Parts:
    """`logits = softcap * tanh(head / softcap)` with `head = backbone @ weight.T + bias`."""

    backbone: nn.Module
    weight: Tensor  # (vocabulary, hidden)
    bias: Tensor | None  # (vocabulary,)
    softcap: float | None
    packs: bool  # its attention reads a layout
    invariant: bool = False  # its numerics are those of `models/invariant`
    owner: object = None  # the head itself: a sharded model shows another weight while it is whole


def parts(model: Any) -> Parts:
    """Take a causal language model apart; peft adapters inside its backbone are kept.

    Raises `TrimtabError` for an architecture that is not in `KNOWN` or a head that is not a plain linear layer.
    """
    if hasattr(model, "get_base_model"):  # peft changes layers in place and wraps the model
        model = model.get_base_model()
    kind = model.config.model_type
    if kind not in KNOWN:
        raise TrimtabError(f"cannot score architecture {kind!r}{nearest(kind, KNOWN)}")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise TrimtabError(
            f"the head of this {kind!r} model is a {type(head).__name__}, not a plain linear layer; "
            "leave the head out of adapters and quantisation"
        )
    return Parts(
        backbone=model.base_model,
        weight=head.weight,
        bias=head.bias,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        packs=model.config._attn_implementation in (IMPLEMENTATION, INVARIANT),
        invariant=model.config._attn_implementation == INVARIANT,
        owner=head,
    )
