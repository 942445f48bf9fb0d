"""Memory of a training rank, term by term, in bytes.

    weights, gradients, optimizer    P x (1 + 1 + 2) x master bytes, over the ranks
    copies                           the weights as the products read them: all layers on one rank; when sharded, two
                                     layers, the gradient of one, and whole what lies outside of the layers
    kept                             what the layers keep for the backward; with checkpointing, one input for each layer
    layer                            one layer while its backward runs
    attention                        one block of scores and its mask: some queries of a long row, or whole short rows
    head                             hidden states, tiles of logits, and the head's dense gradient

docs/scale.md derives the terms, and `benchmarks/memory.py` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.planning.shapes import Shape

EXACT = 4  # bytes of float32: residual stream, norms and scores
# Of models/fused_head.py and models/packed_attention.py.
TILE = 512 * 2048
BLOCK_SCORES = 1 << 20
BLOCK_QUERIES = 128
KEEP_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class Rank:
    """How one process holds the model it trains, and the micro-batch it runs.

    `tokens` go through the layers, `scored` of them (response tokens) through the head; `prompt` and `response` are
    those of the longest row, `rows` how many responses lie side by side. `master` is the type of weights, gradients and
    optimizer state, `compute` that of products, both in bytes.
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


def training_rank(shape: Shape, rank: Rank) -> dict[str, float]:
    """Bytes on the device at the peak of an update, by term."""
    own = 0.0 if rank.offload else shape.parameters * rank.master / rank.ranks
    return {
        "weights": own,
        "gradients": own,
        "optimizer": 2 * own,
        "copies": _copies(shape, rank),
        "kept": _kept(shape, rank),
        "layer": _layer_backward(shape, rank),
        "attention": _attention(shape, rank),
        "head": _head(shape, rank),
    }


def host(shape: Shape, rank: Rank) -> float:
    """Bytes of CPU memory of all ranks together: two publications on their way, and what offloading puts there."""
    return shape.parameters * rank.master * (2 + 4 * rank.offload)


def layer_kept(shape: Shape, rank: Rank) -> float:
    """Bytes a layer keeps for its backward, for each token."""
    compute, intermediate = rank.compute, shape.intermediate * shape.active
    residual = 2 * EXACT * shape.hidden  # before attention and before the feed-forward network
    norms = 2 * EXACT * shape.hidden
    # Autocast rounds the input of every product anew: queries, keys, values, gate and up. In float32 a CPU pads it anew
    # (models/matmul.py).
    inputs = 5 * compute * shape.hidden
    attention = compute * (2 * shape.queries + 2 * shape.keys)
    if shape.qk_norm:
        attention += (2 * EXACT) * (shape.queries + shape.keys)
    return residual + norms + inputs + attention + 4 * compute * intermediate


def _copies(shape: Shape, rank: Rank) -> float:
    if rank.ranks == 1:
        return 0.0 if rank.compute == rank.master else shape.layers * shape.layer * rank.compute
    # The layer at work and the next one, gathered; the gradient of one, whole, and as it is reduced to its owners.
    layers = 2 * shape.layer * rank.compute + shape.layer * (rank.compute + EXACT)
    # Embedding, last norm and head stay whole in their own type; of their gradients the head's is counted there.
    outside = shape.embedding * (1 if shape.tied else 2)
    return layers + (2 * outside - shape.embedding) * rank.master


def _kept(shape: Shape, rank: Rank) -> float:
    last = 3 * EXACT * shape.hidden * rank.tokens  # the last residual, its norm, and what comes out of it
    if rank.recompute:
        return shape.layers * EXACT * shape.hidden * rank.tokens + last
    scores = _scores(shape, rank)
    probabilities = scores * rank.compute if scores <= KEEP_SCORES else 0.0
    return shape.layers * (layer_kept(shape, rank) * rank.tokens + probabilities) + last


def _layer_backward(shape: Shape, rank: Rank) -> float:
    """Gradients of the widest part of a layer; with checkpointing, also what the layer keeps, computed again."""
    gradients = (3 * rank.compute * shape.intermediate * shape.active + 3 * EXACT * shape.hidden) * rank.tokens
    return gradients + (layer_kept(shape, rank) * rank.tokens if rank.recompute else 0.0)


def _scores(shape: Shape, rank: Rank) -> float:
    """Scores of all rows of responses in one layer."""
    return rank.rows * shape.heads * rank.response * (rank.prompt + rank.response)


def _attention(shape: Shape, rank: Rank) -> float:
    keys = rank.prompt + rank.response
    row, masks = shape.heads * rank.response * keys, rank.rows * rank.response * keys
    cut = row > BLOCK_SCORES and rank.response > BLOCK_QUERIES
    if cut:
        block = shape.heads * keys * max(BLOCK_QUERIES, BLOCK_SCORES // (shape.heads * keys))
    else:
        block = max(row, min(BLOCK_SCORES, _scores(shape, rank)))
    # Masks are kept for all layers, or made for a block, together with the positions they come from.
    mask = masks * EXACT if masks <= KEEP_SCORES else block / shape.heads * (EXACT + 10)
    # The gradient of keys and values, to which all parts of a row add.
    sums = 2 * rank.rows * keys * shape.keys * EXACT if cut else 0.0
    # Backward of a block: in float32 scores, probabilities and the gradients of both, and rounded probabilities.
    return block * (4 * EXACT + rank.compute) + mask + sums


def _head(shape: Shape, rank: Rank) -> float:
    """Hidden states of scored tokens and their gradient, each also as products read them, tiles, weight gradient."""
    states = rank.scored * shape.hidden * (2 * EXACT + 2 * rank.compute)
    return states + 3 * TILE * EXACT + shape.embedding * rank.master
