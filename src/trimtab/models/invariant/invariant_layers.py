"""Norms and activations whose bits do not depend on a number's position in a tensor.

Elementwise kernels on a CPU treat the last few numbers of a tensor, and of each thread's share, one by one, with other
code than the vectors before them. Sums, products, quotients and roots are exact to the last bit in both; `exp`, `log`,
`sin` and `cos` run the same code for all. `sigmoid`, `silu` and `logaddexp` do not, nor does `rsqrt` in bfloat16, so
nothing here uses them (`benchmarks/invariant_rows.py`). A sum over the last dimension has an order of its own for each
row, whatever the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trimtab.models.invariant.kernels.device import uses_kernels
from trimtab.models.invariant.linear import computing

PART = 1 << 18  # numbers: temporaries of that size stay in a core's cache


class InvariantRMSNorm(nn.Module):
    """transformers' RMSNorm (`weight`, `variance_epsilon`), computed and returned in float32 or wider."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight.to(computing(self.weight))
        if uses_kernels(hidden_states):
            from trimtab.models.invariant.kernels import autograd

            return autograd.rms_norm(hidden_states, weight, self.variance_epsilon)
        states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        spread = (states.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt().reciprocal()
        return states * spread * weight.to(states.dtype)


class InvariantSiLU(nn.Module):
    """x / (1 + exp(-x)), rounded once."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _silu(input)
        result: Any = _SiLU.apply(input)
        return result


def _silu(states: Tensor) -> Tensor:
    if uses_kernels(states):
        from trimtab.models.invariant.kernels import row_kernels

        return row_kernels.silu(states)
    result = torch.empty_like(states, memory_format=torch.contiguous_format)
    for part, into in zip(states.reshape(-1).split(PART), result.view(-1).split(PART), strict=True):
        wide = part.to(torch.promote_types(states.dtype, torch.float32))
        into.copy_(wide.div(wide.neg().exp_().add_(1)))
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
