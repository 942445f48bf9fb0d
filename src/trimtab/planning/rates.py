"""Computes sampling and training times from model sizes and device peaks (roofline) with assumed efficiencies."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.planning.assumptions import Assumptions, Device
from trimtab.planning.shapes import Shape

BFLOAT16 = 2  # bytes per bfloat16 value
_GOLDEN = 0.6180339887498949


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
        bytes_read = BFLOAT16 * (self._parameters_read(rows) + shape.kv_values * context)
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

    def _parameters_read(self, rows: int) -> float:
        """Returns the expected number of parameters read by decoding `rows` tokens; of a mixture, of routed experts."""
        shape = self.shape
        unused = (1 - shape.active / shape.experts) ** rows
        dense = shape.layers * (shape.layer - shape.experts * shape.expert) + shape.embedding
        return dense + shape.layers * shape.experts * shape.expert * (1 - unused)


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
    forward = (
        2 * (shape.products * tokens + shape.embedding * workload.tokens) + 4 * shape.layers * shape.queries * scores
    )
    proximal = 1 if workload.updates > 1 else 0
    passes = workload.epochs * (4 if recompute else 3) + proximal
    return forward * passes / (ranks * device.flops * assumed.train_flops)
