"""Norms of decoder layers by PyTorch's fused kernel, which starts one operation in place of eight.

On a CPU, where starting an operation costs little, transformers' own are as fast and stay.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

# Exact classes that compute `weight * x / sqrt(mean(x^2) + variance_epsilon)`.
_CLASSES = {
    *(LlamaRMSNorm, MistralRMSNorm, MixtralRMSNorm, OlmoeRMSNorm, Phi3RMSNorm),
    *(Qwen2RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm, SmolLM3RMSNorm),
}
# Their output is read by linear layers alone, which would each round it to autocast's dtype.
_BEFORE_PRODUCTS = ("input_layernorm", "post_attention_layernorm")


class FusedRMSNorm(nn.Module):
    """transformers' RMSNorm by one operation, in float32. If `narrow`, the result has autocast's dtype."""

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
        if type(module) in _CLASSES:
            module.__class__ = FusedRMSNorm
            vars(module)["narrow"] = name.rsplit(".", 1)[-1] in _BEFORE_PRODUCTS
