"""Computes the norms of decoder layers by PyTorch's fused kernel: one operation instead of eight.

It is not used on a CPU: launching operations costs little there, and transformers' own norms are as fast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Families whose norms in transformers compute `weight * x / sqrt(mean(x^2) + variance_epsilon)`.
_FAMILIES = ("Llama", "Mistral", "Mixtral", "Olmoe", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")
_NAMES = {f"{family}RMSNorm" for family in _FAMILIES}
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
    """Changes the norms of known classes to `FusedRMSNorm` in place; parameters, names and hooks are unchanged."""
    for name, module in model.named_modules():
        if type(module).__name__ in _NAMES and type(module).__module__.startswith("transformers.models."):
            module.__class__ = FusedRMSNorm
            vars(module)["narrow"] = name.rsplit(".", 1)[-1] in _BEFORE_PRODUCTS
