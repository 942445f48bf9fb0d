"""A fast decoding path for the Llama family (Llama, Mistral, Qwen2, Qwen3), on the model's own weights.

Three things make it fast, none of which changes the mathematics: query, key and value projections (and the two
input projections of the gated MLP) are one matrix product; the keys and values of a prompt are stored once and attended
by all its rows as one matrix product, instead of being read again for every row; and rows grow in lockstep, so their
own keys and values form a rectangle that needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from trimtab.rollout.decoder import prefill_blocks

# Exact classes: a subclass may compute something else.
FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
# Rotary kinds whose angles depend on the position alone, not on the longest text seen so far.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")

# Own keys and values are allocated for this many tokens at a time: a product with a contiguous block of keys, its
# unwritten end included, is two to four times as fast as one with a strided part of a large allocation.
BLOCK = 32

# (scaled queries, keys, values) of one layer -> its attention output, (tokens, heads * head size)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One transformer block's parts; `qkv` and `gate_up` are storage that the model's own parameters are views of."""

    norm_in: nn.Module
    qkv: Tensor
    qkv_bias: Tensor | None
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    out: nn.Linear
    norm_mid: nn.Module
    gate_up: Tensor
    gate_up_bias: Tensor | None
    act: Callable[[Tensor], Tensor]
    down: nn.Linear


def supports(model: Any) -> bool:
    """Whether `LeanModel` computes exactly what this model's own forward computes."""
    if type(model) not in FAMILY or model.config.rope_parameters["rope_type"] not in FIXED_ROTARY:
        return False
    # Adapters and quantization replace the linear maps by modules that compute more than their weight says.
    return all(
        type(part) is nn.Linear
        for block in model.model.layers
        for part in (*block.self_attn.children(), *block.mlp.children())
        if hasattr(part, "in_features")
    )


class LeanModel:
    """The blocks of a model whose parameters were moved, in place, into fused storage.

    The model itself keeps working, and writing to its parameters changes what is computed here.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self.layers = [_fuse_layer(block) for block in model.model.layers]
        self.kv_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // config.num_key_value_heads
        self.size: int = model.model.layers[0].self_attn.head_dim
        self.scaling: float = model.model.layers[0].self_attn.scaling
        self.window: int | None = _window(config)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines signed for `_rotate`: (tokens, heads + kv heads, head size).

        Those of the queries carry the attention scale, which then costs nothing.
        """
        embedding = self.model.model.embed_tokens.weight
        # Float32 until the scale is in: rounding twice would be one error more than the model's own forward makes.
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
        """Hidden states after the last block, (tokens, width), not yet normalised."""
        heads = self.kv_heads * self.group
        hidden = F.embedding(tokens, self.model.model.embed_tokens.weight)
        for i, layer in enumerate(self.layers):
            qkv = F.linear(layer.norm_in(hidden), layer.qkv, layer.qkv_bias).view(len(tokens), -1, self.size)
            if layer.norm_q is not None and layer.norm_k is not None:
                qkv[:, :heads] = layer.norm_q(qkv[:, :heads])
                qkv[:, heads : -self.kv_heads] = layer.norm_k(qkv[:, heads : -self.kv_heads])
            query, key = _rotate(qkv[:, : -self.kv_heads], rotary).split([heads, self.kv_heads], 1)
            hidden = hidden + layer.out(attend(i, query, key, qkv[:, -self.kv_heads :]))
            gate, up = F.linear(layer.norm_mid(hidden), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            hidden = hidden + layer.down(layer.act(gate) * up)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.model.model.norm(hidden))


