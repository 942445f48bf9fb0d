"""A running log-sum-exp with the same bits per row whatever the other rows."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.models.invariant.kernels.device import uses_kernels


def add_exponentials(total: Float[Tensor, " tokens"], logits: Float[Tensor, "tokens words"]) -> Tensor:
    """`logaddexp(total, logsumexp(logits))` from functions without a scalar tail (`layers.py`)."""
    if uses_kernels(logits):
        from trimtab.models.invariant.kernels import head_kernel

        return head_kernel.add_exponentials(total, logits)
    peak = torch.maximum(total, logits.amax(-1))
    mass = (total - peak).exp() + (logits - peak[:, None]).exp_().sum(-1)
    return peak + mass.log()
