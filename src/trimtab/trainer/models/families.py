"""The model families that can be trained, and what else each of them can do: one table.

A family is a `model_type` of transformers whose forward is `head(backbone(x))`, followed by at most
`config.final_logit_softcapping`. Others scale logits or hidden states (Granite, Cohere): scoring them this way would be
silently wrong.
"""

from __future__ import annotations

from typing import NamedTuple


class Gates(NamedTuple):
    """How a mixture computes gates: softmax of the scores over all experts in float32, then the chosen ones.

    (A softmax over the chosen experts only is the same as renormalizing.)
    """

    router: str  # its class in transformers
    renormalized: bool | None  # the chosen gates sum to 1; None: `norm_topk_prob` says so
    float32: bool  # gates stay float32; else they take the type of the scores


class Family(NamedTuple):
    """What a family can do beyond training."""

    gates: Gates | None = None  # of a mixture of experts, whose routing can be replayed
    invariant: bool = False  # batch-invariant numerics (`models/invariant`)
    shared_prompts: bool = False  # sampled by the decoder that runs a prompt once for all its responses


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
