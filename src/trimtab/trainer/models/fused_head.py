"""Log-prob and entropy of given tokens from hidden states, computed in tiles without storing all logits.

Forward and backward iterate over tiles of tokens x vocabulary. A small micro-batch keeps its logits for the backward.
In a larger one only one tile of logits exists at a time, and the backward recomputes it. The sum of exponentials is
updated tile by tile (online softmax, Milakov and Gimelshein 2018), so that the vocabulary can be split as well as the
tokens: each row of the weight is read once and its gradient written once, not accumulated for every group of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.trainer.models.architecture import ModelParts
from trimtab.trainer.models.invariant import add_exponentials, batch_invariant_matmul, compute_dtype, pack_weight
from trimtab.trainer.models.matmul import on_accelerator, product
from trimtab.trainer.models.noise import normals

# One tile: 4 MiB in float32. Products of smaller tiles are slow, larger tiles do not fit the cache.
TILE_TOKENS = 512
TILE_VOCABULARY = 2048
# Factor of both on an accelerator, where launching a tile's dozen kernels takes longer than computing a small tile.
ACCELERATED = 4
# Logits of up to this many bytes are kept: computing them again is about a quarter of the head's work.
KEPT_LOGITS = 1 << 28


class _Noise(NamedTuple):
    """Noise on the logits of one head (ALP's logits-only variant): `exp(log_sigma)` times normals of `seed`."""

    head: object  # the only head that gets the noise; other heads may be scored too
    log_sigma: Float[Tensor, "1"]
    sigma: float  # exp(log_sigma) as a number, so that no forward waits for the device
    seed: int


_noise: ContextVar[_Noise | None] = ContextVar("noise", default=None)


@contextmanager
def perturb_logits(head: object, log_sigma: Float[Tensor, "1"], sigma: float, seed: int) -> Iterator[None]:
    """Perturbs the logits of `head` (`ModelParts.head`) in every `token_scores` inside.

    Adds `sigma`, which is `exp(log_sigma)`, times N(0, 1) to each logit, after the soft cap and before the temperature.
    The noise is drawn tile by tile from `seed`. The backward draws it again, and may run outside.
    """
    token = _noise.set(_Noise(head, log_sigma, sigma, seed))
    try:
        yield
    finally:
        _noise.reset(token)


class _ScoreOptions(NamedTuple):
    """How products become logits, and the dtypes of both."""

    temperature: float
    softcap: float | None
    product_dtype: torch.dtype
    dtype: torch.dtype  # of everything after the products
    entropy: bool
    squares: bool
    sigma: float  # of noise on the logits; 0 for none
    seed: int
    invariant: bool  # whether a token's score must not depend on other tokens, bit for bit
    keep: bool  # whether logits are kept for the backward


class HeadScores(NamedTuple):
    """Log-prob of one id at each position; on request the entropy (nats), log-probs of further ids, and squares.

    A further id of -1 has log-prob -inf. `squares` is the sum of p^2 over the vocabulary, without gradient.
    """

    logp: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"] | None
    further: Float[Tensor, "tokens n"] | None
    squares: Float[Tensor, " tokens"] | None


def token_scores(
    hidden: Float[Tensor, "tokens hidden"],
    ids: Int[Tensor, " tokens"],
    model: ModelParts,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    kept: Int[Tensor, "tokens k"] | None = None,
    further: Int[Tensor, "tokens n"] | None = None,
    squares: bool = False,
) -> HeadScores:
    """Returns the log-prob of `ids` and of `further` ids under softmax(logits / temperature), and the rest on request.

    Products are computed in autocast's dtype if it is enabled, everything after them in float32 (or float64).
    `kept` restricts each token's distribution to a set of ids, padded with -1.
    """
    noise = _noise.get()
    if noise is not None and noise.head is not model.head:
        noise = None
    log_sigma = None if noise is None else noise.log_sigma
    product_dtype = _product_dtype(hidden, model)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or model.weight.requires_grad)
    options = _ScoreOptions(
        temperature,
        model.softcap,
        product_dtype=product_dtype,
        dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32,
        entropy=entropy,
        squares=squares,
        sigma=0.0 if noise is None else noise.sigma,
        seed=0 if noise is None else noise.seed,
        invariant=model.invariant,
        keep=needs_grad and len(ids) * len(model.weight) * product_dtype.itemsize <= KEPT_LOGITS,
    )
    chosen = ids[:, None] if further is None else torch.cat([ids[:, None], further], dim=1)
    logps, entropies, sums = _TiledScores.apply(hidden, model.weight, log_sigma, chosen, kept, options)
    others = None if further is None else torch.where(further >= 0, logps[:, 1:], -torch.inf)
    return HeadScores(logps[:, 0], entropies if entropy else None, others, sums if squares else None)


