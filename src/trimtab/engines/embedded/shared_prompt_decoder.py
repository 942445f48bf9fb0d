"""Batched decoding that stores and attends each prompt's keys once for all its samples.

The keys and values of a prompt are stored once and attended by all its rows as one matrix product, instead of being
read again for every row. Rows grow in lockstep, so their own keys and values form a rectangle that needs no mask. Where
rows begin with prefixes of different lengths, the prefixes lie right-aligned in that rectangle, and only then does its
left edge need one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.engines.embedded.decoder import prefill_blocks
from trimtab.engines.embedded.decoding_rows import PrefillPlan
from trimtab.engines.embedded.expert_recorder import ExpertRecorder
from trimtab.engines.embedded.fused_llama import FusedLlama

# Own keys and values are allocated for this many tokens at a time: a product with a contiguous block of keys, its
# unwritten end included, is two to four times as fast as one with a strided part of a large allocation.
BLOCK = 32


class SharedPromptDecoder:
    """See `decoder.Decoder`. `capacity` bounds the steps; `recorder` is told what each pass but the steps has run."""

    def __init__(
        self, lean: FusedLlama, starts: PrefillPlan, capacity: int, recorder: ExpertRecorder | None = None
    ) -> None:
        self._lean, self._recorder = lean, recorder
        self._lengths = torch.tensor([len(ids) for ids in starts.prompts], device=starts.row.device)
        own = torch.tensor([len(ids) for ids in starts.prefixes], device=starts.row.device)
        self._filled = int(own.max())
        self._capacity = self._filled + capacity
        self.prefilled = int(self._lengths.sum()) + int(own.sum())
        last = self._prefill(starts.prompts)[starts.prompt]
        self._own = self._prefill_prefixes(starts, own, last)
        self.first = lean.logits(last)[starts.row]
        self._edge(own[starts.row])
        self._place(starts.prompt[starts.row])

    def _prefill(self, prompts: Sequence[Tensor]) -> Tensor:
        """Store the prompts' keys and values; the hidden state after each prompt, (prompts, width)."""
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
            if self._recorder is not None:
                places = torch.arange(width, device=weight.device)
                self._recorder.prompts(block, places < self._lengths[index].unsqueeze(-1))
        self._prompts = (keys, values)
        return last

    def _prefill_prefixes(self, starts: PrefillPlan, own: Tensor, last: Tensor) -> list[Tensor]:
        """The rows' own keys and values so far, prefixes right-aligned. `last` takes the hidden states after them."""
        lean, width = self._lean, self._filled
        like = self._prompts[0]
        shape = (len(lean.layers), len(own), lean.kv_heads, width, lean.size)
        slabs = [like.new_zeros(shape), like.new_zeros(shape)]
        longest = int(self._lengths.max())
        began = own.nonzero().squeeze(-1)
        for block in prefill_blocks(own[began].tolist(), before=longest):
            index = began[block]
            last[index] = self._prefill_block(starts, index, own[index], slabs)
        return [slab[:, starts.row] for slab in slabs]

    def _prefill_block(self, starts: PrefillPlan, index: Tensor, own: Tensor, slabs: list[Tensor]) -> Tensor:
        """Run the prefixes of `index`, each attending to its prompt and to itself."""
        lean, prompt, rows, width = self._lean, starts.prompt[index], len(index), int(own.max())
        lengths = self._lengths[prompt]
        before, edge = int(lengths.max()), slabs[0].shape[-2] - width
        texts = [starts.prefixes[i] for i in index.tolist()]
        tokens = torch.stack([F.pad(ids, (width - len(ids), 0)) for ids in texts])
        place = torch.arange(width, device=own.device)
        padding = (width - own).unsqueeze(-1)
        # Padding is on the left; it attends to the prompt alone, so that nothing of it is NaN.
        real = (place >= padding)[:, None] & (place <= place.unsqueeze(-1))
        prompted = torch.arange(before, device=own.device) < lengths.unsqueeze(-1)
        mask = torch.cat([prompted[:, None].expand(-1, width, -1), real], -1).unsqueeze(1)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, width, -1, lean.size).transpose(1, 2) for x in (q, k, v))
            slabs[0][i, index, :, edge:], slabs[1][i, index, :, edge:] = k, v
            k, v = (
                torch.cat([stored[i, prompt, :, :before], x], -2)
                for stored, x in zip(self._prompts, (k, v), strict=True)
            )
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
            return out.transpose(1, 2).reshape(rows * width, -1)

        positions = (lengths.unsqueeze(-1) + (place - padding).clamp(min=0)).view(-1)
        last = lean.run(tokens.view(-1), lean.rotary(positions), attend).view(rows, width, -1)[:, -1]
        if self._recorder is not None:
            self._recorder.starts(index.tolist(), place >= padding)
        return last

    def _edge(self, own: Tensor) -> None:
        """What a ragged left edge takes: positions shifted by it, and a mask over the places before it."""
        edge = self._filled - own
        ragged = bool(edge.any())
        self._shift = edge if ragged else None
        places = torch.arange(self._filled, device=own.device)
        self._own_padding = (places < edge.unsqueeze(-1))[:, None, None] if ragged else None

    def _place(self, owner: Tensor) -> None:
        """Lay the rows out as (prompts still needed, most rows of one prompt), for attention to the prompts."""
        used, owner, counts = owner.unique(return_inverse=True, return_counts=True)
        if len(used) < len(self._lengths):
            self._lengths = self._lengths[used]
            self._prompts = (self._prompts[0][:, used], self._prompts[1][:, used])
        self._owner = owner
        self._grid = (len(used), int(counts.max()))
        nth = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        slot = owner * self._grid[1] + nth
        self._slot = None if len(owner) == self._grid[0] * self._grid[1] else slot
        places = torch.arange(self._prompts[0].shape[-2], device=owner.device)
        padding = places >= self._lengths.unsqueeze(-1)
        self._padding = padding[:, None, None] if bool(padding.any()) else None

    def keep(self, index: Tensor) -> None:
        """`index` must be ascending: rows of one prompt stay neighbors."""
        self._own = [slab[:, index] for slab in self._own]
        if self._shift is not None and self._own_padding is not None:
            self._shift, self._own_padding = self._shift[index], self._own_padding[index]
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
        if self._shift is not None:
            positions = positions - self._shift
        hidden = self._lean.run(tokens, self._lean.rotary(positions), self._attend)
        self._filled += 1
        return self._lean.logits(hidden)

    def _attend(self, i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lean, end = self._lean, self._filled + 1
        keys, values = self._own[0][i], self._own[1][i]
        keys[:, :, self._filled], values[:, :, self._filled] = key, value
        rows = len(query)
        query = query.reshape(rows, lean.kv_heads, lean.group, lean.size)
        shared = self._to_grid(query) @ self._prompts[0][i].transpose(-1, -2)
        if self._padding is not None:
            shared.masked_fill_(self._padding, float("-inf"))
        own = query @ keys.transpose(-1, -2)
        if self._own_padding is not None:
            own[..., : self._own_padding.shape[-1]].masked_fill_(self._own_padding, float("-inf"))
        # Softmax computes in float32 whatever the dtype, and rounds once.
        weights = torch.cat([self._to_rows(shared), own[..., :end]], -1).softmax(-1)
        split = shared.shape[-1]
        attended = self._to_rows(self._to_grid(weights[..., :split]) @ self._prompts[1][i])
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
