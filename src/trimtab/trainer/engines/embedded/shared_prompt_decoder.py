"""Batched decoding of the Llama family: the keys of a prompt are stored and read once for all its samples.

All rows of a prompt attend to its keys in one matrix product, instead of reading them again for every row. Rows are
decoded in lockstep, so the keys and values of their responses form a rectangle, whose unwritten end is masked. Prefixes
of different lengths are right-aligned in that rectangle, and its left edge is then masked too. A GPU replays the
operations of one token as one CUDA graph: launching each kernel by itself takes several times as long.

`LlamaBlocks` runs the model's own modules except for attention, which `SharedPromptDecoder` supplies. On a CPU with one
thread it is between 2.3 times (bundled model) and 1.4 times (laboratory model) as fast as `decoder.CachedDecoder`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from trimtab.errors import TrimtabWarning
from trimtab.trainer.engines.embedded.decoder import ExpertRecorder, PrefillPlan, PromptGrid, prefill_blocks
from trimtab.trainer.models.architecture import FAMILIES, Family
from trimtab.trainer.models.matmul import FastLinear, inference_linear, on_accelerator, packed_weight, product_dtype

# Rotary types whose angles depend on the position alone and not on the length of the longest sequence so far.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
# Packed weights of one batch of rows take at most this many bytes; larger models use their weights as they are.
PACKED_BYTES = 2 << 30
# Keys and values of responses are allocated for this many tokens at a time: a product with a contiguous block of keys,
# its unwritten end included, is two to four times as fast as one with a strided part of a large allocation. Each
# allocation needs another CUDA graph, whose capture takes as long as a few tokens: a GPU uses larger blocks.
BLOCK, BLOCK_ON_ACCELERATOR = 32, 256
# The first tokens after a change of the batch are run without a graph: the batch may change again, and a capture must
# not load kernels or create handles (so never 0).
EAGER_STEPS = 3

# (scaled queries, keys, values) of one layer -> its attention output, (tokens, heads * head size)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True, eq=False)
class Captures:
    """The last CUDA graph, whose memory the next graph reuses, and the stream of all captures."""

    graph: torch.cuda.CUDAGraph | None = None
    stream: torch.cuda.Stream | None = None


def supports(model: Any) -> bool:
    """Returns whether `LlamaBlocks` computes exactly what this model's own forward computes."""
    config = model.config
    if not FAMILIES.get(config.model_type, Family()).shared_prompts:
        return False
    # The exact class: a subclass may compute something else.
    exact = type(model) is MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not exact or config.rope_parameters["rope_type"] not in FIXED_ROTARY:
        return False
    # Adapters and quantization replace the linear layers by modules that compute more than a product with `weight`.
    parts = [part for block in model.model.layers for part in (*block.self_attn.children(), *block.mlp.children())]
    return all(
        type(part) in (nn.Linear, FastLinear) for part in (*parts, model.lm_head) if hasattr(part, "in_features")
    )


