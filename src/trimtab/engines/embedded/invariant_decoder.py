"""Decoding with batch-invariant numerics over a cache read in fixed blocks of keys.

A step is the forward of one packed row of single tokens, a prefill that of prompts and prefixes, through the same
modules that score in the trainer (`models/invariant`); only where attention finds its keys differs. Keys and values of
a prompt are stored once and attended by all its rows. Those of a row's response begin a block of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from trimtab.engines.embedded.decoder import prefill_blocks
from trimtab.engines.embedded.decoding_rows import PrefillPlan
from trimtab.engines.embedded.sampling import SampledTokens
from trimtab.models.architecture import parts
from trimtab.models.fused_head import log_probs, logits_of
from trimtab.models.invariant.invariant_attention import KEYS, Attends, accumulate, packed, pad, query_rows, scores, up
from trimtab.models.invariant.kernels.runtime import uses_kernels
from trimtab.models.packed_attention import Layout, Options

Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class _By(Attends):
    """A function as what a forward's attention asks."""

    attention: Attention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return self.attention(layer, query, key, value, scaling)


@dataclass(slots=True)
class _Slabs:
    """Keys and values of all layers, (owners, key heads, a multiple of `KEYS`, width); float32 or wider on a CPU."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(cls, model: Any, owners: int, places: int, like: Tensor) -> _Slabs:
        attention, config = model.base_model.layers[0].self_attn, model.config
        shape = (owners, config.num_key_value_heads, up(max(places, 1), KEYS), attention.head_dim)
        # Zeros: places that were never written get no attention, but 0 * NaN would still be NaN.
        keys, values = ([like.new_zeros(shape) for _ in range(config.num_hidden_layers)] for _ in range(2))
        return cls(keys, values)

    def fill(self, layer: int, owners: Tensor, key: Tensor, value: Tensor) -> None:
        """Put (owners, time, heads x width) states at the first places."""
        for slab, states in ((self.keys[layer], key), (self.values[layer], value)):
            slab[owners, :, : states.shape[1]] = self._heads(states, slab).transpose(1, 2)

    def append(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Put (owners, heads x width) states of one token each at `places`."""
        owners = torch.arange(len(places), device=places.device)
        for slab, states in ((self.keys[layer], key), (self.values[layer], value)):
            slab[owners, :, places] = self._heads(states, slab)

    @staticmethod
    def _heads(states: Tensor, slab: Tensor) -> Tensor:
        return states.unflatten(-1, (slab.shape[1], -1)).to(slab.dtype)

    def select(self, index: Tensor) -> None:
        for each in (self.keys, self.values):
            for layer, slab in enumerate(each):  # one by one: no second copy of all
                each[layer] = slab[index]

    def grow(self) -> None:
        for each in (self.keys, self.values):
            for layer, slab in enumerate(each):
                each[layer] = F.pad(slab, (0, 0, 0, KEYS))


