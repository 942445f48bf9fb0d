"""Batch-invariant numerics: each token gets the same bits whatever else is in the batch.

`make_invariant` changes a transformers model of the Llama family so that products, norms, activations, attention and
head are computed by the modules of this package: classes are exchanged, parameters and names stay. Sampler and trainer
then run the same forward, so that log-probs of the same token under the same weights are bitwise equal: alone or in a
batch, padded or packed, in parallel or token by token from a cache, with or without gradient, on one thread or several.
Each file documents how its operation depends on the batch, and how that is avoided; this file has the layers.

Elementwise CPU kernels compute vectors, but the last few numbers of a tensor, and of each thread's share, one by one
with different code. Sums, products, quotients and roots are correctly rounded by both; `exp`, `log`, `sin` and `cos`
run the same code for all. `sigmoid`, `silu`, `logaddexp`, and `rsqrt` in bfloat16 run different code, so they are not
used here. The order of a sum over the last dimension does not depend on the number of rows.
tests/e2e/test_invariant_logprobs.py checks both on the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trimtab.errors import TrimtabError
from trimtab.trainer.models.architecture import INVARIANT
from trimtab.trainer.models.invariant.invariant_attention import INVARIANT_IMPLEMENTATION  # registers it
from trimtab.trainer.models.invariant.kernels import row_kernels, use_triton
from trimtab.trainer.models.matmul import (
    MULTIPLE,
    FastLinear,
    linear_by,
    packed_alike,
    pad_rows,
    tiled_linear,
    tiled_product,
)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of products: autocast's if it is enabled, else the dtype of the weights."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype == torch.float32:
        return torch.get_autocast_dtype(device)
    return weight.dtype


def batch_invariant_matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """Returns `a @ b.T`; the bits of each row do not depend on the other rows. It has no gradient."""
    if use_triton(a):
        return row_kernels.batch_invariant_matmul(a, b)
    return tiled_product(pad_rows(a, MULTIPLE), b)[: len(a)]


_packed: ContextVar[Mapping[nn.Module, Tensor]] = ContextVar("packed", default=MappingProxyType({}))


def pack_weight(weight: Tensor) -> Tensor:
    """Returns a copy of a weight in the layout that `batch_invariant_matmul` multiplies fastest, or the weight."""
    return weight if use_triton(weight) else packed_alike(weight)


def pack_layers(model: nn.Module) -> dict[nn.Module, Tensor]:
    """Returns copies of the weights of all `InvariantLinear` inside, in the layout that is multiplied fastest."""
    layers = [module for module in model.modules() if isinstance(module, InvariantLinear)]
    return {layer: pack_weight(layer.weight.detach().to(compute_dtype(layer.weight))) for layer in layers}


@contextmanager
def use_packed(weights: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Makes layers multiply by these packed weights inside, if no gradient is needed."""
    token = _packed.set(weights)
    try:
        yield
    finally:
        _packed.reset(token)


class InvariantLinear(nn.Linear):
    """`nn.Linear` whose rows do not depend on each other, with weights rounded to the dtype of `compute_dtype`."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(self.weight)
        if torch.is_autocast_enabled(input.device.type):
            with torch.autocast(input.device.type, enabled=False):
                return self._compute(input, dtype)
        return self._compute(input, dtype)

    def _compute(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        copy = None if torch.is_grad_enabled() else _packed.get().get(self)
        states, weight = input.to(dtype), self.weight.to(dtype) if copy is None else copy
        if use_triton(states):
            result = linear_by(row_kernels.batch_invariant_matmul, states, weight, None)
        else:
            result = tiled_linear(states, weight)
        return result if self.bias is None else result + self.bias.to(dtype)


class InvariantEmbedding(nn.Embedding):
    """`nn.Embedding` with rows rounded to the dtype of `compute_dtype`. Its output is float32 or wider."""

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input).to(compute_dtype(self.weight))
        return rows.to(torch.promote_types(rows.dtype, torch.float32))


def add_exponentials(total: Float[Tensor, " tokens"], logits: Float[Tensor, "tokens words"]) -> Tensor:
    """Returns `logaddexp(total, logsumexp(logits))`, by functions that compute all elements with the same code."""
    if use_triton(logits):
        return row_kernels.add_exponentials(total, logits)
    peak = torch.maximum(total, logits.amax(-1))
    mass = (total - peak).exp() + (logits - peak[:, None]).exp_().sum(-1)
    return peak + mass.log()


CHUNK = 1 << 18  # elements: temporaries of this size stay in a core's cache


class InvariantRMSNorm(nn.Module):
    """transformers' RMSNorm (`weight`, `variance_epsilon`), computed and returned in float32 or wider."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight.to(compute_dtype(self.weight))
        if use_triton(hidden_states):
            return row_kernels.rms_norm(hidden_states, weight, self.variance_epsilon)
        states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        spread = (states.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt().reciprocal()
        return states * spread * weight.to(states.dtype)


class InvariantSiLU(nn.Module):
    """x / (1 + exp(-x)), rounded once."""

    def forward(self, input: Tensor) -> Tensor:
        return _SiLU.apply(input) if torch.is_grad_enabled() else _silu(input)


def _silu(states: Tensor) -> Tensor:
    if use_triton(states):
        return row_kernels.silu(states)
    result = torch.empty_like(states, memory_format=torch.contiguous_format)
    for part, out in zip(states.reshape(-1).split(CHUNK), result.view(-1).split(CHUNK), strict=True):
        exact = part.to(torch.promote_types(states.dtype, torch.float32))
        out.copy_(exact.div(exact.neg().exp_().add_(1)))
    return result


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        return _silu(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        [states] = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0], states)


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

    Rotary embeddings are not replaced: their product has one term; `cos` and `sin` run the same code for all numbers.
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
    elif rope in ("dynamic", "longrope"):
        reason = f"has no {rope!r} rotary angles, which depend on the longest text of a batch"
    elif torch.backends.cuda.matmul.allow_tf32:  # rotary angles are float32 products
        reason = "needs float32 products as they are: switch torch.backends.cuda.matmul.allow_tf32 off"
    for path, module in model.base_model.named_modules():
        known = type(module) in _CLASSES or path.endswith("rotary_emb") or any(True for _ in module.children())
        reason = reason or ("" if known else f"does not know {type(module).__name__}, as which {name} has {path}")
    if reason:
        raise TrimtabError(f'numerics = "invariant" {reason}: use numerics = "native"')
