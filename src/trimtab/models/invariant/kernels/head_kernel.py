"""Log-probs of tokens in Triton, from logits or hidden states, without holding tokens x vocabulary."""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.models.invariant.kernels.matmul_kernel import product
from trimtab.models.invariant.kernels.runtime import LAUNCH, jit, parts, power_of_2, require, tl

# Words whose exponentials are summed at once. Fixed: the sum's order is that of the tiles.
WORDS = 1024
# Logits alive at once: 16 MiB in bfloat16, which a large GPU's cache holds. A multiple of WORDS, so that tiles lie at
# the same words as in whole logits.
SEGMENT, TOKENS = 8 * WORDS, 1024
# Rows of one program that adds up tiles.
ROWS = 64
WARPS = 4


def logsumexp(
    logits: Float[Tensor, "tokens vocabulary"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> Float[Tensor, " tokens"]:
    """Log of the sum of `exp((logits + bias) / temperature)` of each row, in float32. No gradient.

    One program takes one row's tile of `WORDS` words and notes its maximum and its sum relative to it. Then each row's
    tiles are added in order, lane by lane, relative to the row's maximum. Tiles lie at fixed words, so the order never
    depends on how many rows there are or into which segments the vocabulary was cut; one program per whole row would
    leave a GPU idle while it decodes. (The cut of a row over programs by its width alone: vllm-project/vllm#49367.)
    Words of -inf change nothing, at the end of a row or within.
    """
    require(logits)
    notes = _notes(len(logits), logits.shape[1], logits.device)
    _note(logits, bias, temperature, notes, 0)
    return _add_up(*notes)


def add_exponentials(
    total: Float[Tensor, " tokens"], logits: Float[Tensor, "tokens words"]
) -> Float[Tensor, " tokens"]:
    """`logaddexp(total, logsumexp(logits))` of each row in float32: further words of a sum begun before. No gradient.

    For a head that takes the vocabulary in pieces of its own: pieces must begin at the same words in sampler and
    trainer. `total` is added first, then the words' tiles in order.
    """
    require(total, logits)
    notes = _notes(len(logits), logits.shape[1], logits.device)
    _note(logits, None, 1.0, notes, 0)
    # What was summed before stands as one tile more: its maximum and a sum of 1 relative to it.
    return _add_up(
        *(torch.cat([first[None], note]) for first, note in zip((total, torch.ones_like(total)), notes, strict=True))
    )


def chosen_logps(
    logits: Float[Tensor, "tokens vocabulary"],
    ids: Int[Tensor, " tokens"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each row's id under softmax((logits + bias) / temperature), and the row's `logsumexp`. No gradient.

    For a sampler that holds its logits. Equal bits to `head_logps` of the hidden states they came from.
    """
    total = logsumexp(logits, temperature, bias)
    return _exact(logits.gather(1, ids[:, None])[:, 0], bias, ids, temperature) - total, total


def log_softmax(
    logits: Float[Tensor, "tokens vocabulary"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> Float[Tensor, "tokens vocabulary"]:
    """Log-softmax of (logits + bias) / temperature over each row, in float32. No gradient. See `logsumexp`."""
    return _exact(logits, bias, slice(None), temperature) - logsumexp(logits, temperature, bias)[:, None]


def head_logps(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    ids: Int[Tensor, " tokens"],
    temperature: float = 1.0,
    bias: Float[Tensor, " vocabulary"] | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`chosen_logps(product(hidden, weight), ids, temperature, bias)`, bit for bit, in parts of tokens x vocabulary.

    The two kernels are the same ones, not fused: in a fused kernel the sum over words would follow the product's
    layout in registers, another order than the sampler's. A part's logits pass through the cache; what is kept for a
    token is two numbers for each `WORDS` words.
    """
    require(hidden, weight)
    vocabulary = len(weight)
    logp, total = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
    for first in range(0, len(hidden), TOKENS):
        rows = slice(first, first + TOKENS)
        some, own = hidden[rows], ids[rows]
        notes = _notes(len(some), vocabulary, hidden.device)
        chosen = torch.zeros(len(some), dtype=torch.float32, device=hidden.device)
        for start in range(0, vocabulary, SEGMENT):
            words = slice(start, min(start + SEGMENT, vocabulary))
            own_bias = None if bias is None else bias[words]
            logits = product(some, weight[words])
            _note(logits, own_bias, temperature, notes, start // WORDS)
            local = (own - start).clamp(0, logits.shape[1] - 1)
            picked = _exact(logits.gather(1, local[:, None])[:, 0], own_bias, local, temperature)
            chosen = torch.where((own >= start) & (own < words.stop), picked, chosen)
        total[rows] = _add_up(*notes)
        logp[rows] = chosen - total[rows]
    return logp, total


def _exact(logits: Tensor, bias: Tensor | None, words: Tensor | slice, temperature: float) -> Tensor:
    exact = logits.float() if bias is None else logits.float() + bias[words].float()
    return exact / temperature


def _notes(tokens: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each tile's maximum and sum, a row of them for all tokens: adding up then reads in order."""
    shape = (parts(vocabulary, WORDS), tokens)
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(
        shape, dtype=torch.float32, device=device
    )


def _note(logits: Tensor, bias: Tensor | None, temperature: float, notes: tuple[Tensor, Tensor], tile: int) -> None:
    """Fill the notes of these logits' tiles, the first of which is `tile`."""
    if temperature <= 0:
        raise TrimtabError(f"log-probs at temperature {temperature}; it must be above 0")
    tokens, words = logits.shape
    if not tokens:
        return
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    largest, total = (note[tile:] for note in notes)
    _tiles[(tokens, parts(words, WORDS))](
        *(logits, logits if bias is None else bias, largest, total),
        *(tokens, words, logits.stride(0), temperature, bias is not None, WORDS),
        num_warps=WARPS,
        **LAUNCH,
    )


def _add_up(largest: Tensor, total: Tensor) -> Float[Tensor, " tokens"]:
    tiles, tokens = largest.shape
    out = torch.empty(tokens, dtype=torch.float32, device=largest.device)
    if tokens:
        _rows[(parts(tokens, ROWS),)](
            largest, total, out, tokens, tiles, ROWS, num_warps=power_of_2(ROWS // 32), **LAUNCH
        )
    return out


# Logits start anywhere and lie at any distance; a variant for aligned ones would sum in another order.
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
