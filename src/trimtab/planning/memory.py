"""Memory of a training rank, term by term, in bytes.

    weights, gradients, optimizer    P x (1 + 1 + 2) x master bytes, over the ranks
    copies                           weights in the dtype of the products: all layers on one rank; when sharded, two
                                     layers, the gradient of one, and all weights outside of the layers
    kept                             activations kept for the backward; with checkpointing, one input for each layer
    layer                            one layer during its backward
    attention                        one block of scores and its mask: some queries of a long row, or several short rows
    head                             hidden states, tiles of logits, and the dense gradient of the head

docs/scale.md derives the terms, and `benchmarks/memory.py` compares them with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.planning.shapes import Shape

FLOAT32 = 4  # bytes per float32 value: residual stream, norms and scores
# Block sizes of the fused head and of packed attention in trimtab.models.
HEAD_TILE = 512 * 2048
BLOCK_SCORES = 1 << 20
BLOCK_QUERIES = 128
MAX_SAVED_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class Rank:
    """The sharding and the micro-batch of one training process.

    tokens: tokens run through the layers. scored: response tokens, run through the head. prompt, response: lengths of
    the longest row. rows: responses in the micro-batch. master: bytes per value of weights, gradients and optimizer
    state. compute: bytes per value in products. recompute: gradient checkpointing. offload: optimizer in CPU memory.
    """

    ranks: int
    tokens: int
    scored: int
    rows: int
    prompt: int
    response: int
    master: int = 4
    compute: int = 2
    recompute: bool = False
    offload: bool = False


def rank_memory(shape: Shape, rank: Rank) -> dict[str, float]:
    """Returns the bytes on the device at the peak of an update, by term."""
    shard = 0.0 if rank.offload else shape.parameters * rank.master / rank.ranks
    return {
        "weights": shard,
        "gradients": shard,
        "optimizer": 2 * shard,
        "copies": _copies(shape, rank),
        "kept": _activations(shape, rank),
        "layer": _layer_backward(shape, rank),
        "attention": _attention(shape, rank),
        "head": _head(shape, rank),
    }


def host_memory(shape: Shape, rank: Rank) -> float:
    """Returns the bytes of CPU memory of all ranks: two weight updates in transfer, and offloaded state."""
    return shape.parameters * rank.master * (2 + 4 * rank.offload)


def layer_activations(shape: Shape, rank: Rank) -> float:
    """Returns the bytes per token that a layer keeps for its backward."""
    compute, intermediate = rank.compute, shape.intermediate * shape.active
    residual = 2 * FLOAT32 * shape.hidden  # before attention and before the feed-forward network
    norms = 2 * FLOAT32 * shape.hidden
    # Autocast makes a rounded copy of the input of every product: queries, keys, values, gate and up. In float32 the
    # CPU kernels make a padded copy instead.
    inputs = 5 * compute * shape.hidden
    attention = compute * (2 * shape.queries + 2 * shape.keys)
    if shape.qk_norm:
        attention += (2 * FLOAT32) * (shape.queries + shape.keys)
    return residual + norms + inputs + attention + 4 * compute * intermediate


def _copies(shape: Shape, rank: Rank) -> float:
    if rank.ranks == 1:
        return 0.0 if rank.compute == rank.master else shape.layers * shape.layer * rank.compute
    # The current and the next layer, gathered; the full gradient of one layer, and its copy during reduce-scatter.
    layers = 2 * shape.layer * rank.compute + shape.layer * (rank.compute + FLOAT32)
    # Embedding and head are not sharded and keep the master dtype; the gradient of the head is counted in `_head`.
    outside = shape.embedding * (1 if shape.tied else 2)
    return layers + (2 * outside - shape.embedding) * rank.master


def _activations(shape: Shape, rank: Rank) -> float:
    last = 3 * FLOAT32 * shape.hidden * rank.tokens  # the last residual, its norm, and the output of that norm
    if rank.recompute:
        return shape.layers * FLOAT32 * shape.hidden * rank.tokens + last
    scores = _scores(shape, rank)
    probabilities = scores * rank.compute if scores <= MAX_SAVED_SCORES else 0.0
    return shape.layers * (layer_activations(shape, rank) * rank.tokens + probabilities) + last


def _layer_backward(shape: Shape, rank: Rank) -> float:
    """Returns the bytes of gradients in the widest part of a layer, plus its activations with checkpointing."""
    gradients = (3 * rank.compute * shape.intermediate * shape.active + 3 * FLOAT32 * shape.hidden) * rank.tokens
    return gradients + (layer_activations(shape, rank) * rank.tokens if rank.recompute else 0.0)


def _scores(shape: Shape, rank: Rank) -> float:
    """Returns the number of attention scores of all responses in one layer."""
    return rank.rows * shape.heads * rank.response * (rank.prompt + rank.response)


def _attention(shape: Shape, rank: Rank) -> float:
    keys = rank.prompt + rank.response
    row_scores, masks = shape.heads * rank.response * keys, rank.rows * rank.response * keys
    is_split = row_scores > BLOCK_SCORES and rank.response > BLOCK_QUERIES
    if is_split:
        block = shape.heads * keys * max(BLOCK_QUERIES, BLOCK_SCORES // (shape.heads * keys))
    else:
        block = max(row_scores, min(BLOCK_SCORES, _scores(shape, rank)))
    # Masks are kept for all layers, or computed per block from positions.
    mask = masks * FLOAT32 if masks <= MAX_SAVED_SCORES else block / shape.heads * (FLOAT32 + 10)
    # The gradient of keys and values, accumulated over the blocks of a row.
    gradient_sums = 2 * rank.rows * keys * shape.keys * FLOAT32 if is_split else 0.0
    # Backward of a block: scores, probabilities and the gradients of both in float32, and rounded probabilities.
    return block * (4 * FLOAT32 + rank.compute) + mask + gradient_sums


def _head(shape: Shape, rank: Rank) -> float:
    """Returns the bytes of hidden states and their gradient (float32 and compute dtype), tiles, and weight gradient."""
    states = rank.scored * shape.hidden * (2 * FLOAT32 + 2 * rank.compute)
    return states + 3 * HEAD_TILE * FLOAT32 + shape.embedding * rank.master
