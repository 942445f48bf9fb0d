"""Small mixtures of experts: every expert computes every token, and the weights of those not chosen are zero.

transformers gathers the tokens of each expert, which pays where experts are large. Experts of a few thousand weights
cost more to gather for than to run: two products over all experts at once take a fraction of the time, and the result
and its gradients are the same sums (a zero weight adds exactly nothing, and no gradient passes through it).
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trimtab.models.products import linear

IMPLEMENTATION = "trimtab"

# Weights of all experts of a layer; larger ones are left to transformers.
SMALL = 1 << 18


def use_in(model: Any) -> None:
    """Let the experts of a transformers model compute here, if it has any and all are small."""
    experts = [part for part in model.modules() if _is_supported(part)]
    if experts and all(part.gate_up_proj.numel() + part.down_proj.numel() <= SMALL for part in experts):
        model.set_experts_implementation(IMPLEMENTATION)


def _is_supported(part: nn.Module) -> bool:
    """Gate and up projections one after the other, (outputs, inputs), without biases: what `all_experts` computes."""
    flags = ("has_gate", "is_concatenated", "has_bias", "is_transposed")
    return tuple(getattr(part, flag, None) for flag in flags) == (True, True, False, False)


def all_experts(
    experts: Any,
    hidden_states: Float[Tensor, "tokens width"],
    top_k_index: Int[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens width"]:
    """The weighted sum of the chosen experts' outputs; the signature is transformers' own."""
    count, width = experts.num_experts, hidden_states.shape[-1]
    share = top_k_weights.new_zeros(len(hidden_states), count).scatter(1, top_k_index, top_k_weights)
    inner = experts._apply_gate(linear(hidden_states, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (count, -1)))
    weighted = (inner * share.to(inner.dtype).unsqueeze(-1)).flatten(1)
    return linear(weighted, experts.down_proj.transpose(0, 1).reshape(width, -1))


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, all_experts)
