"""Batch-invariant attention: a fixed order of keys, for packed rows and for decoding.

A token attends to its prompt and to its response up to itself. Keys of both are split into blocks of `KEY_BLOCK`,
starting at the first token of the prompt and of the response: the boundary between the two is part of a trajectory, so
sampler and trainer split alike. Then, in float32:

    scores     one product for each (query, key), over the width of a head: padded to a multiple of `query_rows`
    maximum    over all keys: exact in any order
    sum, out   block by block, prompt first; masked keys and padding add exact zeros

Queries, keys and values are first rounded to the dtype of the model's products, as in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from trimtab.errors import TrimtabError
from trimtab.trainer.models.architecture import INVARIANT_IMPLEMENTATION
from trimtab.trainer.models.invariant.kernels import KEY_BLOCK, attention_kernel, use_triton
from trimtab.trainer.models.packed_attention import (
    MAX_SAVED_SCORES,
    AttentionOptions,
    PackedAttention,
    PackedLayout,
    PaddedRows,
    fold_heads,
    token_major,
    unfold_heads,
    working_blocks,
)

# Attention to a cache, in place of a layout (engines/embedded/invariant_decoder.py): (layer, queries, keys, values,
# scaling) -> output, all of shape (tokens, heads x width).
CachedAttention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


def invariant_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: PackedLayout | CachedAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query (1, heads, tokens, width), key and value (1, key heads, ...)."""
    del attention_mask  # the layout determines it
    if layout is None or kwargs.get("dropout"):
        raise TrimtabError("invariant attention is for scoring and for the embedded engine alone, without dropout")
    heads, width = query.shape[1], query.shape[3]
    scale = width**-0.5 if scaling is None else scaling
    # Rotated queries and keys have a wider dtype than the products; values have the dtype of the products.
    dtype = value.dtype
    with torch.autocast(query.device.type, enabled=False):
        if isinstance(layout, PackedLayout):
            options = AttentionOptions(scale, None, None, dtype)
            # The backward is the native one: a sampler computes no gradients.
            return PackedAttention.apply(query, key, value, layout, options, attend_packed), None
        q, k, v = (token_major(x, dtype) for x in (query, key, value))
        out = layout(module.layer_idx, q, k, v, scale)  # pyright: ignore[reportArgumentType]
        return out.view(1, -1, heads, width), None


AttentionInterface.register(INVARIANT_IMPLEMENTATION, invariant_attention_forward)
AttentionMaskInterface.register(INVARIANT_IMPLEMENTATION, sdpa_mask)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def query_rows(width: int) -> int:
    """Returns the minimum number of rows of products over heads of `width` channels; fewer use other kernels.

    MKL on a CPU with AVX-512 needs 4 rows up to a width of 80, 8 up to 128 and 12 up to 256; with
    `MKL_CBWR=COMPATIBLE` it needs 8 for all of them. More rows cost time in decoding, where most of them are padding.
    """
    return 8 if width <= 128 else 16


def pad_time(states: Float[Tensor, "*batch time width"], multiple: int) -> Float[Tensor, "*batch more width"]:
    """Pads the time dimension with zeros to a multiple; returns the tensor itself if it needs no padding."""
    missing = -states.shape[-2] % multiple
    return F.pad(states, (0, 0, 0, missing)) if missing else states


def attention_scores(
    query: Float[Tensor, "batch queries width"], key: Float[Tensor, "batch keys width"], scaling: float
) -> Float[Tensor, "batch queries keys"]:
    """Returns all scores. `queries` is a multiple of `query_rows`, `keys` of `KEY_BLOCK`; both are float32 or wider."""
    return torch.bmm(query, key.transpose(1, 2)).mul_(scaling)


def largest(scores: Float[Tensor, "*batch keys"], shown: Float[Tensor, "*#batch keys"]) -> Float[Tensor, "*batch 1"]:
    """Returns the largest score of the keys for which `shown` is 1 (0: hidden)."""
    return (scores + shown.log()).amax(-1, keepdim=True)


def exponentials_(
    scores: Float[Tensor, "*batch keys"], peak: Float[Tensor, "*batch 1"], shown: Float[Tensor, "*#batch keys"]
) -> Float[Tensor, "*batch keys"]:
    """Replaces the scores by `exp(score - peak)`, and by 0 for the keys for which `shown` is 0.

    On a CPU the exponential of -inf takes much longer than of a number, so hidden keys get 0 by a product.
    """
    return scores.sub_(peak).clamp_(max=0).exp_().mul_(shown)


def accumulate(
    exponentials: Float[Tensor, "batch queries keys"],
    value: Float[Tensor, "batch keys width"],
    before: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "batch queries"], Float[Tensor, "batch queries width"]]:
    """Adds sums and weighted values block by block, in order, to the totals `before`; returns both totals."""
    for start in range(0, value.shape[1], KEY_BLOCK):
        part = exponentials[..., start : start + KEY_BLOCK]
        sums, values = part.sum(-1), torch.bmm(part, value[:, start : start + KEY_BLOCK])
        before = (sums, values) if before is None else (before[0].add_(sums), before[1].add_(values))
    assert before is not None  # there is at least one key: the query's own
    return before


