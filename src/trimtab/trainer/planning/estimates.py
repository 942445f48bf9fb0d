"""The arithmetic of a plan: memory of a training rank, seconds of sampling and training, and the steady state.

Memory of a training rank at the peak of an update, term by term, in bytes:

    weights, gradients, optimizer    P x (1 + 1 + 2) x master bytes, over the ranks
    copies                           weights in the dtype of the products: all layers on one rank; when sharded, two
                                     layers, the gradient of one, and all weights outside of the layers
    kept                             activations kept for the backward; with checkpointing, one input for each layer
    layer                            one layer during its backward
    attention                        one block of scores and its mask: some queries of a long row, or several short rows
    head                             hidden states, tiles of logits, and the dense gradient of the head

docs/scale.md derives the terms, and `benchmarks/memory.py` compares them with measurements. Seconds come from a
roofline: model sizes and device peaks with assumed efficiencies.

Sampling, rewards and training form a pipeline. `ahead` is the number of batches the engines may be ahead of the
weights: batch m starts with weights of at least m - ahead steps (`trainer.max_lag` = ahead x updates per step). Engines
load the newest weights between batches. The time of a step is bounded from below by each of the three stages and by the
loop through all of them, and equals the largest bound (the maximum cycle mean of the system in max-plus algebra):

    step = max(engines, rewards, trainer, (engines + rewards + trainer) / (ahead + 1))
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.trainer.planning.inputs import Assumptions, Device, Shape

BFLOAT16, FLOAT32 = 2, 4  # bytes per value
# Block sizes of the fused head and of packed attention in trimtab.trainer.models; on an accelerator both are larger.
HEAD_TILE = 512 * 2048
BLOCK_SCORES = 1 << 20
ACCELERATED = 16
BLOCK_QUERIES = 128
MAX_SAVED_SCORES = 1 << 22
KEPT_LOGITS = 1 << 28
_GOLDEN = 0.6180339887498949
# Simulated steps until the steady state, and steps measured; phases are constant, so the schedule is periodic.
_WARMUP_STEPS, _MEASURED_STEPS = 200, 400


@dataclass(frozen=True, slots=True)
class Workload:
    """One step: `prompts` x `samples` responses of `response` tokens on average and at most `longest`.

    Lengths are distributed as longest x u^k with u uniform in (0, 1) and k chosen to match the average: constant if
    average and longest agree, uniform if the average is half of the longest, and skewed towards short ones below that.
    """

    prompts: int
    samples: int
    prompt: int
    response: float
    longest: int
    updates: int = 1  # optimizer updates: mini-batches x epochs
    epochs: int = 1

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Response tokens of a step."""
        return self.responses * self.response

    @property
    def exponent(self) -> float:
        return self.longest / self.response - 1

    @property
    def square(self) -> float:
        """Mean of the squared response length."""
        return self.longest**2 / (2 * self.exponent + 1)

    def lengths(self, count: int) -> list[int]:
        """Returns the lengths of `count` responses: quantiles in the low-discrepancy order of the golden ratio."""
        quantiles = ((index * _GOLDEN) % 1 for index in range(1, count + 1))
        return [max(1, round(self.longest * quantile**self.exponent)) for quantile in quantiles]


