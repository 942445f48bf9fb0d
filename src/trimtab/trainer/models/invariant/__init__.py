"""Batch-invariant numerics: each token gets the same bits whatever else is in the batch.

`make_invariant` changes a transformers model of the Llama family so that products, norms, activations, attention and
head are computed by the modules of this package: classes are exchanged, parameters and names stay. Sampler and trainer
then run the same forward, so that log-probs of the same token under the same weights are bitwise equal: alone or in a
batch, padded or packed, in parallel or token by token from a cache, with or without gradient, on one thread or several.
Each file documents how its operation depends on the batch, and how that is avoided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trimtab.errors import TrimtabError
from trimtab.trainer.models.architecture import INVARIANT
from trimtab.trainer.models.invariant.invariant_attention import INVARIANT_IMPLEMENTATION  # registers it
from trimtab.trainer.models.invariant.invariant_layers import (
    InvariantEmbedding,
    InvariantLinear,
    InvariantRMSNorm,
    InvariantSiLU,
)
from trimtab.trainer.models.matmul import FastLinear

# Rotary types whose angles depend on the longest text in the batch.
LENGTH_DEPENDENT = ("dynamic", "longrope")

# Exact classes: a subclass may compute something else.
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: InvariantLinear,
    FastLinear: InvariantLinear,
    nn.Embedding: InvariantEmbedding,
    LlamaRMSNorm: InvariantRMSNorm,
    Qwen2RMSNorm: InvariantRMSNorm,
    Qwen3RMSNorm: InvariantRMSNorm,
    nn.SiLU: InvariantSiLU,
    SiLUActivation: InvariantSiLU,
}


def make_invariant(model: Any) -> None:
    """Makes `model`, a transformers causal language model of `INVARIANT`, batch-invariant in place.

    Rotary embeddings are not replaced: their product has one term, and `cos` and `sin` run the same code for all
    numbers.
    """
    _check(model)
    for module in model.base_model.modules():
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
    model.set_attn_implementation(INVARIANT_IMPLEMENTATION)


def _check(model: Any) -> None:
    config, name = model.config, type(model).__name__
    reason = ""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in INVARIANT:
        reason = f"covers {', '.join(INVARIANT)}, not {config.model_type!r}"
    elif set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        reason = f"has no sliding windows, {name} has"
    elif rope in LENGTH_DEPENDENT:
        reason = f"has no {rope!r} rotary angles, which depend on the longest text of a batch"
    elif torch.backends.cuda.matmul.allow_tf32:  # rotary angles are float32 products
        reason = "needs float32 products as they are: switch torch.backends.cuda.matmul.allow_tf32 off"
    elif model.get_output_embeddings().bias is not None:
        reason = f"has no bias in the head, {name} has"
    for path, module in model.base_model.named_modules():
        known = type(module) in _CLASSES or path.endswith("rotary_emb") or any(True for _ in module.children())
        reason = reason or ("" if known else f"does not know {type(module).__name__}, as which {name} has {path}")
    if reason:
        raise TrimtabError(f'numerics = "invariant" {reason}: use numerics = "native"')


def is_invariant(model: Any) -> bool:
    return model.config._attn_implementation == INVARIANT_IMPLEMENTATION
