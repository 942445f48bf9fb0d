"""Attention over a packed micro-batch in which responses share their prompt.

The backbone runs one row of real tokens, all prompts first and then all responses, without padding:

    [ prompt 0 | prompt 1 | ... | response 0 | response 1 | ... ]

Only attention depends on the layout. It spreads queries and keys over padded rows, lets each response attend to its
prompt's keys and its own, and packs the result again. A dense mask would waste work on masked scores, and rows of
prompt and response would run every prompt once for each response.

`PACKED_IMPLEMENTATION` is registered with transformers; without a `layout` it is transformers' own "sdpa". On a CPU
short rows use products of small matrices, which are faster than the fused kernel, most of all in the backward; long
responses use the kernel (`FusedRows`). Scores are computed in float32, so autocast rounds nothing before the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trimtab.errors import TrimtabError
from trimtab.trainer.models.matmul import batched_product, on_accelerator, product_dtype

PACKED_IMPLEMENTATION = "trimtab"

# Scores per block, in elements: passes over them stay in cache, and memory grows linearly with the length of a row.
BLOCK_SCORES = 1 << 20
# Factor of blocks on an accelerator, where launching kernels takes longer than computing a block of this size.
ACCELERATED = 16
# A longer row is split into blocks of at least this many queries; products of fewer rows are slow.
BLOCK_QUERIES = 128
# Largest number of probabilities kept for backward, per layer and kind of row; more are recomputed (a third of
# attention's time). Masks up to this size are kept for all layers; larger ones are recomputed block by block.
MAX_SAVED_SCORES = 1 << 22
# Forward and backward of `FusedRows` on a CPU take as long as small products at 512 tokens, and 1 / 1.3 of their time
# at 768. An accelerator uses `FusedRows` at any length: they launch a tenth of the kernels.
MIN_WIDTH = 768
# An accelerator uses `FusedRows` if the longest prompt has at most this many times the tokens of the longest response.
MAX_PROMPTS = 4


class PaddedRows(NamedTuple):
    """A range of the packed row and its arrangement as rows padded on the right."""

    start: int
    stop: int
    batch: int
    width: int
    slots: Int[Tensor, " tokens"] | None  # where each token sits in the flattened rows; None without padding

    def to_padded(self, packed: Float[Tensor, "all channels"]) -> Float[Tensor, "batch width channels"]:
        part = packed[self.start : self.stop]
        if self.slots is None:
            return part.view(self.batch, self.width, -1)
        flat = part.new_zeros(self.batch * self.width, part.shape[1])
        return flat.index_copy_(0, self.slots, part).view(self.batch, self.width, -1)

    def pack(self, rows: Float[Tensor, "batch width channels"]) -> Float[Tensor, "tokens channels"]:
        flat = rows.reshape(self.batch * self.width, -1)
        return flat if self.slots is None else flat.index_select(0, self.slots)

    def to(self, device: torch.device) -> PaddedRows:
        return self if self.slots is None else self._replace(slots=self.slots.to(device))


class FusedRows(NamedTuple):
    """The tokens of a packed row arranged as rows of a prompt and a response each, for PyTorch's fused kernel.

    The kernel stores no scores. Attention in a row is causal, so no real token attends to padding on the right. Each
    row computes its prompt's queries again, so rows are not used if prompts are much longer than responses.
    """

    tokens: Int[Tensor, "rows width"]  # the packed token at each place; 0 at padding
    places: Int[Tensor, " tokens"]  # of each packed token in the flattened rows; of a prompt, in its first row
    on_cpu: bool  # whether a CPU uses the rows, too: responses are long, and longer than their prompts

    @classmethod
    def build(
        cls, prompt_lengths: Int[Tensor, " prompts"], lengths: Int[Tensor, " rows"], prompt_index: Int[Tensor, " rows"]
    ) -> FusedRows | None:
        """Returns the rows, or None if every device should use products of small matrices instead.

        lengths: of the responses, which follow all prompts in the packed row. prompt_index: the prompt of each row.
        """
        longest, longest_prompt = (int(values.max()) if len(values) else 0 for values in (lengths, prompt_lengths))
        if longest * MAX_PROMPTS < max(1, longest_prompt):
            return None
        own = prompt_lengths[prompt_index, None]
        starts = prompt_lengths.sum() + (lengths.cumsum(0) - lengths)[:, None]
        column = torch.arange(int((own[:, 0] + lengths).max()), device=lengths.device)
        of_prompt = (prompt_lengths.cumsum(0) - prompt_lengths)[prompt_index, None] + column
        real = column < own + lengths[:, None]
        tokens = torch.where(column < own, of_prompt, starts + column - own).where(real, 0)
        slots = torch.arange(tokens.numel(), device=lengths.device).view_as(tokens)[real]
        count = int(prompt_lengths.sum() + lengths.sum())
        places = slots.new_full((count,), tokens.numel()).scatter_reduce(0, tokens[real], slots, "amin")
        if int(places.max()) == tokens.numel():  # a prompt without a response
            return None
        return cls(tokens, places, on_cpu=longest >= max(MIN_WIDTH, longest_prompt))

    def to(self, device: torch.device) -> FusedRows:
        return FusedRows(self.tokens.to(device), self.places.to(device), self.on_cpu)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, dtype: torch.dtype
    ) -> Float[Tensor, "1 tokens heads width"]:
        """Returns the attention of each packed token, as `packed_attention_forward` does, computed in `dtype`."""
        heads = [x.shape[1] for x in (query, key, value)]
        # As one tensor in at least float32: a GPU sums the gradients of a prompt's keys over its rows in this dtype.
        wide = torch.cat([query, key, value], 1)[0].transpose(0, 1)
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
        rows = wide.index_select(0, self.tokens.flatten()).to(dtype)
        rows = rows.to(product_dtype(rows)).unflatten(0, self.tokens.shape).transpose(1, 2)
        q, k, v = rows.split(heads, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.places)[None].to(dtype)


class _Block(NamedTuple):
    """A block of scores: `queries` of `rows` with the first `keys` keys, which are all that the last query sees."""

    rows: slice
    queries: slice
    keys: int


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Which packed token attends to which. Built once for a micro-batch, read by every layer.

    Tokens after the last response are fillers, which only batch-invariant models use (`logprobs.py`): no token attends
    to them, and their output is 0.
    """

    prompts: PaddedRows
    responses: PaddedRows
    prompt_index: Int[Tensor, " batch"]
    prompt_lengths: Int[Tensor, " prompts"]
    masks: dict[Any, Tensor]  # additive masks by kind of row and window: equal in every layer
    fused: FusedRows | None = None

    @classmethod
    def build(
        cls, prompt_mask: Bool[Tensor, "prompts _"], input_mask: Bool[Tensor, "batch _"], prompt_index: Tensor
    ) -> PackedLayout:
        """Returns the layout for masks of prompts and of response tokens that are run (all but each row's last)."""
        prompts, lengths = _rows(prompt_mask, 0), prompt_mask.sum(-1)
        fused = FusedRows.build(lengths, input_mask.sum(-1), prompt_index)
        return cls(prompts, _rows(input_mask, prompts.stop), prompt_index, lengths, {}, fused)

    def to(self, device: torch.device) -> PackedLayout:
        prompts, responses = self.prompts.to(device), self.responses.to(device)
        fused = None if self.fused is None else self.fused.to(device)
        return PackedLayout(prompts, responses, self.prompt_index.to(device), self.prompt_lengths.to(device), {}, fused)

    def mask(
        self, shared: bool, window: int | None, dtype: torch.dtype, block: _Block
    ) -> Float[Tensor, "rows 1 queries keys"]:
        """Returns the additive mask: 0 where a query attends, else the lowest number. Padded queries see a real key."""
        rows = self.responses if shared else self.prompts
        keys = rows.width + (self.prompts.width if shared else 0)
        if rows.batch * rows.width * keys > MAX_SAVED_SCORES:
            return self._mask(shared, window, dtype, block)
        kind = (shared, window, dtype)
        if kind not in self.masks:
            whole = _Block(slice(0, rows.batch), slice(0, rows.width), keys)
            self.masks[kind] = self._mask(shared, window, dtype, whole)
        return self.masks[kind][block.rows, :, block.queries, : block.keys]

    def _mask(self, shared: bool, window: int | None, dtype: torch.dtype, block: _Block) -> Tensor:
        device = self.prompt_lengths.device
        prompt = torch.arange(self.prompts.width, device=device)
        lengths = self.prompt_lengths[:, None]
        if shared:
            lengths = lengths[self.prompt_index[block.rows]]
            own = lengths + torch.arange(self.responses.width, device=device)
            keys = torch.cat([prompt.expand(len(lengths), -1), own], dim=1)
            real = torch.cat([prompt < lengths, torch.ones_like(own, dtype=torch.bool)], dim=1)
            queries = own
        else:
            lengths = lengths[block.rows]
            keys = queries = prompt.expand(len(lengths), -1)
            # A padded query must attend to something; the first token of its row is always real.
            real = prompt < lengths
        queries, keys, real = queries[:, block.queries], keys[:, : block.keys], real[:, : block.keys]
        distance = queries[:, :, None] - keys[:, None, :]
        allowed = (distance >= 0) & real[:, None, :]
        if window is not None:
            allowed &= distance < window
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _rows(mask: Tensor, start: int) -> PaddedRows:
    lengths = mask.sum(-1)
    count, width, total = len(lengths), int(lengths.max()) if len(lengths) else 0, int(lengths.sum())
    if total == count * width:
        return PaddedRows(start, start + total, count, width, None)
    slots = (torch.arange(width, device=mask.device) < lengths[:, None]).flatten().nonzero()[:, 0]
    return PaddedRows(start, start + total, count, width, slots)


