"""The Llama family (Llama, Mistral, Qwen2, Qwen3) with fewer matrix products, on the model's own weights.

Query, key and value projections are one product, and so are the two input projections of the gated MLP. A mixture of
experts runs through the model's own module. The caller supplies attention (`shared_prompt_decoder.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeSparseMoeBlock

from trimtab.trainer.models.matmul import FastLinear, InferenceLinear, product_dtype

# Exact classes: a subclass may compute something else.
FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)
# Rotary types whose angles depend on the position alone and not on the length of the longest sequence so far.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")

# (scaled queries, keys, values) of one layer -> its attention output, (tokens, heads * head size)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# Packed weights of one batch of rows take at most this many bytes; larger models use their weights as they are.
PACKED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class _GatedMLP:
    """The dense MLP with its two input projections fused."""

    gate_up: InferenceLinear
    down: InferenceLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return self.down(self.activation(gate) * up)

    def packed(self, rows: int) -> _GatedMLP:
        return replace(self, gate_up=self.gate_up.packed(rows), down=self.down.packed(rows))


@dataclass(frozen=True, slots=True)
class _Experts:
    """The model's own mixture of experts, which needs a batch dimension."""

    mixture: nn.Module

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.mixture(hidden[None])[0]

    def packed(self, _rows: int) -> _Experts:
        return self


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parts of one transformer block; unless packed, weights are those of the model's own modules."""

    norm_in: nn.Module
    qkv: InferenceLinear
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    out: InferenceLinear
    norm_mid: nn.Module
    feed: _GatedMLP | _Experts

    def packed(self, rows: int) -> _Layer:
        return replace(self, qkv=self.qkv.packed(rows), out=self.out.packed(rows), feed=self.feed.packed(rows))


@dataclass(slots=True, eq=False)
class Captures:
    """What lets the next CUDA graph reuse the memory of the last one: that graph, and the stream of all captures."""

    graph: torch.cuda.CUDAGraph | None = None
    stream: torch.cuda.Stream | None = None


def supports(model: Any) -> bool:
    """Whether `FusedLlama` computes exactly what this model's own forward computes."""
    if type(model) not in FAMILY or model.config.rope_parameters["rope_type"] not in FIXED_ROTARY:
        return False
    # Adapters and quantization replace the linear layers by modules that compute more than a product with `weight`.
    parts = [part for block in model.model.layers for part in (*block.self_attn.children(), *block.mlp.children())]
    return all(
        type(part) in (nn.Linear, FastLinear) for part in (*parts, model.lm_head) if hasattr(part, "in_features")
    )


class FusedLlama:
    """Runs the blocks of a model whose parameters are moved, in place, into fused storage.

    The model itself keeps working, and both use the same storage.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self.layers = [_fuse_layer(block) for block in model.model.layers]
        self.head: Callable[[Tensor], Tensor] = model.lm_head
        self.cache_dtype = product_dtype(model.lm_head.weight)  # of queries, keys and values
        self.kv_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // config.num_key_value_heads
        self.size: int = model.model.layers[0].self_attn.head_dim
        self.scaling: float = model.model.layers[0].self_attn.scaling
        self.window: int | None = _window(config)
        self.captures = Captures()
        self.is_dense = all(isinstance(layer.feed, _GatedMLP) for layer in self.layers)

    def packed(self, rows: int) -> FusedLlama:
        """Returns a copy with weights packed for products of about `rows` rows; it does not follow later updates.

        Packing takes as long as decoding a few tokens, so it is repeated for every batch, and no stale weight is used.
        """
        if sum(weight.numel() for weight in self.model.parameters()) * self.cache_dtype.itemsize > PACKED_BYTES:
            return self
        result = copy.copy(self)
        result.layers = [layer.packed(rows) for layer in self.layers]
        result.head = InferenceLinear(self.model.lm_head.weight, self.model.lm_head.bias).packed(rows)
        return result

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines, and sines signed for `_rotate`, both (tokens, heads + kv heads, head size).

        Those of the queries are multiplied by the attention scale, so that it needs no separate product.
        """
        embedding = self.model.model.embed_tokens.weight
        # Float32 until the scale is applied: the model's own forward rounds once, too.
        cos, sin = (
            x[0]
            for x in self.model.model.rotary_emb(embedding.new_empty(0, dtype=torch.float32), positions.unsqueeze(0))
        )
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[:, :half], sin[:, half:]], -1)
        scale = cos.new_ones(self.kv_heads * self.group + self.kv_heads, 1)
        scale[: self.kv_heads * self.group] = self.scaling
        return (cos.unsqueeze(1) * scale).to(embedding.dtype), (signed.unsqueeze(1) * scale).to(embedding.dtype)

    def run(self, tokens: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Returns the hidden states after the last block and before the final norm, (tokens, width)."""
        heads = self.kv_heads * self.group
        hidden = F.embedding(tokens, self.model.model.embed_tokens.weight)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.norm_in(hidden)).view(len(tokens), -1, self.size)
            if layer.norm_q is not None and layer.norm_k is not None:
                qkv[:, :heads] = layer.norm_q(qkv[:, :heads])
                qkv[:, heads : -self.kv_heads] = layer.norm_k(qkv[:, heads : -self.kv_heads])
            query, key = _rotate(qkv[:, : -self.kv_heads], rotary).to(self.cache_dtype).split([heads, self.kv_heads], 1)
            attended = attend(i, query, key, qkv[:, -self.kv_heads :].to(self.cache_dtype))
            hidden = hidden + layer.out(attended.to(hidden.dtype))
            hidden = hidden + layer.feed(layer.norm_mid(hidden))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.model.model.norm(hidden))


def _rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rotary embedding to (tokens, heads, head size). The half-swap is a roll; its sign is in the sines."""
    cos, signed_sin = rotary
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), signed_sin)


def _window(config: Any) -> int | None:
    """Returns the sliding window of the model in tokens, or None if all its layers use full attention."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) == {"full_attention"}:
        return None
    return getattr(config, "sliding_window", None)


def _fuse_layer(block: Any) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    return _Layer(
        norm_in=block.input_layernorm,
        qkv=_fuse(attention.q_proj, attention.k_proj, attention.v_proj),
        norm_q=getattr(attention, "q_norm", None),
        norm_k=getattr(attention, "k_norm", None),
        out=InferenceLinear(attention.o_proj.weight, attention.o_proj.bias),
        norm_mid=block.post_attention_layernorm,
        feed=_Experts(mlp) if isinstance(mlp, Qwen3MoeSparseMoeBlock) else _gated(mlp),
    )


def _gated(mlp: Any) -> _GatedMLP:
    down = InferenceLinear(mlp.down_proj.weight, mlp.down_proj.bias)
    return _GatedMLP(_fuse(mlp.gate_proj, mlp.up_proj), down, mlp.act_fn)


def _fuse(*parts: nn.Linear) -> InferenceLinear:
    """Concatenates linear layers of one input; the modules' own parameters become views of the result."""
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    start = 0
    for part in parts:
        stop = start + part.out_features
        part.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return InferenceLinear(weight, bias)