class _Keys(NamedTuple):
    """Keys and values that rows of queries attend to, (rows, a multiple of `KEY_BLOCK`, channels)."""

    keys: Tensor
    values: Tensor
    width: int  # number of keys without padding to whole blocks
    lengths: Tensor | None  # of the prompts, (rows,); None: a row's own keys, which a query sees up to itself

    def shown(self, rows: slice, queries: range, keys: int, dtype: torch.dtype) -> Float[Tensor, "_ 1 _ keys"]:
        """Returns 1 for the keys that each query attends to, and 0 for the others."""
        positions = torch.arange(keys, device=self.keys.device)
        if self.lengths is not None:
            return (positions < self.lengths[rows, None])[:, None, None].to(dtype)
        last = torch.arange(queries.start, queries.stop, device=self.keys.device)
        return (positions <= last[:, None])[None, None].to(dtype)

    def visible(self, last: int) -> int:
        """Returns the number of keys, in whole blocks, that queries up to `last` attend to."""
        return self.keys.shape[1] if self.lengths is not None else min(round_up(last, KEY_BLOCK), self.keys.shape[1])


def attend_packed(
    q: Float[Tensor, "tokens channels"],
    k: Float[Tensor, "tokens key_channels"],
    v: Float[Tensor, "tokens key_channels"],
    layout: PackedLayout,
    options: AttentionOptions,
    sizes: tuple[int, int],
) -> tuple[Float[Tensor, "tokens channels"], list[list[Tensor]]]:
    """Returns attention over a packed row, and the probabilities for its backward. `sizes`: key heads, head width."""
    if use_triton(q):
        result = attention_kernel.attend_packed(q, k, v, layout, sizes[1], options.scaling)
        # No probabilities of either kind of row: the backward recomputes them.
        return result, [[]] * (2 if layout.responses.width else 1)
    out, kept = torch.empty_like(q), []
    out[layout.responses.stop :] = 0  # fillers
    for rows, parts in _kinds(layout, k, v):
        result, probabilities = _attend(rows, parts, rows.to_padded(q), options, sizes)
        out[rows.start : rows.stop] = rows.pack(result)
        kept.append(probabilities)
    return out, kept


def _kinds(layout: PackedLayout, k: Tensor, v: Tensor) -> list[tuple[PaddedRows, list[_Keys]]]:
    prompts, responses = layout.prompts, layout.responses
    own = _own(prompts, k, v)
    kinds = [(prompts, [own])]
    if responses.width:
        index = layout.prompt_index
        shared = _Keys(own.keys[index], own.values[index], own.width, layout.prompt_lengths[index])
        kinds.append((responses, [shared, _own(responses, k, v)]))
    return kinds


def _own(rows: PaddedRows, k: Tensor, v: Tensor) -> _Keys:
    return _Keys(pad_time(rows.to_padded(k), KEY_BLOCK), pad_time(rows.to_padded(v), KEY_BLOCK), rows.width, None)


def _attend(
    rows: PaddedRows, parts: Sequence[_Keys], q: Tensor, options: AttentionOptions, sizes: tuple[int, int]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the output rows, and the probabilities of every block as the native backward expects them."""
    out, kept = torch.empty_like(q), []
    heads, keys = q.shape[2] // sizes[1], sum(part.width for part in parts)
    for block in working_blocks(rows.batch, heads, rows.width, keys, q.device):
        queries = range(*block.queries.indices(rows.width))
        some = pad_time(q[block.rows, block.queries], query_rows(sizes[1]))
        exponentials, total, result = _block(some, queries.start, block.rows, parts, options, sizes)
        out[block.rows, block.queries] = unfold_heads(result.div_(total[..., None]), len(some), some.shape[1])[
            :, : len(queries)
        ].to(options.dtype)
        if len(queries) == rows.width and rows.batch * heads * rows.width * keys <= MAX_SAVED_SCORES:
            joint = torch.cat([one[..., : part.width] for one, part in zip(exponentials, parts, strict=True)], -1)
            grid = joint.div_(total[..., None]).view(len(some), heads, -1, keys)
            kept.append(grid[:, :, : len(queries)].to(options.dtype).contiguous())
    return out, kept


def _block(
    q: Tensor, start: int, rows: slice, parts: Sequence[_Keys], options: AttentionOptions, sizes: tuple[int, int]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns the exponentials of each part's scores, their sum, and the weighted values of some rows and queries."""
    exact = torch.promote_types(options.dtype, torch.float32)
    queries = range(start, start + q.shape[1])
    folded, scores, masks = fold_heads(q, *sizes).to(exact), [], []
    for part in parts:
        keys = part.visible(queries.stop)
        score = attention_scores(folded, fold_heads(part.keys[rows, :keys], *sizes).to(exact), options.scaling)
        scores.append(score.view(len(q), -1, len(queries), keys))
        masks.append(part.shown(rows, queries, keys, exact))
    peak = torch.stack([largest(score, shown) for score, shown in zip(scores, masks, strict=True)]).amax(0)
    exponentials, result = [], None
    for part, score, shown in zip(parts, scores, masks, strict=True):
        values = fold_heads(part.values[rows, : score.shape[-1]], *sizes).to(exact)
        exponentials.append(exponentials_(score, peak, shown).view(*folded.shape[:2], -1))
        result = accumulate(exponentials[-1], values, result)
    assert result is not None
    return exponentials, *result
