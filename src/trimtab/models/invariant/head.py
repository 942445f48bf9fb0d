"""The sampler's batch-invariant head: logits of a few rows, log-probs by the steps of `head_scores`."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trimtab.models.architecture import Parts
from trimtab.models.fused_head import TILE_VOCABULARY, allowed
from trimtab.models.invariant.linear import rows_product
from trimtab.models.invariant.sums import add_exponentials


@torch.no_grad()
def logits_of(hidden: Float[Tensor, "rows hidden"], model: Parts) -> Float[Tensor, "rows vocabulary"]:
    """What `head_scores` computes tile by tile, side by side, before the temperature. No gradient."""
    rough = hidden.to(model.weight.dtype)
    exact = torch.promote_types(rough.dtype, torch.float32)
    logits = rough.new_empty(len(rough), len(model.weight), dtype=exact)
    for columns, tile in zip(model.weight.split(TILE_VOCABULARY), logits.split(TILE_VOCABULARY, -1), strict=True):
        tile.copy_(rows_product(rough, columns))
    return logits


def log_probs(
    logits: Float[Tensor, "rows vocabulary"],
    ids: Int[Tensor, " rows"],
    temperature: float,
    kept: Int[Tensor, "rows k"] | None = None,
) -> Float[Tensor, " rows"]:
    """Log-probs of `ids` by the steps of `head_scores`; `kept` (-1 fills up) renormalises over sets of ids."""
    total = logits.new_full((len(logits),), torch.finfo(logits.dtype).min / 2)
    for start in range(0, logits.shape[1], TILE_VOCABULARY):
        tile = logits[:, start : start + TILE_VOCABULARY]
        tile = tile / temperature if temperature != 1 or kept is not None else tile  # a copy, or nothing to do
        if kept is not None:
            tile.masked_fill_(~allowed(kept, slice(start, start + tile.shape[1])), -torch.inf)
        total = add_exponentials(total, tile)
    return logits.gather(1, ids[:, None])[:, 0] / temperature - total
