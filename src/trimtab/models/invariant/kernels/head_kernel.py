"""Batch-invariant log-probs of tokens in Triton, from logits, or from hidden states without storing all logits."""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.models.invariant.kernels.matmul_kernel import batch_invariant_matmul
from trimtab.models.invariant.kernels.runtime import LAUNCH, ceil_divide, check_operands, jit, power_of_2, tl

# Vocabulary entries of one tile. Fixed, because the order of the sum is that of the tiles.
WORDS = 1024
# Logits that exist at once: 16 MiB in bfloat16, which fits the cache of a large GPU. A multiple of WORDS, so that tiles
# start at the same entries as in complete logits.
SEGMENT, TOKENS = 8 * WORDS, 1024
# Rows of one program that sums tiles.
ROWS = 64
WARPS = 4


def logsumexp(
    logits: Float[Tensor, "tokens vocabulary"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> Float[Tensor, " tokens"]:
    """Returns the log of the sum of `exp((logits + bias) / temperature)` of each row, in float32. It has no gradient.

    One program reads one row's tile of `WORDS` vocabulary entries and stores its maximum and its sum relative to the
    maximum. Then each row's tiles are added in order, relative to the row's maximum. Tiles start at fixed entries, so
    that the order depends neither on the number of rows nor on the segments of the vocabulary. One program for a whole
    row would leave a GPU idle in decoding. (Splitting a row over programs by its width alone: vllm-project/vllm#49367.)
    Entries of -inf change nothing, at the end of a row or within.
    """
    check_operands(logits)
    partials = _allocate_tiles(len(logits), logits.shape[1], logits.device)
    _reduce_tiles(logits, bias, temperature, partials, 0)
    return _add_up(*partials)


def add_exponentials(
    total: Float[Tensor, " tokens"], logits: Float[Tensor, "tokens words"]
) -> Float[Tensor, " tokens"]:
    """Returns `logaddexp(total, logsumexp(logits))` of each row in float32. It has no gradient.

    For a head that splits the vocabulary itself; its parts must start at the same entries in sampler and trainer.
    `total` is added first, then the tiles in order.
    """
    check_operands(total, logits)
    partials = _allocate_tiles(len(logits), logits.shape[1], logits.device)
    _reduce_tiles(logits, None, 1.0, partials, 0)
    # The previous sum becomes an additional first tile: its maximum, and a sum of 1 relative to it.
    return _add_up(
        *(
            torch.cat([first[None], partial])
            for first, partial in zip((total, torch.ones_like(total)), partials, strict=True)
        )
    )


def chosen_logps(
    logits: Float[Tensor, "tokens vocabulary"],
    ids: Int[Tensor, " tokens"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Returns the log-prob of each row's id under softmax((logits + bias) / temperature), and the row's `logsumexp`.

    For a sampler that stores its logits; the bits equal those of `head_logps` of the hidden states they were computed
    from. It has no gradient.
    """
    total = logsumexp(logits, temperature, bias)
    return _exact(logits.gather(1, ids[:, None])[:, 0], bias, ids, temperature) - total, total


def log_softmax(
    logits: Float[Tensor, "tokens vocabulary"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> Float[Tensor, "tokens vocabulary"]:
    """Returns the log-softmax of (logits + bias) / temperature over each row, in float32. It has no gradient."""
    return _exact(logits, bias, slice(None), temperature) - logsumexp(logits, temperature, bias)[:, None]


def head_logps(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    ids: Int[Tensor, " tokens"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Returns `chosen_logps(batch_invariant_matmul(hidden, weight), ...)` bit for bit, without storing all logits.

    The two kernels are the same and not fused: a fused kernel would sum in the order of the product's layout in
    registers, not in the sampler's. The logits of a part stay in the cache; two numbers are stored for each token and
    tile.
    """
    check_operands(hidden, weight)
    vocabulary = len(weight)
    logp, total = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
    for first in range(0, len(hidden), TOKENS):
        rows = slice(first, first + TOKENS)
        part, part_ids = hidden[rows], ids[rows]
        partials = _allocate_tiles(len(part), vocabulary, hidden.device)
        chosen = torch.zeros(len(part), dtype=torch.float32, device=hidden.device)
        for start in range(0, vocabulary, SEGMENT):
            words = slice(start, min(start + SEGMENT, vocabulary))
            part_bias = None if bias is None else bias[words]
            logits = batch_invariant_matmul(part, weight[words])
            _reduce_tiles(logits, part_bias, temperature, partials, start // WORDS)
            local = (part_ids - start).clamp(0, logits.shape[1] - 1)
            picked = _exact(logits.gather(1, local[:, None])[:, 0], part_bias, local, temperature)
            chosen = torch.where((part_ids >= start) & (part_ids < words.stop), picked, chosen)
        total[rows] = _add_up(*partials)
        logp[rows] = chosen - total[rows]
    return logp, total


def _exact(logits: Tensor, bias: Tensor | None, words: Tensor | slice, temperature: float) -> Tensor:
    exact = logits.float() if bias is None else logits.float() + bias[words].float()
    return exact / temperature


def _allocate_tiles(tokens: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocates the maximum and the sum of each tile, (tiles, tokens): `_add_up` then reads contiguous memory."""
    shape = (ceil_divide(vocabulary, WORDS), tokens)
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(
        shape, dtype=torch.float32, device=device
    )


def _reduce_tiles(
    logits: Tensor, bias: Tensor | None, temperature: float, partials: tuple[Tensor, Tensor], tile: int
) -> None:
    """Computes maximum and sum of the tiles of these logits; `tile` is the index of the first one."""
    if temperature <= 0:
        raise TrimtabError(f"log-probs at temperature {temperature}; it must be above 0")
    tokens, words = logits.shape
    if not tokens:
        return
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    largest, total = (partial[tile:] for partial in partials)
    _tiles[(tokens, ceil_divide(words, WORDS))](
        *(logits, logits if bias is None else bias, largest, total),
        *(tokens, words, logits.stride(0), temperature, bias is not None, WORDS),
        num_warps=WARPS,
        **LAUNCH,
    )


def _add_up(largest: Tensor, total: Tensor) -> Float[Tensor, " tokens"]:
    tiles, tokens = largest.shape
    out = torch.empty(tokens, dtype=torch.float32, device=largest.device)
    if tokens:
        _rows[(ceil_divide(tokens, ROWS),)](
            largest, total, out, tokens, tiles, ROWS, num_warps=power_of_2(ROWS // 32), **LAUNCH
        )
    return out


# Logits have any address and stride; a variant for aligned ones would sum in another order.
@jit(
    do_not_specialize=["tokens", "words", "distance"],
    do_not_specialize_on_alignment=["logits", "bias", "largest", "total"],
)
@no_type_check
def _tiles(
    logits, bias, largest, total, tokens, words, distance, temperature, BIASED: tl.constexpr, WORDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    word = tile * WORDS + tl.arange(0, WORDS)
    inside = word < words
    value = tl.load(logits + row * distance + word, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + word, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, value / temperature, float("-inf"))
    top = tl.max(value, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(largest + tile * tokens + row, top)
    tl.store(total + tile * tokens + row, tl.sum(tl.exp(value - shift), axis=0))


@jit(do_not_specialize=["tokens", "tiles"], do_not_specialize_on_alignment=["largest", "total", "out"])
@no_type_check
def _rows(largest, total, out, tokens, tiles, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    for tile in range(0, tiles):
        top = tl.maximum(top, tl.load(largest + tile * tokens + row, mask=inside, other=0.0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    added = tl.zeros((ROWS,), dtype=tl.float32)
    for tile in range(0, tiles):
        part = tl.load(total + tile * tokens + row, mask=inside, other=1.0)
        added += part * tl.exp(tl.load(largest + tile * tokens + row, mask=inside, other=0.0) - shift)
    tl.store(out + row, shift + tl.log(added), mask=inside)