@dataclass(frozen=True, slots=True)
class Rank:
    """The sharding and the micro-batch of one training process.

    tokens: tokens run through the layers. scored: response tokens, run through the head. prompt, response: lengths of
    the longest row. rows: responses in the micro-batch. master: bytes per value of weights, gradients and optimizer
    state. compute: bytes per value in products. recompute: gradient checkpointing. offload: optimizer in CPU memory.
    cpu: whether it computes on a CPU, in smaller blocks.
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
    cpu: bool = False

    @property
    def larger(self) -> int:
        """The size of blocks, relative to that on a CPU."""
        return 1 if self.cpu else ACCELERATED


def rank_memory(shape: Shape, rank: Rank) -> dict[str, float]:
    """Returns the bytes on the device at the peak of an update, by term."""
    compute, hidden = rank.compute, shape.hidden
    shard = 0.0 if rank.offload else shape.parameters * rank.master / rank.ranks
    layer = layer_activations(shape, rank) * rank.tokens
    # The last residual, its norm, and the output of that norm.
    last = 3 * FLOAT32 * hidden * rank.tokens
    if rank.recompute:
        kept = shape.layers * FLOAT32 * hidden * rank.tokens + last
    else:
        scores = rank.rows * shape.heads * rank.response * (rank.prompt + rank.response)
        kept = shape.layers * (layer + (scores * compute if scores <= MAX_SAVED_SCORES else 0.0)) + last
    logits = rank.scored * shape.vocabulary * compute
    kept += logits if logits <= KEPT_LOGITS else 0.0
    # Gradients in the widest part of a layer, and with checkpointing its activations.
    gradients = (3 * compute * shape.intermediate * shape.active + 3 * FLOAT32 * hidden) * rank.tokens
    # Hidden states and their gradient in float32 and in the dtype of the products.
    states = rank.scored * hidden * (2 * FLOAT32 + 2 * compute)
    return {
        "weights": shard,
        "gradients": shard,
        "optimizer": 2 * shard,
        "copies": _copies(shape, rank),
        "kept": kept,
        "layer": gradients + (layer if rank.recompute else 0.0),
        "attention": _attention(shape, rank),
        "head": states + 3 * HEAD_TILE * rank.larger * FLOAT32 + shape.embedding * rank.master,
    }


def host_memory(shape: Shape, rank: Rank) -> float:
    """Returns the bytes of CPU memory of all ranks: two weight updates in transfer, and offloaded state."""
    return shape.parameters * rank.master * (2 + 4 * rank.offload)


def layer_activations(shape: Shape, rank: Rank) -> float:
    """Returns the bytes per token that a layer keeps for its backward."""
    # The residual before attention and before the feed-forward network, and the norms of both.
    residuals = 4 * FLOAT32 * shape.hidden
    # Autocast makes a rounded copy of the input of every product: queries, keys, values, gate and up. In float32 the
    # CPU kernels make a padded copy instead.
    inputs = 5 * rank.compute * shape.hidden
    attention = rank.compute * (2 * shape.queries + 2 * shape.keys)
    if shape.qk_norm:
        attention += (2 * FLOAT32) * (shape.queries + shape.keys)
    return residuals + inputs + attention + 4 * rank.compute * shape.intermediate * shape.active


def _copies(shape: Shape, rank: Rank) -> float:
    if rank.ranks == 1:
        return 0.0 if rank.compute == rank.master else shape.layers * shape.layer * rank.compute
    # The current and the next layer, gathered; the full gradient of one layer, and its copy during reduce-scatter.
    layers = 2 * shape.layer * rank.compute + shape.layer * (rank.compute + FLOAT32)
    # Embedding and head are not sharded and keep the master dtype; the gradient of the head is counted as its own term.
    outside = shape.embedding * (1 if shape.tied else 2)
    return layers + (2 * outside - shape.embedding) * rank.master


def _attention(shape: Shape, rank: Rank) -> float:
    keys = rank.prompt + rank.response
    row_scores, masks = shape.heads * rank.response * keys, rank.rows * rank.response * keys
    size = BLOCK_SCORES * rank.larger
    is_split = row_scores > size and rank.response > BLOCK_QUERIES
    if is_split:
        block = shape.heads * keys * max(BLOCK_QUERIES, size // (shape.heads * keys))
    else:
        block = max(row_scores, min(size, rank.rows * row_scores))
    # Masks are kept for all layers, or computed per block from positions.
    mask = masks * FLOAT32 if masks <= MAX_SAVED_SCORES else block / shape.heads * (FLOAT32 + 10)
    # The gradient of keys and values, accumulated over the blocks of a row.
    gradient_sums = 2 * rank.rows * keys * shape.keys * FLOAT32 if is_split else 0.0
    # Backward of a block: scores, probabilities and the gradients of both in float32, and rounded probabilities.
    return block * (4 * FLOAT32 + rank.compute) + mask + gradient_sums


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine on `gpus` GPUs (tensor parallel), its model in bfloat16."""

    shape: Shape
    device: Device
    gpus: int
    assumptions: Assumptions

    @property
    def weights(self) -> float:
        """Bytes of weights per GPU."""
        return BFLOAT16 * self.shape.parameters / self.gpus

    @property
    def cache(self) -> float:
        """Tokens of context that fit in the key-value cache; not positive if the weights do not fit."""
        free = self.device.memory * self.assumptions.engine_memory - self.assumptions.engine_workspace - self.weights
        return free * self.gpus / (BFLOAT16 * self.shape.kv_values)

    def slots(self, work: Workload) -> int:
        """Returns the number of concurrent responses, given the mean length of responses in progress."""
        progress = work.square / (2 * work.response)
        return min(int(self.assumptions.sequences), max(0, int(self.cache / (work.prompt + progress))))

    def decode(self, rows: int, context: float) -> float:
        """Returns the seconds to decode one token of `rows` responses with `context` tokens of context in total."""
        shape, assumed = self.shape, self.assumptions
        # A mixture reads the experts that at least one of the rows is routed to, in expectation.
        read = 1 - (1 - shape.active / shape.experts) ** rows
        dense = shape.layers * (shape.layer - shape.experts * shape.expert) + shape.embedding
        parameters = dense + shape.layers * shape.experts * shape.expert * read
        bytes_read = BFLOAT16 * (parameters + shape.kv_values * context)
        operations = 2 * (shape.products + shape.embedding) * rows + 4 * shape.layers * shape.queries * context
        bandwidth = self.device.bandwidth * assumed.decode_bandwidth * self._speedup
        flops = self.device.flops * assumed.decode_flops * self._speedup
        return max(bytes_read / bandwidth, operations / flops) + assumed.decode_overhead

    def prefill(self, tokens: float) -> float:
        """Returns the seconds to compute the keys and values of `tokens` prompt tokens."""
        flops = self.device.flops * self.assumptions.decode_flops * self._speedup
        return 2 * self.shape.products * tokens / flops

    @property
    def _speedup(self) -> float:
        """Speed relative to a single GPU."""
        return self.gpus * self.assumptions.parallel ** math.log2(self.gpus)


