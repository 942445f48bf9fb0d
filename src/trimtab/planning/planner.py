"""Splits GPUs between sampling and training for a model and a workload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.planning import memory
from trimtab.planning.assumptions import Assumptions, Device
from trimtab.planning.memory import Rank
from trimtab.planning.pipeline_schedule import Cycle, Phases, steady_cycle, steps_ahead
from trimtab.planning.rates import PlannedEngine, Workload, generation_seconds, training_seconds
from trimtab.planning.shapes import Shape

GPUS_PER_NODE = 8  # larger clusters are divided by whole machines


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of a plan; None lets the plan choose."""

    shape: Shape
    device: Device
    gpus: int
    work: Workload
    assumed: Assumptions
    rollout_gpus: int | None = None
    tensor_parallel: int | None = None
    micro_batch: int = 16384
    max_lag: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One split of the GPUs. `memory` is the bytes of a training rank by term."""

    request: PlanRequest
    engine: PlannedEngine
    engines: int
    rank: Rank
    phases: Phases
    ahead: int
    memory: Mapping[str, float]

    @property
    def work(self) -> Workload:
        return self.request.work

    @property
    def slots(self) -> int:
        return self.engine.slots(self.work)

    @property
    def memory_limit(self) -> float:
        """Bytes that a training rank may use."""
        return self.request.device.memory * self.request.assumed.train_memory

    @property
    def fits(self) -> bool:
        return self.trainer_fits and self.engine_fits

    @property
    def trainer_fits(self) -> bool:
        return sum(self.memory.values()) <= self.memory_limit

    @property
    def longest(self) -> int:
        """The longest response for which a training rank has memory; 0 if the weights do not fit."""
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            work = replace(self.work, longest=middle, response=min(middle, self.work.response))
            request = replace(self.request, work=work, micro_batch=1)
            rank = _rank(request, self.rank.ranks, self.rank.recompute, self.rank.offload)
            needed = sum(memory.rank_memory(request.shape, rank).values())
            low, high = (middle, high) if needed <= self.memory_limit else (low, middle - 1)
        return low

    @property
    def engine_fits(self) -> bool:
        """Whether the engine has memory for its weights and one response of full length."""
        return self.slots > 0 and self.engine.cache >= self.work.prompt + self.work.longest

    @property
    def max_lag(self) -> int:
        return self.ahead * self.work.updates

    @property
    def cycle(self) -> Cycle:
        return steady_cycle(self.phases, self.ahead)

    @property
    def generation_rate(self) -> float:
        """Response tokens per second of all engines."""
        return self.work.tokens / self.phases.generate

    @property
    def training_rate(self) -> float:
        """Response tokens per second of all ranks."""
        return self.work.tokens / self.phases.train

    def keys(self) -> dict[str, Any]:
        """Returns the recipe settings of this plan by dotted key."""
        work = self.work
        settings: dict[str, Any] = {
            "trainer.prompts": work.prompts,
            "trainer.samples": work.samples,
            "trainer.minibatches": work.updates // work.epochs,
            "trainer.epochs": work.epochs,
            "trainer.max_lag": self.max_lag,
            "trainer.micro_batch_tokens": self.request.micro_batch,
            "sampling.max_tokens": work.longest,
            "model.dtype": "float32",
            "model.autocast": "bfloat16",
            "model.gradient_checkpointing": self.rank.recompute,
            "engine.type": "vllm",
            "engine.dtype": "bfloat16",
            "engine.vllm.tensor_parallel": self.engine.gpus,
            "engine.vllm.memory": self.request.assumed.engine_memory,
            "engine.vllm.context": work.prompt + work.longest,
            "placement": "ray",
            "ray.engines": self.engines,
            "ray.engine_gpus": float(self.engine.gpus),
            "ray.trainers": self.rank.ranks,
            "ray.trainer_gpus": 1.0,
        }
        if self.rank.offload:
            settings["sharding.offload"] = True
        return settings


def best_plan(request: PlanRequest) -> Plan:
    """Returns the fastest split that fits; if none fits, the fastest one, whose memory shows what is missing.

    Raises `TrimtabError` if the GPUs cannot be split.
    """
    plans = [candidate for split in _splits(request) for candidate in _candidates(request, *split)]
    if not plans:
        raise TrimtabError(_no_split(request))
    return min(plans, key=lambda plan: (not plan.fits, not plan.engine_fits, plan.cycle.seconds, plan.phases.in_turn))


def _splits(request: PlanRequest) -> Iterator[tuple[int, int]]:
    """Yields GPUs per engine and number of engines, leaving at least one GPU for training."""
    unit = GPUS_PER_NODE if request.gpus > GPUS_PER_NODE else 1
    fixed_size = request.tensor_parallel
    for size in (1, 2, 4, 8) if fixed_size is None else (fixed_size,):
        for rollout in range(unit, request.gpus, unit) if request.rollout_gpus is None else (request.rollout_gpus,):
            engines = rollout // size
            # An engine samples whole groups: engines beyond the number of prompts would be idle.
            is_divisible = rollout % size == 0 and request.shape.heads % size == 0
            if is_divisible and 0 < engines <= request.work.prompts and rollout < request.gpus:
                yield size, engines


def _no_split(request: PlanRequest) -> str:
    sizes = f"{request.tensor_parallel or '1, 2, 4 or 8'} GPUs"
    if any(_splits(request)):
        return (
            f"no engine of {sizes} of a {request.device.name} holds {request.shape.name}: raise --tensor-parallel or "
            "--gpus, or take a --device with more memory"
        )
    option = f"--rollout-gpus {request.rollout_gpus} " if request.rollout_gpus is not None else ""
    return (
        f"{request.gpus} GPUs cannot be split {option}into engines of {sizes} (a divisor of the model's "
        f"{request.shape.heads} heads) and at least one for training: change --gpus, --rollout-gpus or "
        "--tensor-parallel"
    )


def _candidates(request: PlanRequest, size: int, engines: int) -> Iterator[Plan]:
    """Yields the split without recomputation if it fits, else with it, else with the optimizer in CPU memory."""
    engine = PlannedEngine(request.shape, request.device, size, request.assumed)
    slots = engine.slots(request.work)
    if slots == 0:
        return
    generate = _generation(engine, engines, request.work, slots)
    ranks = request.gpus - size * engines
    # A single rank is not sharded, and offloading needs sharding.
    variants = ((False, False), (True, False), (True, True))[: 3 if ranks > 1 else 2]
    for recompute, offload in variants:
        rank = _rank(request, ranks, recompute, offload)
        phases = _phases(request, rank, generate)
        ahead = steps_ahead(request.max_lag, request.work.updates, phases)
        candidate = Plan(request, engine, engines, rank, phases, ahead, memory.rank_memory(request.shape, rank))
        if candidate.trainer_fits or (recompute, offload) == variants[-1]:
            yield candidate
            return


def _generation(engine: PlannedEngine, engines: int, work: Workload, slots: int) -> float:
    """Returns the seconds until the slowest engine has sampled its share of whole groups."""
    groups = math.ceil(work.prompts / engines)
    return engine.prefill(groups * work.prompt) + generation_seconds(
        engine, work.prompt, work.lengths(groups * work.samples), slots
    )


def _rank(request: PlanRequest, ranks: int, recompute: bool, offload: bool) -> Rank:
    work = request.work
    rows = min(work.samples, max(1, (request.micro_batch - work.prompt) // work.longest))
    return Rank(
        ranks=ranks,
        tokens=work.prompt + rows * work.longest,
        scored=rows * work.longest,
        rows=rows,
        prompt=work.prompt,
        response=work.longest,
        recompute=recompute,
        offload=offload,
    )


def _phases(request: PlanRequest, rank: Rank, generate: float) -> Phases:
    work, assumed = request.work, request.assumed
    prompts = work.prompts * math.ceil(work.samples / rank.rows)
    handover = rank.master * request.shape.parameters / assumed.handover
    return Phases(
        generate=generate,
        train=training_seconds(request.shape, request.device, rank.ranks, work, prompts, rank.recompute, assumed),
        score=assumed.score,
        publish=handover,
        load=handover,
    )