def _product_dtype(hidden: Tensor, model: ModelParts) -> torch.dtype:
    if model.invariant:  # its residual stream is wider than its products
        return compute_dtype(model.weight)
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _TiledScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        _log_sigma: Tensor | None,  # an input only to receive its gradient; its value is in the options
        ids: Tensor,
        kept: Tensor | None,
        options: _ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = hidden.shape[0]
        # Log of the sum of exponentials so far, and of their squares. Starts finite, because a tile without any kept
        # id would compute -inf - -inf.
        lowest = torch.finfo(options.dtype).min / 2
        logsumexp, logsumexp_squares = hidden.new_full((2, count), lowest, dtype=options.dtype)
        chosen = hidden.new_zeros(ids.shape, dtype=options.dtype)  # logit of each id
        entropy = hidden.new_zeros(count, dtype=options.dtype)  # entropy so far
        hidden_cast = hidden.to(options.product_dtype)
        multiply, products = batch_invariant_matmul if options.invariant else product, []
        for vocab, columns in _vocabulary(weight, options):
            for tokens in _tiles(count, TILE_TOKENS, hidden.device):
                noise = _draw(tokens, vocab, options, hidden.device)
                raw = multiply(hidden_cast[tokens], columns)
                if options.keep:
                    products.append(raw)
                logits, _ = _logits(raw, noise, options)
                chosen[tokens] += _pick(logits, ids[tokens], vocab)
                if kept is not None:
                    logits.masked_fill_(~sampling_mask_tile(kept[tokens], vocab), -torch.inf)
                if options.squares:
                    logsumexp_squares[tokens] = _add(logsumexp_squares[tokens], 2 * logits, options)
                old, new = logsumexp[tokens], _add(logsumexp[tokens], logits, options)
                if options.entropy:
                    # Relative to the running total: sums of raw logits would cancel.
                    logits.sub_(new[:, None])
                    entropy_part = logits.exp().mul_(logits.masked_fill_(logits == -torch.inf, 0)).sum(-1)
                    shift = old - new
                    entropy[tokens] = shift.exp() * (entropy[tokens] - shift) - entropy_part
                logsumexp[tokens] = new
        ctx.save_for_backward(hidden, weight, ids, kept, logsumexp, entropy, *products)
        ctx.options = options
        squares = (logsumexp_squares - 2 * logsumexp).exp()
        ctx.mark_non_differentiable(squares)
        return chosen - logsumexp[:, None], entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, kept, logsumexp, entropy, *products = ctx.saved_tensors
        again = iter(products)
        options: _ScoreOptions = ctx.options
        need_hidden, need_weight, need_log_sigma = ctx.needs_input_grad[:3]
        hidden_cast = hidden.to(options.product_dtype)
        to_hidden = torch.zeros_like(hidden, dtype=options.dtype) if need_hidden else None
        to_weight = torch.empty_like(weight) if need_weight else None
        to_log_sigma = hidden.new_zeros(1, dtype=options.dtype) if need_log_sigma else None
        for vocab, columns in _vocabulary(weight, options):
            gathered = torch.zeros(columns.shape, dtype=options.dtype, device=weight.device) if need_weight else None
            for tokens in _tiles(len(hidden), TILE_TOKENS, hidden.device):
                noise = _draw(tokens, vocab, options, hidden.device)
                raw = next(again) if products else product(hidden_cast[tokens], columns)
                logits, slope = _logits(raw, noise, options)
                if kept is not None:
                    logits.masked_fill_(~sampling_mask_tile(kept[tokens], vocab), -torch.inf)
                grad_logp, grad_entropy = grads[0][tokens], grads[1][tokens, None]
                grad_logp_sum = grad_logp.sum(1, keepdim=True)
                logp = logits.sub_(logsumexp[tokens, None])
                grad = _slope(logp, grad_logp_sum, grad_entropy, entropy[tokens, None], options)
                _add_at(grad, ids[tokens], vocab, grad_logp)
                if to_log_sigma is not None and noise is not None:
                    to_log_sigma += torch.dot(grad.view(-1), noise.view(-1)) * (options.sigma / options.temperature)
                if slope is not None:
                    grad.mul_(slope)
                if options.temperature != 1:
                    grad.div_(options.temperature)
                grad = grad.to(options.product_dtype)
                if to_hidden is not None:
                    to_hidden[tokens] += product(grad, columns.T)
                if gathered is not None:
                    gathered += product(grad.T, hidden_cast[tokens].T)
            if to_weight is not None and gathered is not None:
                to_weight[vocab] = gathered
        return to_hidden, to_weight, to_log_sigma, None, None, None


def _add(total: Tensor, logits: Tensor, options: _ScoreOptions) -> Float[Tensor, " tokens"]:
    """Returns log(exp(total) + sum(exp(logits))) for each token of a tile."""
    return add_exponentials(total, logits) if options.invariant else torch.logaddexp(total, logits.logsumexp(-1))


def _vocabulary(weight: Tensor, options: _ScoreOptions) -> Iterator[tuple[slice, Tensor]]:
    for vocab in _tiles(len(weight), TILE_VOCABULARY, weight.device):
        yield vocab, weight[vocab].to(options.product_dtype)