class LlamaBlocks:
    """Runs the layers of a model that `supports` accepts, without gradient. The caller supplies the attention."""

    def __init__(self, model: Any) -> None:
        config, attention = model.config, model.model.layers[0].self_attn
        self.model = model
        self.layers = model.model.layers
        self.cache_dtype = product_dtype(model.lm_head.weight)  # of queries, keys and values
        self.kv_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // config.num_key_value_heads
        self.size: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.window: int | None = _window(config)
        self.captures = Captures()
        self.is_dense = not any(isinstance(block.mlp, Qwen3MoeSparseMoeBlock) for block in self.layers)
        # Linear layers with the same input -> their packed weight and their bias, both concatenated.
        self._packed: Mapping[tuple[Any, ...], tuple[Tensor, Tensor | None]] = {}

    def packed(self, rows: int) -> LlamaBlocks:
        """Returns a copy with weights packed for products of about `rows` rows; later updates do not change it.

        Linear layers with the same input are packed as one. Packing takes only as long as decoding a few tokens, so it
        is repeated for every batch, and no stale weight is used. In float32 a step of 8 rows is 1.8 times as fast.
        """
        if sum(weight.numel() for weight in self.model.parameters()) * self.cache_dtype.itemsize > PACKED_BYTES:
            return self
        result, packed = copy.copy(self), {}
        for layers in self._linear_layers():
            biases = [layer.bias for layer in layers if layer.bias is not None]
            weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
            packed[layers] = packed_weight(weight, rows), torch.cat(biases) if biases else None
        result._packed = packed
        return result

    def _linear_layers(self) -> Iterator[tuple[Any, ...]]:
        """Yields tuples of linear layers with the same input; the layers of experts are left out."""
        yield (self.model.lm_head,)
        for block in self.layers:
            attention, mlp = block.self_attn, block.mlp
            yield from ((attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,))
            if not isinstance(mlp, Qwen3MoeSparseMoeBlock):
                yield from ((mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))

    def _linear(self, layers: tuple[Any, ...], states: Tensor) -> Tensor:
        """Returns the concatenated outputs of `layers` for the same input `states`."""
        if layers in self._packed:
            return inference_linear(states, *self._packed[layers])
        parts = [inference_linear(states, layer.weight, layer.bias) for layer in layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines, and sines signed for `_rotate`, both (tokens, heads + kv heads, head size).

        The values for query heads are multiplied by the attention scale, which saves a separate product.
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
        for i, block in enumerate(self.layers):
            attention, states = block.self_attn, block.input_layernorm(hidden)
            qkv = self._linear((attention.q_proj, attention.k_proj, attention.v_proj), states)
            qkv = qkv.view(len(tokens), -1, self.size)
            if hasattr(attention, "q_norm"):
                qkv[:, :heads] = attention.q_norm(qkv[:, :heads])
                qkv[:, heads : -self.kv_heads] = attention.k_norm(qkv[:, heads : -self.kv_heads])
            query, key = _rotate(qkv[:, : -self.kv_heads], rotary).to(self.cache_dtype).split([heads, self.kv_heads], 1)
            attended = attend(i, query, key, qkv[:, -self.kv_heads :].to(self.cache_dtype))
            hidden = hidden + self._linear((attention.o_proj,), attended.to(hidden.dtype))
            hidden = hidden + self._feed_forward(block.mlp, block.post_attention_layernorm(hidden))
        return hidden

    def _feed_forward(self, mlp: Any, states: Tensor) -> Tensor:
        if isinstance(mlp, Qwen3MoeSparseMoeBlock):
            return mlp(states[None])[0]  # it needs a batch dimension
        gate, up = self._linear((mlp.gate_proj, mlp.up_proj), states).chunk(2, -1)
        return self._linear((mlp.down_proj,), mlp.act_fn(gate) * up)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._linear((self.model.lm_head,), self.model.model.norm(hidden))


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


class SharedPromptDecoder:
    """Decodes one batch with a `LlamaBlocks` (see `decoder.Decoder`).

    `capacity` is the largest number of steps; `recorder` receives the routed experts of the prefill.
    """

    def __init__(
        self, model: LlamaBlocks, starts: PrefillPlan, capacity: int, recorder: ExpertRecorder | None = None
    ) -> None:
        self._model, self._recorder = model, recorder
        self._block = BLOCK_ON_ACCELERATOR if on_accelerator(starts.row.device) else BLOCK
        # Routers of experts and their recorder synchronize with the device, which is impossible in a CUDA graph.
        self._use_graphs = starts.row.is_cuda and recorder is None and model.is_dense
        self._lengths = torch.tensor([len(ids) for ids in starts.prompts], device=starts.row.device)
        prefix_lengths = torch.tensor([len(ids) for ids in starts.prefixes], device=starts.row.device)
        self._filled = int(prefix_lengths.max())
        self._capacity = self._filled + capacity
        self.prefilled = int(self._lengths.sum()) + int(prefix_lengths.sum())
        last = self._prefill(starts.prompts)[starts.prompt]
        self._responses = self._prefill_prefixes(starts, prefix_lengths, last)
        self.first = model.logits(last)[starts.row]
        self._set_left_edge(self._filled - prefix_lengths[starts.row])
        self._group_by_prompt(starts.prompt[starts.row])

    def _prefill(self, prompts: Sequence[Tensor]) -> Tensor:
        """Stores the prompts' keys and values; returns the hidden state after each prompt, (prompts, width)."""
        model = self._model
        weight = model.model.model.embed_tokens.weight
        shape = (len(model.layers), len(prompts), model.kv_heads, int(self._lengths.max()), model.size)
        # Zeros, not empty: padding gets no attention, but 0 * NaN would still be NaN.
        keys, values = (weight.new_zeros(shape, dtype=model.cache_dtype) for _ in range(2))
        last = weight.new_empty(len(prompts), weight.shape[1])
        for block in prefill_blocks(self._lengths.tolist()):
            index = torch.tensor(block, device=weight.device)
            width = int(self._lengths[index].max())
            tokens = torch.stack([F.pad(prompts[i], (0, width - len(prompts[i]))) for i in block])
            rows = len(block)

            def attend(i: int, q: Tensor, k: Tensor, v: Tensor, index=index, rows=rows, width=width) -> Tensor:
                q, k, v = (x.view(rows, width, -1, model.size).transpose(1, 2) for x in (q, k, v))
                keys[i, index, :, :width], values[i, index, :, :width] = k, v
                # Padding is on the right, where causal attention of real tokens does not reach.
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
                return out.transpose(1, 2).reshape(rows * width, -1)

            positions = torch.arange(width, device=weight.device).repeat(rows)
            hidden = model.run(tokens.view(-1), model.rotary(positions), attend).view(rows, width, -1)
            last[index] = hidden[torch.arange(rows, device=weight.device), self._lengths[index] - 1]
            if self._recorder is not None:
                columns = torch.arange(width, device=weight.device)
                self._recorder.prompts(block, columns < self._lengths[index].unsqueeze(-1))
        self._prompts = (keys, values)
        return last

    def _prefill_prefixes(self, starts: PrefillPlan, prefix_lengths: Tensor, last: Tensor) -> list[Tensor]:
        """Returns keys and values of the right-aligned prefixes by row; writes the last hidden states to `last`."""
        model, width = self._model, self._filled
        like = self._prompts[0]
        shape = (len(model.layers), len(prefix_lengths), model.kv_heads, width, model.size)
        slabs = [like.new_zeros(shape), like.new_zeros(shape)]
        longest = int(self._lengths.max())
        nonempty = prefix_lengths.nonzero().squeeze(-1)
        for block in prefill_blocks(prefix_lengths[nonempty].tolist(), before=longest):
            index = nonempty[block]
            last[index] = self._prefill_block(starts, index, prefix_lengths[index], slabs)
        return [slab[:, starts.row] for slab in slabs]

    def _prefill_block(self, starts: PrefillPlan, index: Tensor, prefix_lengths: Tensor, slabs: list[Tensor]) -> Tensor:
        """Runs the prefixes at `index`, each attending to its prompt and itself; returns their last hidden states."""
        model, prompt, rows, width = self._model, starts.prompt[index], len(index), int(prefix_lengths.max())
        lengths = self._lengths[prompt]
        before, edge = int(lengths.max()), slabs[0].shape[-2] - width
        texts = [starts.prefixes[i] for i in index.tolist()]
        tokens = torch.stack([F.pad(ids, (width - len(ids), 0)) for ids in texts])
        position = torch.arange(width, device=prefix_lengths.device)
        padding = (width - prefix_lengths).unsqueeze(-1)
        # Padding is on the left; it attends to the prompt alone, so that its outputs are not NaN.
        own_mask = (position >= padding)[:, None] & (position <= position.unsqueeze(-1))
        prompt_mask = torch.arange(before, device=prefix_lengths.device) < lengths.unsqueeze(-1)
        mask = torch.cat([prompt_mask[:, None].expand(-1, width, -1), own_mask], -1).unsqueeze(1)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, width, -1, model.size).transpose(1, 2) for x in (q, k, v))
            slabs[0][i, index, :, edge:], slabs[1][i, index, :, edge:] = k, v
            k, v = (
                torch.cat([stored[i, prompt, :, :before], x], -2)
                for stored, x in zip(self._prompts, (k, v), strict=True)
            )
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
            return out.transpose(1, 2).reshape(rows * width, -1)

        positions = (lengths.unsqueeze(-1) + (position - padding).clamp(min=0)).view(-1)
        last = model.run(tokens.view(-1), model.rotary(positions), attend).view(rows, width, -1)[:, -1]
        if self._recorder is not None:
            self._recorder.starts(index.tolist(), position >= padding)
        return last

    def _set_left_edge(self, edge: Tensor) -> None:
        """Stores the number of padding positions on the left of each row, `edge` (rows,); None if there are none."""
        self._edge = edge if bool(edge.any()) else None
        self._prepared = False

    def _shift_right(self, rows: Tensor) -> None:
        """Removes the last token of `rows` and aligns them on the right again."""
        end = self._filled
        for slab in self._responses:
            slab[:, rows, :, 1:end] = slab[:, rows, :, : end - 1]
        edge = torch.zeros_like(self._grid.prompt) if self._edge is None else self._edge
        self._set_left_edge(edge.index_add(0, rows, torch.ones_like(rows)))

    def _make_room(self) -> None:
        """Removes the positions on the left that are padding in every row; if there are none, raises the capacity."""
        edge = self._edge
        if edge is None or not (left := int(edge.min())):
            self._capacity += self._block
            return
        self._responses = [slab[..., left:, :] for slab in self._responses]
        self._filled -= left
        self._set_left_edge(edge - left)

    def _group_by_prompt(self, prompt: Tensor) -> None:
        self._grid, self._prepared = PromptGrid(prompt), False
        if len(self._grid.used) < len(self._lengths):
            self._lengths = self._lengths[self._grid.used]
            self._prompts = (self._prompts[0][:, self._grid.used], self._prompts[1][:, self._grid.used])
        columns = torch.arange(self._prompts[0].shape[-2], device=prompt.device)
        padding = columns >= self._lengths.unsqueeze(-1)
        self._padding = padding[:, None, None] if bool(padding.any()) else None

    def keep(self, index: Tensor) -> None:
        """Removes all rows except those at the ascending indices `index`, so that rows of a prompt stay adjacent."""
        self._responses = [slab[:, index] for slab in self._responses]
        self._edge = None if self._edge is None else self._edge[index]
        self._group_by_prompt(self._grid.prompt[index])

    def _grow(self) -> None:
        if self._filled == self._capacity:
            self._make_room()
        size = min(self._filled + self._block, self._capacity)
        for i, slab in enumerate(self._responses):
            self._responses[i] = slab.new_zeros(*slab.shape[:3], size, slab.shape[-1])  # zeros as in `_prefill`
            self._responses[i][..., : self._filled, :] = slab
        self._prepared = False

    def _prepare(self) -> None:
        """Creates the tensors besides keys and values that a step reads and changes; a CUDA graph refers to them."""
        columns = torch.arange(self._responses[0].shape[-2], device=self._lengths.device)
        self._column = columns[self._filled : self._filled + 1].clone()
        self._positions = self._lengths[self._grid.prompt] + self._filled
        self._masked = (columns >= self._filled)[None, None, None]
        if self._edge is not None:
            self._positions = self._positions - self._edge
            self._masked = self._masked | (columns < self._edge.unsqueeze(-1))[:, None, None]
        self._graph, self._eager_steps, self._prepared = None, 0, True

    def step(self, tokens: Tensor, paused: Tensor | None = None) -> Tensor:
        if self._filled == self._responses[0].shape[-2]:
            self._grow()
        if not self._prepared:
            self._prepare()
        if self._use_graphs and self._eager_steps == EAGER_STEPS and self._graph is None:
            self._make_graph(tokens)
        if self._graph is None:
            logits = self._run(tokens)
        else:
            self._tokens.copy_(tokens)
            self._graph.replay()  # what `_run` does
            logits = self._logits
        self._filled += 1
        if paused is not None:
            self._shift_right(paused)
        return logits

    def _run(self, tokens: Tensor) -> Tensor:
        self._eager_steps = min(self._eager_steps + 1, EAGER_STEPS)
        self._masked.index_fill_(-1, self._column, False)
        hidden = self._model.run(tokens, self._model.rotary(self._positions), self._attend)
        self._column += 1
        self._positions += 1
        return self._model.logits(hidden)

    def _make_graph(self, tokens: Tensor) -> None:
        """Captures a step. If that fails (memory is short), it warns, and this batch is decoded without a graph."""
        self._tokens = tokens.clone()
        try:
            self._graph = self._capture(tokens.device)
        except RuntimeError as error:
            warnings.warn(f"decoding without a CUDA graph, which is slower: {error}", TrimtabWarning, stacklevel=2)
            self._use_graphs, self._model.captures.graph = False, None
            torch.cuda.empty_cache()  # a graph gets no memory that the allocator keeps for other tensors

    def _capture(self, device: torch.device) -> torch.cuda.CUDAGraph:
        # Not `torch.cuda.graph`: it empties the allocator's cache, which the next update would have to fill again.
        shared, graph, current = self._model.captures, torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        shared.stream = shared.stream or torch.cuda.Stream(device)
        shared.stream.wait_stream(current)
        with torch.cuda.stream(shared.stream):  # and on its device
            graph.capture_begin(pool=shared.graph.pool() if shared.graph else None, capture_error_mode="thread_local")
            try:
                self._logits = self._run(self._tokens)
            finally:
                graph.capture_end()
        current.wait_stream(shared.stream)
        shared.graph = graph
        return graph

    def _attend(self, i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        model, keys, values = self._model, self._responses[0][i], self._responses[1][i]
        keys.index_copy_(2, self._column, key.unsqueeze(2))
        values.index_copy_(2, self._column, value.unsqueeze(2))
        rows = len(query)
        query = query.reshape(rows, model.kv_heads, model.group, model.size)
        prompt_scores = self._grid.to_grid(query) @ self._prompts[0][i].transpose(-1, -2)
        if self._padding is not None:
            prompt_scores.masked_fill_(self._padding, float("-inf"))
        own_scores = (query @ keys.transpose(-1, -2)).masked_fill_(self._masked, float("-inf"))
        # Softmax computes in float32 whatever the dtype and rounds once.
        weights = torch.cat([self._grid.to_rows(prompt_scores, model.group), own_scores], -1).softmax(-1)
        split = prompt_scores.shape[-1]
        attended = self._grid.to_rows(self._grid.to_grid(weights[..., :split]) @ self._prompts[1][i], model.group)
        return (attended + weights[..., split:] @ values).reshape(rows, -1)