class InvariantDecoder:
    """See `decoder.Decoder`. Rows may begin with prefixes of any length."""

    def __init__(self, model: Any, starts: PrefillPlan) -> None:
        self._parts = parts(model)
        self._dtype = self._parts.weight.dtype
        device = starts.row.device
        self._lengths = torch.tensor([len(ids) for ids in starts.prompts], device=device)
        own = torch.tensor([len(ids) for ids in starts.prefixes], device=device)
        self.prefilled = int(self._lengths.sum()) + int(own.sum())
        like = torch.empty(0, dtype=self._dtype, device=device)
        if not uses_kernels(like):  # kernels read the products' own type
            like = like.to(torch.promote_types(self._dtype, torch.float32))
        self._prompts = _Slabs.empty(model, len(self._lengths), int(self._lengths.max()), like)
        self._own = _Slabs.empty(model, len(own), int(own.max()), like)
        self.first = self._prefill(starts, own)[starts.row]
        self._own.select(starts.row)
        self._filled = own[starts.row]
        self._place(starts.prompt[starts.row])

    def _prefill(self, starts: PrefillPlan, own: Tensor) -> Float[Tensor, "starts vocabulary"]:
        """Run every prompt and prefix once; the logits after each start."""
        lengths, logits = self._lengths.tolist(), None
        of = [(starts.prompt == p).nonzero()[:, 0] for p in range(len(lengths))]
        # A prompt is run with all its prefixes.
        sizes = [length + int(own[index].sum()) for length, index in zip(lengths, of, strict=True)]
        for block in prefill_blocks(sizes):
            index = torch.cat([of[p] for p in block])
            found = self._prefill_block(starts, block, index, own)
            logits = found.new_empty(len(own), found.shape[1]) if logits is None else logits
            logits[index] = found
        assert logits is not None
        return logits

    def _prefill_block(self, starts: PrefillPlan, prompts: list[int], index: Tensor, own: Tensor) -> Tensor:
        device = own.device
        place = {prompt: i for i, prompt in enumerate(prompts)}
        prompt_index = torch.tensor([place[p] for p in starts.prompt[index].tolist()], device=device)
        chosen = torch.tensor(prompts, device=device)
        lengths, counts = self._lengths[chosen], own[index]
        layout = Layout.build(_left(lengths), _right(counts), prompt_index)
        texts = [starts.prompts[p] for p in prompts] + [starts.prefixes[i] for i in index.tolist()]
        begins = [0] * len(prompts) + lengths[prompt_index].tolist()
        positions = [torch.arange(b, b + len(text), device=device) for b, text in zip(begins, texts, strict=True)]
        ends = torch.tensor([len(text) for text in texts], device=device).cumsum(0) - 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            self._prompts.fill(layer, chosen, layout.prompts.spread(k), layout.prompts.spread(v))
            if layout.responses.width:
                self._own.fill(layer, index, layout.responses.spread(k), layout.responses.spread(v))
            sizes = self._own.keys[layer].shape[1], self._own.keys[layer].shape[3]
            return packed(q, k, v, layout, Options(scaling, None, None, self._dtype), sizes)[0]

        hidden = self._run(torch.cat(texts), torch.cat(positions), attend)
        last = torch.where(counts > 0, ends[len(prompts) :], ends[prompt_index])
        return logits_of(hidden[last], self._parts)

    def _run(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Float[Tensor, "tokens hidden"]:
        return self._parts.backbone(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
            layout=_By(attention),
            use_cache=False,
        ).last_hidden_state[0]

    def _place(self, owner: Tensor) -> None:
        """Lay the rows out as (prompts still needed, most rows of one prompt), for attention to the prompts."""
        used, owner, counts = owner.unique(return_inverse=True, return_counts=True)
        if len(used) < len(self._lengths):
            self._lengths = self._lengths[used]
            self._prompts.select(used)
        self._owner, self._grid = owner, (len(used), int(counts.max()))
        nth = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        full = len(owner) == self._grid[0] * self._grid[1]
        self._slot = None if full else owner * self._grid[1] + nth
        places = torch.arange(self._prompts.keys[0].shape[2], device=owner.device)
        self._hidden = (places >= self._lengths[:, None])[:, None, None]

    def keep(self, index: Tensor) -> None:
        """`index` must be ascending: rows of one prompt stay neighbors."""
        self._own.select(index)
        self._filled = self._filled[index]
        self._place(self._owner[index])

    def step(self, tokens: Tensor) -> Float[Tensor, "rows vocabulary"]:
        while int(self._filled.max()) >= self._own.keys[0].shape[2]:
            self._own.grow()
        places = torch.arange(self._own.keys[0].shape[2], device=tokens.device)
        unseen = (places > self._filled[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            self._own.append(layer, self._filled, k, v)
            return self._attend(layer, q, scaling, unseen)

        hidden = self._run(tokens, self._lengths[self._owner] + self._filled, attend)
        self._filled = self._filled + 1
        return logits_of(hidden, self._parts)

    def _attend(self, layer: int, q: Tensor, scaling: float, unseen: Tensor) -> Tensor:
        if uses_kernels(q):
            return self._attend_by_kernel(layer, q, scaling)
        own, prompts = self._own.keys[layer], self._prompts.keys[layer]
        query = q.unflatten(-1, (own.shape[1], -1, own.shape[3])).to(own.dtype)
        group, multiple = query.shape[2], query_rows(own.shape[3])
        of_prompt = _scores(pad(self._to_grid(query), multiple), prompts, scaling, self._hidden)
        of_own = _scores(pad(query, multiple), own, scaling, unseen)
        peak = self._to_rows(of_prompt.amax(-1, keepdim=True), group)
        peak = torch.maximum(peak, of_own[:, :, :group].amax(-1, keepdim=True))
        of_prompt.sub_(pad(self._to_grid(peak), multiple)).exp_()
        total, out = _weigh(of_prompt, self._prompts.values[layer])
        before = [pad(self._to_rows(each, group), multiple).flatten(0, 1) for each in (total[..., None], out)]
        of_own.sub_(pad(peak, multiple)).exp_()
        total, out = _weigh(of_own, self._own.values[layer], (before[0][..., 0], before[1]))
        return out.div_(total[..., None])[:, :, :group].reshape(len(q), -1).to(q.dtype)

    def _attend_by_kernel(self, layer: int, q: Tensor, scaling: float) -> Tensor:
        from trimtab.models.invariant.kernels.attention_kernel import Keys, Queries, attend

        row = torch.arange(len(q), device=q.device)
        zero, one = torch.zeros_like(row), torch.ones_like(row)
        prompts = Keys(self._prompts.keys[layer], self._prompts.values[layer], self._owner, zero)
        own = Keys(self._own.keys[layer], self._own.values[layer], row, zero)
        queries = Queries(row, one, self._lengths[self._owner], self._filled + 1, 1)
        return attend(q.unflatten(-1, (-1, own.key.shape[3])), queries, prompts, own, scaling).flatten(1)

    def _to_grid(self, rows: Float[Tensor, "rows heads group x"]) -> Float[Tensor, "prompts heads more x"]:
        prompts, most = self._grid
        if self._slot is not None:
            grid = rows.new_zeros(prompts * most, *rows.shape[1:])
            grid[self._slot] = rows
            rows = grid
        return rows.view(prompts, most, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _to_rows(self, grid: Float[Tensor, "prompts heads more x"], group: int) -> Float[Tensor, "rows heads group x"]:
        most = self._grid[1]
        rows = grid[:, :, : most * group].unflatten(2, (most, group)).transpose(1, 2).flatten(0, 1)
        return rows if self._slot is None else rows[self._slot]


def scored(drawn: SampledTokens, logits: Tensor, temperature: float) -> SampledTokens:
    """`drawn` with the log-probs that the trainer's head will find, bit for bit. Greedy ones are 0 by definition."""
    if temperature == 0:
        return drawn
    kept = None
    if drawn.kept is not None:
        width = max(len(ids) for ids in drawn.kept)
        kept = torch.full((len(drawn.kept), width), -1, device=logits.device)
        for row, ids in enumerate(drawn.kept):
            kept[row, : len(ids)] = torch.from_numpy(ids)
    return replace(drawn, logp=log_probs(logits, drawn.ids, temperature, kept).float())


def _left(lengths: Tensor) -> Tensor:
    """A mask of rows padded on the left, as `Layout.build` wants prompts."""
    width = int(lengths.max())
    return torch.arange(width, device=lengths.device) >= width - lengths[:, None]


def _right(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]


def _scores(query: Tensor, key: Tensor, scaling: float, hidden: Tensor) -> Float[Tensor, "owners heads more keys"]:
    """Scores of (owners, heads, more, width) queries with their owners' keys; -inf at `hidden` places."""
    found = scores(query.flatten(0, 1), key.flatten(0, 1), scaling)
    return found.unflatten(0, query.shape[:2]).masked_fill_(hidden, -torch.inf)


def _weigh(exponentials: Tensor, value: Tensor, before: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """`accumulate` for (owners, heads, more, keys)."""
    total, out = accumulate(exponentials.flatten(0, 1), value.flatten(0, 1), before)
    return total.unflatten(0, exponentials.shape[:2]), out.unflatten(0, exponentials.shape[:2])