class LeanDecoder:
    """See `decoder.Decoder`. `owner` (rows,) names each row's prompt; `capacity` bounds the tokens of a row."""

    def __init__(self, lean: LeanModel, prompts: Sequence[Tensor], owner: Tensor, capacity: int) -> None:
        self._lean = lean
        self._lengths = torch.tensor([len(ids) for ids in prompts], device=owner.device)
        self._prefill(prompts)
        self._capacity = capacity
        self._filled = 0
        like = self._prefix[0]
        self._own = [like.new_empty(len(lean.layers), len(owner), lean.kv_heads, 0, lean.size) for _ in range(2)]
        self._place(owner)

    def _prefill(self, prompts: Sequence[Tensor]) -> None:
        lean = self._lean
        weight = lean.model.model.embed_tokens.weight
        shape = (len(lean.layers), len(prompts), lean.kv_heads, int(self._lengths.max()), lean.size)
        # Zeros, not empty: padded places get no attention, but 0 * NaN would still be NaN.
        keys, values = weight.new_zeros(shape), weight.new_zeros(shape)
        last = weight.new_empty(len(prompts), weight.shape[1])
        for block in prefill_blocks(self._lengths.tolist()):
            index = torch.tensor(block, device=weight.device)
            width = int(self._lengths[index].max())
            tokens = torch.stack([F.pad(prompts[i], (0, width - len(prompts[i]))) for i in block])
            rows = len(block)

            def attend(i: int, q: Tensor, k: Tensor, v: Tensor, index=index, rows=rows, width=width) -> Tensor:
                q, k, v = (x.view(rows, width, -1, lean.size).transpose(1, 2) for x in (q, k, v))
                keys[i, index, :, :width], values[i, index, :, :width] = k, v
                # Padding is on the right, behind everything a real token may attend.
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
                return out.transpose(1, 2).reshape(rows * width, -1)

            positions = torch.arange(width, device=weight.device).repeat(rows)
            hidden = lean.run(tokens.view(-1), lean.rotary(positions), attend).view(rows, width, -1)
            last[index] = hidden[torch.arange(rows, device=weight.device), self._lengths[index] - 1]
        self._prefix = (keys, values)
        self.first = lean.logits(last)

    def _place(self, owner: Tensor) -> None:
        """Lay the rows out as (prompts still needed, most rows of one prompt), for attention to the prompts."""
        used, owner, counts = owner.unique(return_inverse=True, return_counts=True)
        if len(used) < len(self._lengths):
            self._lengths = self._lengths[used]
            self._prefix = (self._prefix[0][:, used], self._prefix[1][:, used])
        self._owner = owner
        self._grid = (len(used), int(counts.max()))
        nth = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        slot = owner * self._grid[1] + nth
        self._slot = None if len(owner) == self._grid[0] * self._grid[1] else slot
        places = torch.arange(self._prefix[0].shape[-2], device=owner.device)
        padding = places >= self._lengths.unsqueeze(-1)
        self._padding = padding[:, None, None] if bool(padding.any()) else None

    def keep(self, index: Tensor) -> None:
        """`index` must be ascending: rows of one prompt stay neighbors."""
        self._own = [slab[:, index] for slab in self._own]
        self._place(self._owner[index])

    def _grow(self) -> None:
        room = min(self._filled + BLOCK, self._capacity)
        for i, slab in enumerate(self._own):
            self._own[i] = slab.new_empty(*slab.shape[:3], room, slab.shape[-1])
            self._own[i][..., : self._filled, :] = slab

    def step(self, tokens: Tensor) -> Tensor:
        if self._filled == self._own[0].shape[-2]:
            self._grow()
        positions = self._lengths[self._owner] + self._filled
        hidden = self._lean.run(tokens, self._lean.rotary(positions), self._attend)
        self._filled += 1
        return self._lean.logits(hidden)

    def _attend(self, i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lean, end = self._lean, self._filled + 1
        keys, values = self._own[0][i], self._own[1][i]
        keys[:, :, self._filled], values[:, :, self._filled] = key, value
        rows = len(query)
        query = query.reshape(rows, lean.kv_heads, lean.group, lean.size)
        shared = self._to_grid(query) @ self._prefix[0][i].transpose(-1, -2)
        if self._padding is not None:
            shared.masked_fill_(self._padding, float("-inf"))
        own = query @ keys.transpose(-1, -2)
        # Softmax computes in float32 whatever the dtype, and rounds once.
        weights = torch.cat([self._to_rows(shared), own[..., :end]], -1).softmax(-1)
        split = shared.shape[-1]
        attended = self._to_rows(self._to_grid(weights[..., :split]) @ self._prefix[1][i])
        return (attended + weights[..., split:] @ values[:, :, :end]).reshape(rows, -1)

    def _to_grid(self, rows: Tensor) -> Tensor:
        """(rows, kv heads, group, x) -> (prompts, kv heads, most rows of a prompt * group, x)."""
        prompts, most = self._grid
        if self._slot is not None:
            grid = rows.new_zeros(prompts * most, *rows.shape[1:])
            grid[self._slot] = rows
            rows = grid
        return rows.view(prompts, most, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _to_rows(self, grid: Tensor) -> Tensor:
        """The inverse of `_to_grid`."""
        rows = grid.unflatten(2, (self._grid[1], self._lean.group)).transpose(1, 2).flatten(0, 1)
        return rows if self._slot is None else rows[self._slot]


def _rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of (tokens, heads, head size): the half-swap is a roll, its minus sign sits in the sines."""
    cos, signed_sin = rotary
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), signed_sin)


def _window(config: Any) -> int | None:
    """The sliding window of any layer, beyond which full attention is not what the model computes."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) == {"full_attention"}:
        return None
    return getattr(config, "sliding_window", None)


def _fuse_layer(block: Any) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
    return _Layer(
        norm_in=block.input_layernorm,
        qkv=qkv,
        qkv_bias=qkv_bias,
        norm_q=getattr(attention, "q_norm", None),
        norm_k=getattr(attention, "k_norm", None),
        out=attention.o_proj,
        norm_mid=block.post_attention_layernorm,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        act=mlp.act_fn,
        down=mlp.down_proj,
    )


def _fuse(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Join linear maps of one input; the modules' own parameters become views of the joint storage."""
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    start = 0
    for part in parts:
        stop = start + part.out_features
        part.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return weight, bias
