"""Seconds of sampling and training from sizes and device peaks (roofline), with efficiencies as assumptions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.planning.assumptions import Assumptions, Device
from trimtab.planning.shapes import Shape

HALF = 2  # bytes of a bfloat16 number
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Workload:
    """One step: `prompts` x `samples` responses of `response` tokens on average and at most `longest`.

    Lengths are spread as longest x u^k, u even in (0, 1), with k from the average: every response equally long where
    both agree, even between 0 and the longest where the average is half of it, more skewed below.
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
        """Mean of the squared length of a response."""
        return self.longest**2 / (2 * self.exponent + 1)

    def lengths(self, count: int) -> list[int]:
        """Lengths of `count` responses in an order without pattern: quantiles visited by the golden ratio."""
        quantiles = ((index * _GOLDEN) % 1 for index in range(1, count + 1))
        return [max(1, round(self.longest * quantile**self.exponent)) for quantile in quantiles]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine on `gpus` GPUs (tensor parallel), its model in bfloat16."""

    shape: Shape
    device: Device
    gpus: int
    assumptions: Assumptions

    @property
    def weights(self) -> float:
        """Bytes of its weights on each of its GPUs."""
        return HALF * self.shape.parameters / self.gpus

    @property
    def cache(self) -> float:
        """Tokens of context whose keys and values it has room for; not positive where its weights do not fit."""
        room = self.device.memory * self.assumptions.engine_memory - self.assumptions.engine_workspace - self.weights
        return room * self.gpus / (HALF * self.shape.kv_values)

    def slots(self, work: Workload) -> int:
        """Responses it can decode at once: as many as the cache holds at the mean length of those in progress."""
        progress = work.square / (2 * work.response)
        return min(int(self.assumptions.sequences), max(0, int(self.cache / (work.prompt + progress))))

    def decode(self, rows: int, context: float) -> float:
        """Seconds to write one more token of `rows` responses that look at `context` tokens together."""
        shape, assumed = self.shape, self.assumptions
        read = HALF * (self._touched(rows) + shape.kv_values * context)
        work = 2 * (shape.products + shape.embedding) * rows + 4 * shape.layers * shape.queries * context
        bandwidth = self.device.bandwidth * assumed.decode_bandwidth * self._speedup
        flops = self.device.flops * assumed.decode_flops * self._speedup
        return max(read / bandwidth, work / flops) + assumed.decode_overhead

    def prefill(self, tokens: float) -> float:
        flops = self.device.flops * self.assumptions.decode_flops * self._speedup
        return 2 * self.shape.products * tokens / flops

    @property
    def _speedup(self) -> float:
        """How many GPUs' worth of work its GPUs do together."""
        return self.gpus * self.assumptions.parallel ** math.log2(self.gpus)

    def _touched(self, rows: int) -> float:
        """Parameters that decoding `rows` tokens reads: of a mixture, the experts that any of them is sent to."""
        shape = self.shape
        missed = (1 - shape.active / shape.experts) ** rows
        dense = shape.layers * (shape.layer - shape.experts * shape.expert) + shape.embedding
        return dense + shape.layers * shape.experts * shape.expert * (1 - missed)


def writing(engine: Engine, prompt: int, lengths: Sequence[int], slots: int) -> float:
    """Seconds until the last of these responses is written: slots are refilled as responses end, then run empty."""
    waiting = iter(lengths)
    ends: list[tuple[int, int]] = []  # of each running response: tokens written in a slot when it ends, its length
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
        # The step grows with the context, which grows by a token of every row: its middle is its mean.
        seconds += steps * engine.decode(rows, context + rows * steps / 2)
        context += rows * steps
        done += steps
        while ends and ends[0][0] == done:
            context -= prompt + heapq.heappop(ends)[1]


def training(
    shape: Shape, device: Device, ranks: int, work: Workload, prompts: float, recompute: bool, assumed: Assumptions
) -> float:
    """Seconds of all updates of a step, the proximal forward included, on `ranks` GPUs.

    `prompts`: how often prompts are run (once for every micro-batch that holds one of their responses).
    """
    tokens = work.tokens + prompts * work.prompt
    # The whole rectangle: what a token may not see is computed and masked (of long rows, little more than half is).
    seen = work.responses * (work.square + work.prompt * work.response) + prompts * work.prompt**2
    forward = 2 * (shape.products * tokens + shape.embedding * work.tokens) + 4 * shape.layers * shape.queries * seen
    proximal = 1 if work.updates > 1 else 0
    passes = work.epochs * (4 if recompute else 3) + proximal
    return forward * passes / (ranks * device.flops * assumed.train_flops)
