"""Kernels with gradients, for the trainer's forward.

The backwards are PyTorch's products and sums. They need not be invariant, because only the trainer computes gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.models.invariant.kernels import matmul_kernel, row_kernels


def linear(states: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
    """Returns `states @ weight.T` by `batch_invariant_matmul`, with gradient. Both have the same dtype."""
    result: Any = _Linear.apply(states, weight)
    return result


def rms_norm(
    states: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], epsilon: float
) -> Float[Tensor, "*batch width"]:
    """Returns `row_kernels.rms_norm` (float32), with gradient."""
    result: Any = _RMSNorm.apply(states, weight, epsilon)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        rows = states.reshape(-1, states.shape[-1])
        return matmul_kernel.batch_invariant_matmul(rows, weight).view(*states.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        to_states = (grad @ weight).view_as(states) if ctx.needs_input_grad[0] else None
        to_weight = grad.T @ states.reshape(-1, states.shape[-1]) if ctx.needs_input_grad[1] else None
        return to_states, to_weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.epsilon = epsilon
        return row_kernels.rms_norm(states, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, weight = ctx.saved_tensors
        scale = (states.float().square().mean(-1, keepdim=True) + ctx.epsilon).rsqrt()
        normal = states.float() * scale
        inner = grads[0] * weight.float()
        to_states = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        to_weight = (grads[0] * normal).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return to_states.to(states.dtype), to_weight, None
