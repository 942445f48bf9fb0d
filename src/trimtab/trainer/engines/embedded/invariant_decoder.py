"""Decoding with batch-invariant numerics over a cache that is read in fixed blocks of keys.

A step runs one packed row of single tokens, a prefill one packed row of prompts and prefixes. Both use the modules that
score in the trainer (`models/invariant`); only the storage of the keys differs. The keys and values of a prompt are
stored once, and all its rows attend to them. The keys and values of a response begin a new block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from trimtab.trainer.engines.embedded.decoder import PrefillPlan, PromptGrid, prefill_blocks
from trimtab.trainer.engines.embedded.sampling import SampledTokens
from trimtab.trainer.models.architecture import model_parts
from trimtab.trainer.models.fused_head import head_logits, log_probs, pack_head
from trimtab.trainer.models.invariant import pack_layers, use_packed
from trimtab.trainer.models.invariant.invariant_attention import (
    KEY_BLOCK,
    CachedAttention,
    accumulate,
    attend_packed,
    attention_scores,
    exponentials_,
    largest,
    pad_time,
    query_rows,
    round_up,
)
from trimtab.trainer.models.invariant.kernels import use_triton
from trimtab.trainer.models.packed_attention import AttentionOptions, PackedLayout


@dataclass(slots=True)
class _Cache:
    """Keys and values of each layer, (owners, key heads, positions, width). An owner is a prompt or a row.

    The number of positions is a multiple of `KEY_BLOCK`. On a CPU the dtype is float32 or wider.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(cls, model: Any, owners: int, positions: int, like: Tensor) -> _Cache:
        attention, config = model.base_model.layers[0].self_attn, model.config
        shape = (owners, config.num_key_value_heads, round_up(max(positions, 1), KEY_BLOCK), attention.head_dim)
        # Zeros: positions that were never written get no attention, but 0 * NaN would still be NaN.
        keys, values = ([like.new_zeros(shape) for _ in range(config.num_hidden_layers)] for _ in range(2))
        return cls(keys, values)

    def fill(self, layer: int, owners: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes (owners, time, heads x width) states to the first positions."""
        for slab, states in ((self.keys[layer], key), (self.values[layer], value)):
            slab[owners, :, : states.shape[1]] = self._heads(states, slab).transpose(1, 2)

    def append(self, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes (owners, heads x width) states of one token each to `positions`."""
        owners = torch.arange(len(positions), device=positions.device)
        for slab, states in ((self.keys[layer], key), (self.values[layer], value)):
            slab[owners, :, positions] = self._heads(states, slab)

    @staticmethod
    def _heads(states: Tensor, slab: Tensor) -> Tensor:
        return states.unflatten(-1, (slab.shape[1], -1)).to(slab.dtype)

    def select(self, index: Tensor) -> None:
        for each in (self.keys, self.values):
            for layer, slab in enumerate(each):  # layer by layer, to avoid a second copy of the whole cache
                each[layer] = slab[index]

    def grow(self) -> None:
        for each in (self.keys, self.values):
            for layer, slab in enumerate(each):
                each[layer] = F.pad(slab, (0, 0, 0, KEY_BLOCK))


class InvariantDecoder:
    """Decodes one batch with batch-invariant numerics (see `decoder.Decoder`).

    Prefixes may have any length.
    """

    def __init__(self, model: Any, starts: PrefillPlan) -> None:
        self._parts = model_parts(model)
        self._dtype = self._parts.weight.dtype
        # Packed again for each batch, because weights may change in place between batches. These copies are as large
        # as the model, and in float32 on a processor without bfloat16 instructions.
        self._packed, self._head = pack_layers(self._parts.backbone), pack_head(self._parts)
        device = starts.row.device
        self._lengths = torch.tensor([len(ids) for ids in starts.prompts], device=device)
        prefix_lengths = torch.tensor([len(ids) for ids in starts.prefixes], device=device)
        self.prefilled = int(self._lengths.sum()) + int(prefix_lengths.sum())
        like = torch.empty(0, dtype=self._dtype, device=device)
        if not use_triton(like):  # the kernels read the model's dtype
            like = like.to(torch.promote_types(self._dtype, torch.float32))
        self._prompts = _Cache.empty(model, len(self._lengths), int(self._lengths.max()), like)
        self._responses = _Cache.empty(model, len(prefix_lengths), int(prefix_lengths.max()), like)
        self.first = self._prefill(starts, prefix_lengths)[starts.row]
        self._responses.select(starts.row)
        self._filled = prefix_lengths[starts.row]
        self._group_by_prompt(starts.prompt[starts.row])

    def _prefill(self, starts: PrefillPlan, prefix_lengths: Tensor) -> Float[Tensor, "starts vocabulary"]:
        """Runs every prompt and prefix once; returns the logits after each start."""
        lengths = self._lengths.tolist()
        starts_of_prompt = [(starts.prompt == p).nonzero()[:, 0] for p in range(len(lengths))]
        # A prompt is run with all its prefixes.
        sizes = [
            length + int(prefix_lengths[index].sum()) for length, index in zip(lengths, starts_of_prompt, strict=True)
        ]
        blocks = prefill_blocks(sizes)
        index = [torch.cat([starts_of_prompt[p] for p in block]) for block in blocks]
        logits = [self._prefill_block(starts, *part, prefix_lengths) for part in zip(blocks, index, strict=True)]
        return torch.cat(logits)[torch.cat(index).argsort()]

    def _prefill_block(self, starts: PrefillPlan, prompts: list[int], index: Tensor, prefix_lengths: Tensor) -> Tensor:
        device = prefix_lengths.device
        index_in_block = {prompt: i for i, prompt in enumerate(prompts)}
        prompt_index = torch.tensor([index_in_block[p] for p in starts.prompt[index].tolist()], device=device)
        prompt_ids = torch.tensor(prompts, device=device)
        lengths, counts = self._lengths[prompt_ids], prefix_lengths[index]
        width, columns = int(lengths.max()), torch.arange(int(counts.max()), device=device)
        left_padded = torch.arange(width, device=device) >= width - lengths[:, None]
        layout = PackedLayout.build(left_padded, columns < counts[:, None], prompt_index)
        texts = [starts.prompts[p] for p in prompts] + [starts.prefixes[i] for i in index.tolist()]
        begins = [0] * len(prompts) + lengths[prompt_index].tolist()
        positions = [torch.arange(b, b + len(text), device=device) for b, text in zip(begins, texts, strict=True)]
        ends = torch.tensor([len(text) for text in texts], device=device).cumsum(0) - 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            self._prompts.fill(layer, prompt_ids, layout.prompts.to_padded(k), layout.prompts.to_padded(v))
            if layout.responses.width:
                self._responses.fill(layer, index, layout.responses.to_padded(k), layout.responses.to_padded(v))
            sizes = self._responses.keys[layer].shape[1], self._responses.keys[layer].shape[3]
            return attend_packed(q, k, v, layout, AttentionOptions(scaling, None, None, self._dtype), sizes)[0]

        hidden = self._run(torch.cat(texts), torch.cat(positions), attend)
        last = torch.where(counts > 0, ends[len(prompts) :], ends[prompt_index])
        return head_logits(hidden[last], self._parts, self._head)

    def _run(self, tokens: Tensor, positions: Tensor, attention: CachedAttention) -> Float[Tensor, "tokens hidden"]:
        with use_packed(self._packed):
            return self._parts.backbone(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
                layout=attention,
                use_cache=False,
            ).last_hidden_state[0]

    def _group_by_prompt(self, prompt: Tensor) -> None:
        self._grid = PromptGrid(prompt)
        if len(self._grid.used) < len(self._lengths):
            self._lengths = self._lengths[self._grid.used]
            self._prompts.select(self._grid.used)
        positions = torch.arange(self._prompts.keys[0].shape[2], device=prompt.device)
        self._prompt_shown = (positions < self._lengths[:, None])[:, None, None].to(self._prompts.keys[0].dtype)

    def keep(self, index: Tensor) -> None:
        """Removes all rows except those at the ascending indices `index`, so that rows of a prompt stay adjacent."""
        self._responses.select(index)
        self._filled = self._filled[index]
        self._group_by_prompt(self._grid.prompt[index])

    def step(self, tokens: Tensor, paused: Tensor | None = None) -> Float[Tensor, "rows vocabulary"]:
        while int(self._filled.max()) >= self._responses.keys[0].shape[2]:
            self._responses.grow()
        positions = torch.arange(self._responses.keys[0].shape[2], device=tokens.device)
        shown = (positions <= self._filled[:, None])[:, None, None].to(self._responses.keys[0].dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            self._responses.append(layer, self._filled, k, v)
            return self._attend(layer, q, scaling, shown)

        hidden = self._run(tokens, self._lengths[self._grid.prompt] + self._filled, attend)
        self._filled = self._filled + 1
        if paused is not None:
            self._filled[paused] -= 1
        return head_logits(hidden, self._parts, self._head)

    def _attend(self, layer: int, q: Tensor, scaling: float, shown: Tensor) -> Tensor:
        if use_triton(q):
            return self._attend_by_kernel(layer, q, scaling)
        keys, prompt_keys = self._responses.keys[layer], self._prompts.keys[layer]
        query = q.unflatten(-1, (keys.shape[1], -1, keys.shape[3])).to(keys.dtype)
        group, multiple = query.shape[2], query_rows(keys.shape[3])
        of_prompt = _scores(pad_time(self._grid.to_grid(query), multiple), prompt_keys, scaling)
        of_response = _scores(pad_time(query, multiple), keys, scaling)
        peak = self._grid.to_rows(largest(of_prompt, self._prompt_shown), group)
        peak = torch.maximum(peak, largest(of_response[:, :, :group], shown))
        exponentials_(of_prompt, pad_time(self._grid.to_grid(peak), multiple), self._prompt_shown)
        total, out = _accumulate(of_prompt, self._prompts.values[layer])
        before = [pad_time(self._grid.to_rows(each, group), multiple).flatten(0, 1) for each in (total[..., None], out)]
        exponentials_(of_response, pad_time(peak, multiple), shown)
        total, out = _accumulate(of_response, self._responses.values[layer], (before[0][..., 0], before[1]))
        return out.div_(total[..., None])[:, :, :group].reshape(len(q), -1).to(q.dtype)

    def _attend_by_kernel(self, layer: int, q: Tensor, scaling: float) -> Tensor:
        from trimtab.trainer.models.invariant.kernels.attention_kernel import QuerySpans, StoredKeys, attend

        row = torch.arange(len(q), device=q.device)
        zero, one = torch.zeros_like(row), torch.ones_like(row)
        prompts = StoredKeys(self._prompts.keys[layer], self._prompts.values[layer], self._grid.prompt, zero)
        responses = StoredKeys(self._responses.keys[layer], self._responses.values[layer], row, zero)
        queries = QuerySpans(row, one, self._lengths[self._grid.prompt], self._filled + 1, 1)
        return attend(q.unflatten(-1, (-1, responses.key.shape[3])), queries, prompts, responses, scaling).flatten(1)


def with_trainer_logps(sampled: SampledTokens, logits: Tensor, temperature: float) -> SampledTokens:
    """Returns `sampled` with the log-probs that the trainer's head computes, bit for bit.

    Log-probs at temperature 0 remain 0 by definition.
    """
    if temperature == 0:
        return sampled
    kept = None
    if sampled.kept is not None:
        width = max(len(ids) for ids in sampled.kept)
        kept = torch.full((len(sampled.kept), width), -1, device=logits.device)
        for row, ids in enumerate(sampled.kept):
            kept[row, : len(ids)] = torch.from_numpy(ids)
    return replace(sampled, logp=log_probs(logits, sampled.ids, temperature, kept).float())


def _scores(query: Tensor, key: Tensor, scaling: float) -> Float[Tensor, "owners heads more keys"]:
    """Returns the scores of (owners, heads, more, width) queries with their owners' keys."""
    return attention_scores(query.flatten(0, 1), key.flatten(0, 1), scaling).unflatten(0, query.shape[:2])


def _accumulate(
    exponentials: Tensor, value: Tensor, before: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Applies `accumulate` to (owners, heads, more, keys)."""
    total, out = accumulate(exponentials.flatten(0, 1), value.flatten(0, 1), before)
    return total.unflatten(0, exponentials.shape[:2]), out.unflatten(0, exponentials.shape[:2])