class AttentionOptions(NamedTuple):
    """How scores are computed from queries and keys."""

    scaling: float
    softcap: float | None
    window: int | None
    dtype: torch.dtype  # of the products with values, and of probabilities that are kept


@torch.compiler.disable  # its blocks depend on the batch
def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query (1, heads, tokens, width), key and value (1, key heads, ...)."""
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    if kwargs.get("dropout"):
        raise TrimtabError("attention dropout is on: log-probs must not change between two forwards; set it to 0")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    options = AttentionOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window, dtype)
    with torch.autocast(device, enabled=False):  # it would round the float32 scores
        fused = layout.fused
        # In float64 the kernel's gradients are exact to 1e-8 only.
        is_plain = softcap is None and sliding_window is None and dtype != torch.float64
        if is_plain and fused is not None and (fused.on_cpu or on_accelerator(query.device)):
            return fused.attend(query, key, value, options.scaling, dtype), None
        return PackedAttention.apply(query, key, value, layout, options, _attend_packed), None


AttentionInterface.register(PACKED_IMPLEMENTATION, packed_attention_forward)
AttentionMaskInterface.register(PACKED_IMPLEMENTATION, sdpa_mask)


class PackedAttention(torch.autograd.Function):
    """The attention of one layer over a packed row.

    `attend` returns the output, and the probabilities of the blocks of each kind of row; the backward computes them
    again if there are none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        options: AttentionOptions,
        attend: Callable[..., tuple[Tensor, Sequence[Sequence[Tensor]]]],
    ) -> Tensor:
        sizes = key.shape[1], key.shape[3]  # key heads, and the width of a head
        q, k, v = (token_major(x, options.dtype) for x in (query, key, value))
        out, kept = attend(q, k, v, layout, options, sizes)
        ctx.save_for_backward(q, k, v, *(probability for part in kept for probability in part))
        ctx.kept = [len(part) for part in kept]
        ctx.layout, ctx.options, ctx.sizes = layout, options, sizes
        return out.view(1, len(q), -1, sizes[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        layout: PackedLayout = ctx.layout
        options: AttentionOptions = ctx.options
        grad = grads[0].reshape(q.shape).to(options.dtype)
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        to_q[layout.responses.stop :] = 0  # fillers: the backward of invariant attention is this one too
        for kind, count in zip(_kinds(layout, k, v), ctx.kept, strict=True):
            kept, saved = saved[:count], saved[count:]
            rows = kind.rows
            gq, gk, gv = _attend_backward(kind, rows.to_padded(grad), rows.to_padded(q), kept, options, ctx.sizes)
            to_q[rows.start : rows.stop] = rows.pack(gq)
            _collect(to_k, gk, rows, layout)
            _collect(to_v, gv, rows, layout)
        return *(x.view(1, len(x), -1, ctx.sizes[1]).transpose(1, 2) for x in (to_q, to_k, to_v)), None, None, None


def token_major(x: Tensor, dtype: torch.dtype) -> Float[Tensor, "tokens channels"]:
    return x[0].transpose(0, 1).to(dtype).flatten(1)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, options: AttentionOptions, sizes: tuple[int, int]
) -> tuple[Tensor, list[list[Tensor]]]:
    out, kept = torch.empty_like(q), []
    for kind in _kinds(layout, k, v):
        part, probabilities = _attend(kind, kind.rows.to_padded(q), options, sizes)
        out[kind.rows.start : kind.rows.stop] = kind.rows.pack(part)
        kept.append(probabilities)
    return out, kept


class _Kind(NamedTuple):
    """Rows of queries with the padded keys and values they attend to; `shared`: the prompt's keys come first."""

    layout: PackedLayout
    rows: PaddedRows
    keys: Float[Tensor, "rows keys channels"]
    values: Float[Tensor, "rows keys channels"]
    shared: bool


def _kinds(layout: PackedLayout, k: Tensor, v: Tensor) -> list[_Kind]:
    """Returns the two kinds of rows: prompts attending to themselves, responses to their prompt and themselves."""
    prompts, responses = layout.prompts, layout.responses
    k_prompt, v_prompt = prompts.to_padded(k), prompts.to_padded(v)
    kinds = [_Kind(layout, prompts, k_prompt, v_prompt, False)]
    if responses.width:
        keys = torch.cat([k_prompt.index_select(0, layout.prompt_index), responses.to_padded(k)], dim=1)
        values = torch.cat([v_prompt.index_select(0, layout.prompt_index), responses.to_padded(v)], dim=1)
        kinds.append(_Kind(layout, responses, keys, values, True))
    return kinds


def _collect(to: Tensor, grad: Tensor, rows: PaddedRows, layout: PackedLayout) -> None:
    """Adds the gradient of padded keys or values to the packed one; a prompt's is summed over its responses."""
    prompts = layout.prompts
    if rows is not prompts:
        shared = grad.new_zeros(prompts.batch, prompts.width, grad.shape[2], dtype=torch.float32)
        shared.index_add_(0, layout.prompt_index, grad[:, : prompts.width].float())
        to[prompts.start : prompts.stop] += prompts.pack(shared).to(to.dtype)
        grad = grad[:, prompts.width :]
    to[rows.start : rows.stop] += rows.pack(grad)


def working_blocks(rows: int, heads: int, queries: int, keys: int, device: torch.device) -> list[_Block]:
    """Returns blocks of as many whole rows as fit, or of a part of one row with the keys that its last query sees."""
    per_row, size = heads * queries * keys, BLOCK_SCORES * (ACCELERATED if on_accelerator(device) else 1)
    if per_row <= size or queries <= BLOCK_QUERIES:
        step = max(1, size // max(per_row, 1))
        starts = range(0, rows, step)
        return [_Block(slice(start, min(start + step, rows)), slice(0, queries), keys) for start in starts]
    step = max(BLOCK_QUERIES, size // (heads * keys))
    ends = [(start, min(start + step, queries)) for start in range(0, queries, step)]
    return [
        _Block(slice(row, row + 1), slice(start, stop), keys - queries + stop)
        for row in range(rows)
        for start, stop in ends
    ]


def fold_heads(x: Tensor, key_heads: int, width: int) -> Float[Tensor, "rows_x_key_heads group_x_time width"]:
    """Folds the query heads that share a key head into the rows of one product."""
    rows, time, _ = x.shape
    return x.view(rows, time, key_heads, -1, width).permute(0, 2, 3, 1, 4).reshape(rows * key_heads, -1, width)


def unfold_heads(x: Tensor, rows: int, time: int) -> Float[Tensor, "rows time channels"]:
    key_heads, width = x.shape[0] // rows, x.shape[2]
    return x.view(rows, key_heads, -1, time, width).permute(0, 3, 1, 2, 4).reshape(rows, time, -1)


def _scores(q: Tensor, k: Tensor, mask: Tensor, options: AttentionOptions) -> Float[Tensor, "rows heads queries keys"]:
    """Returns the masked scores of folded queries and keys, in the mask's dtype."""
    queries, keys = mask.shape[2:]
    scores = torch.bmm(q.to(mask.dtype), k.to(mask.dtype).transpose(1, 2)).mul_(options.scaling)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    return scores.view(len(mask), -1, queries, keys).add_(mask)


def _attend(kind: _Kind, q: Tensor, options: AttentionOptions, sizes: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """Returns the output rows, and the probabilities of every block if they are few enough to keep."""
    rows, queries, channels = q.shape
    heads, keys = channels // sizes[1], kind.keys.shape[1]
    out, kept = torch.empty_like(q), []
    for block in working_blocks(rows, heads, queries, keys, q.device):
        fq, fk, fv, mask = _inputs(kind, q, options, sizes, block)
        probability = _scores(fq, fk, mask, options).softmax(-1).to(options.dtype)
        product = batched_product(probability.view(len(fq), -1, block.keys), fv)
        out[block.rows, block.queries] = unfold_heads(product, len(mask), mask.shape[2])
        if rows * heads * queries * keys <= MAX_SAVED_SCORES:
            kept.append(probability)
    return out, kept


def _inputs(
    kind: _Kind, q: Tensor, options: AttentionOptions, sizes: tuple[int, int], block: _Block
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns folded queries, keys and values of a block, and its mask."""
    keys, values = kind.keys[block.rows, : block.keys], kind.values[block.rows, : block.keys]
    fq, fk, fv = (fold_heads(x, *sizes) for x in (q[block.rows, block.queries], keys, values))
    exact = torch.float64 if options.dtype == torch.float64 else torch.float32
    return fq, fk, fv, kind.layout.mask(kind.shared, options.window, exact, block)


def _attend_backward(
    kind: _Kind, grad: Tensor, q: Tensor, kept: list[Tensor], options: AttentionOptions, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    rows, queries, channels = q.shape
    blocks = working_blocks(rows, channels // sizes[1], queries, kind.keys.shape[1], q.device)
    parted = len(blocks) > 0 and blocks[0].queries.stop < queries
    to_q = torch.empty_like(q)
    # Gradients of keys are summed over parts of a row; in 16 bits the sum would lose digits.
    sums = torch.float32 if parted and options.dtype != torch.float64 else options.dtype
    to_k = torch.zeros_like(kind.keys, dtype=sums)
    to_v = torch.zeros_like(kind.values, dtype=sums)
    for index, block in enumerate(blocks):
        fq, fk, fv, mask = _inputs(kind, q, options, sizes, block)
        fg = fold_heads(grad[block.rows, block.queries], *sizes)
        slope = None
        if not kept or options.softcap is not None:
            scores = _scores(fq, fk, mask, options)
            if options.softcap is not None:
                slope = 1 - ((scores - mask) / options.softcap).square_()
            probability = scores.softmax(-1).to(options.dtype)
            del scores
        else:
            probability = kept[index]
        flat = probability.view(len(fq), -1, block.keys)
        gv = batched_product(flat.transpose(1, 2), fg)
        inner = batched_product(fg, fv.transpose(1, 2)).view_as(probability).to(mask.dtype)
        inner = torch.ops.aten._softmax_backward_data(inner, probability.to(mask.dtype), -1, mask.dtype)
        if slope is not None:
            inner.mul_(slope)
        inner = inner.mul_(options.scaling).to(options.dtype).view_as(flat)
        to_q[block.rows, block.queries] = unfold_heads(batched_product(inner, fk), len(mask), mask.shape[2])
        gk = batched_product(inner.transpose(1, 2), fq)
        to_k[block.rows, : block.keys] += unfold_heads(gk, len(mask), block.keys)
        to_v[block.rows, : block.keys] += unfold_heads(gv, len(mask), block.keys)
    return to_q, to_k, to_v