def _tiles(count: int, size: int, device: torch.device) -> list[slice]:
    """Returns the slices of tokens or of the vocabulary; `size` is the length of a slice on a CPU."""
    step = size * (ACCELERATED if on_accelerator(device) else 1)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _draw(
    tokens: slice, vocab: slice, options: _ScoreOptions, device: torch.device
) -> Float[Tensor, "tokens vocab"] | None:
    """Returns the standard normals of one tile, or None without noise."""
    if options.sigma == 0:
        return None
    shape, stream = (tokens.stop - tokens.start, vocab.stop - vocab.start), (tokens.start, vocab.start)
    return normals(shape, options.seed, stream, device=device, dtype=options.dtype)


def _logits(
    raw: Float[Tensor, "tokens vocab"], noise: Tensor | None, options: _ScoreOptions
) -> tuple[Float[Tensor, "tokens vocab"], Float[Tensor, "tokens vocab"] | None]:
    """Returns logits / temperature, a copy if `raw` is kept, and the derivative of the soft cap, if any."""
    logits = raw.to(options.dtype, copy=options.keep)
    slope = None
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(options.softcap)
    if noise is not None:
        logits.add_(noise, alpha=options.sigma)
    if options.temperature != 1:
        logits.div_(options.temperature)
    return logits, slope


def _slope(
    logp: Float[Tensor, "tokens vocab"],
    grad_logp: Float[Tensor, "tokens 1"],
    grad_entropy: Float[Tensor, "tokens 1"],
    entropy: Float[Tensor, "tokens 1"],
    options: _ScoreOptions,
) -> Float[Tensor, "tokens vocab"]:
    """Returns the gradient through each logit's probability: -p grad_logp - p (log p + entropy) grad_entropy."""
    if not options.entropy:
        return logp.exp_().mul_(-grad_logp)
    probability = logp.exp()
    logp = logp.masked_fill_(logp == -torch.inf, 0)  # a probability of 0 contributes 0, not nan
    return probability.mul_(logp.add_(entropy).mul_(-grad_entropy).sub_(grad_logp))


def _pick(logits: Tensor, ids: Tensor, vocab: slice) -> Float[Tensor, "tokens n"]:
    """Returns the logit of each of a token's ids; 0 for ids outside of this tile."""
    local = ids - vocab.start
    inside = (local >= 0) & (local < logits.shape[1])
    return logits.gather(1, local.clamp(0, logits.shape[1] - 1)).where(inside, 0)


def _add_at(grad: Tensor, ids: Tensor, vocab: slice, values: Float[Tensor, "tokens n"]) -> None:
    local = ids - vocab.start
    inside = (local >= 0) & (local < grad.shape[1])
    grad.scatter_add_(1, local.clamp(0, grad.shape[1] - 1), values.where(inside, 0))


def sampling_mask_tile(kept: Int[Tensor, "tokens k"], vocab: slice) -> Bool[Tensor, "tokens vocab"]:
    """Returns a mask that is True for the ids of this tile that are in a token's sampling mask."""
    size = vocab.stop - vocab.start
    local = kept - vocab.start
    # Ids of other tiles and padding go to an additional last column.
    local = local.where((local >= 0) & (local < size), size)
    return torch.zeros(len(kept), size + 1, dtype=torch.bool, device=kept.device).scatter_(1, local, True)[:, :size]


@torch.no_grad()
def pack_head(model: ModelParts) -> list[Tensor]:
    """Returns the tiles of the head's weight, in the layout that `head_logits` multiplies fastest."""
    weight = model.weight
    return [pack_weight(weight[vocab]) for vocab in _tiles(len(weight), TILE_VOCABULARY, weight.device)]


@torch.no_grad()
def head_logits(
    hidden: Float[Tensor, "rows hidden"], model: ModelParts, tiles: Sequence[Tensor]
) -> Float[Tensor, "rows vocabulary"]:
    """Returns the logits that `token_scores` computes tile by tile, before the temperature and without gradient.

    The head must have no soft cap, as in models with invariant numerics.
    """
    hidden_cast = hidden.to(model.weight.dtype)
    exact = torch.promote_types(hidden_cast.dtype, torch.float32)
    return torch.cat([batch_invariant_matmul(hidden_cast, columns).to(exact) for columns in tiles], 1)


def log_probs(
    logits: Float[Tensor, "rows vocabulary"],
    ids: Int[Tensor, " rows"],
    temperature: float,
    kept: Int[Tensor, "rows k"] | None = None,
) -> Float[Tensor, " rows"]:
    """Returns log-probs of `ids` by the operations of `token_scores`, with the same `kept`."""
    logsumexp = logits.new_full((len(logits),), torch.finfo(logits.dtype).min / 2)
    for vocab in _tiles(logits.shape[1], TILE_VOCABULARY, logits.device):
        tile = logits[:, vocab]
        tile = tile / temperature if temperature != 1 or kept is not None else tile  # a copy if it is changed below
        if kept is not None:
            tile.masked_fill_(~sampling_mask_tile(kept, vocab), -torch.inf)
        logsumexp = add_exponentials(logsumexp, tile)
    return logits.gather(1, ids[:, None])[:, 0] / temperature - logsumexp