def generation_seconds(engine: PlannedEngine, prompt: int, lengths: Sequence[int], slots: int) -> float:
    """Returns the seconds until the last response is finished; free slots are refilled while responses are waiting."""
    waiting = iter(lengths)
    ends: list[tuple[int, int]] = []  # per running response: decode step at which it ends, and its length
    done, context, seconds = 0, 0.0, 0.0
    while True:
        for length in waiting:
            heapq.heappush(ends, (done + length, length))
            context += prompt
            if len(ends) == slots:
                break
        if not ends:
            return seconds
        rows, steps = len(ends), ends[0][0] - done
        # Step time is linear in the context, which grows linearly: evaluate it at the middle of the interval.
        seconds += steps * engine.decode(rows, context + rows * steps / 2)
        context += rows * steps
        done += steps
        while ends and ends[0][0] == done:
            context -= prompt + heapq.heappop(ends)[1]


def training_seconds(
    shape: Shape, device: Device, ranks: int, workload: Workload, prompts: float, recompute: bool, assumed: Assumptions
) -> float:
    """Returns the seconds of all updates of a step on `ranks` GPUs, including the proximal forward.

    `prompts` is the number of prompts run: once for every micro-batch that contains one of their responses.
    """
    tokens = workload.tokens + prompts * workload.prompt
    # Full rectangles of scores: masked scores are computed, too (for long rows only a little more than half is).
    scores = workload.responses * (workload.square + workload.prompt * workload.response) + prompts * workload.prompt**2
    products = shape.products * tokens + shape.embedding * workload.tokens
    forward = 2 * products + 4 * shape.layers * shape.queries * scores
    passes = workload.epochs * (4 if recompute else 3) + (workload.updates > 1)
    return forward * passes / (ranks * device.flops * assumed.train_flops)


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one step by phase. publish: the trainer writes weights. load: engines read them."""

    generate: float
    train: float
    score: float = 0.0
    publish: float = 0.0
    load: float = 0.0

    @property
    def engines(self) -> float:
        return self.load + self.generate

    @property
    def trainer(self) -> float:
        return self.train + self.publish

    @property
    def in_turn(self) -> float:
        """Seconds of a step without overlap."""
        return self.engines + self.score + self.trainer

    @property
    def ideal(self) -> float:
        """Seconds of a step with complete overlap."""
        return max(self.engines, self.score, self.trainer)

    @property
    def sufficient_ahead(self) -> int:
        """The smallest number of steps ahead at which the slowest stage alone determines the step time."""
        return math.ceil(self.in_turn / self.ideal - 1 - 1e-9) if self.ideal else 0


@dataclass(frozen=True, slots=True)
class Cycle:
    """A step in the steady state: seconds, utilization of engines and trainer, and age of tokens in steps."""

    seconds: float
    engines: float
    trainer: float
    lag_mean: float
    lag_max: int


def steady_cycle(phases: Phases, ahead: int) -> Cycle:
    """Returns the steady state with engines at most `ahead` steps ahead."""
    seconds = max(phases.ideal, phases.in_turn / (ahead + 1))
    published = [0.0]  # time at which the weights after this number of steps are published
    newest, generated, scored = 0, 0.0, 0.0
    lags = []
    for batch in range(_WARMUP_STEPS + _MEASURED_STEPS):
        started = max(generated, published[max(0, batch - ahead)])
        while newest + 1 < len(published) and published[newest + 1] <= started:
            newest += 1
        generated = started + phases.engines
        scored = max(generated, scored) + phases.score
        published.append(max(published[batch], scored) + phases.trainer)
        lags.append(batch - newest)
    lags = lags[_WARMUP_STEPS:]
    busy = (part / seconds if seconds else 0.0 for part in (phases.engines, phases.trainer))
    return Cycle(seconds, *busy, lag_mean=sum(lags) / len(lags), lag_max=max(lags))
