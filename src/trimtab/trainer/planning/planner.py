"""Splits GPUs between sampling and training for a model and a workload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.trainer.planning.estimates import (
    Cycle,
    Phases,
    PlannedEngine,
    Rank,
    Workload,
    generation_seconds,
    host_memory,
    rank_memory,
    steady_cycle,
    training_seconds,
)
from trimtab.trainer.planning.inputs import Assumptions, Device, Shape

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
    """One split of the GPUs. `memory` is the bytes of a training rank by term, `ahead` is counted in steps."""

    request: PlanRequest
    engine: PlannedEngine
    engines: int
    rank: Rank
    phases: Phases
    ahead: int
    memory: Mapping[str, float]

    @property
    def memory_limit(self) -> float:
        """Bytes that a training rank may use."""
        return self.request.device.memory * self.request.assumed.train_memory

    @property
    def trainer_fits(self) -> bool:
        return sum(self.memory.values()) <= self.memory_limit

    @property
    def engine_fits(self) -> bool:
        """Whether the engine has memory for its weights and one response of full length."""
        work = self.request.work
        return self.engine.slots(work) > 0 and self.engine.cache >= work.prompt + work.longest

    @property
    def fits(self) -> bool:
        return self.trainer_fits and self.engine_fits

    @property
    def cycle(self) -> Cycle:
        return steady_cycle(self.phases, self.ahead)

    @property
    def longest(self) -> int:
        """The longest response for which a training rank has memory; 0 if the weights do not fit."""
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            request = replace(self.request, work=replace(self.request.work, longest=middle), micro_batch=1)
            rank = _rank(request, self.rank.ranks, self.rank.recompute, self.rank.offload)
            needed = sum(rank_memory(request.shape, rank).values())
            low, high = (middle, high) if needed <= self.memory_limit else (low, middle - 1)
        return low

    def recipe(self) -> dict[str, Any]:
        """Returns the recipe settings of this plan by dotted key."""
        work = self.request.work
        return {
            "trainer.prompts": work.prompts,
            "trainer.samples": work.samples,
            "trainer.minibatches": work.updates // work.epochs,
            "trainer.epochs": work.epochs,
            "trainer.max_lag": self.ahead * work.updates,
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
            **({"sharding.offload": True} if self.rank.offload else {}),
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan in seconds, bytes and tokens per second."""
        request, work, phases, steady = self.request, self.request.work, self.phases, self.cycle
        return {
            "model": {**asdict(request.shape), "parameters": request.shape.parameters},
            "device": asdict(request.device),
            "gpus": request.gpus,
            "workload": {**asdict(work), "responses": work.responses, "tokens": work.tokens},
            "fits": self.fits,
            "engines": {
                "count": self.engines,
                "gpus": self.engine.gpus,
                "tokens_per_second": work.tokens / phases.generate,
                "responses_at_once": self.engine.slots(work),
                "weights": self.engine.weights,
                "cache_tokens": int(self.engine.cache),
                "fits": self.engine_fits,
                "busy": steady.engines,
            },
            "trainer": {
                "ranks": self.rank.ranks,
                "tokens_per_second": work.tokens / phases.train,
                "micro_batch_tokens": self.rank.tokens,
                "gradient_checkpointing": self.rank.recompute,
                "offload": self.rank.offload,
                "memory": dict(self.memory),
                "memory_total": sum(self.memory.values()),
                "memory_room": self.memory_limit,
                "longest_response": self.longest,
                "host_memory": host_memory(request.shape, self.rank),
                "fits": self.trainer_fits,
                "busy": steady.trainer,
            },
            "seconds": {**asdict(phases), "step": steady.seconds, "step_in_turn": phases.in_turn},
            "lag": lag(steady, work.updates, self.ahead),
            "recipe": self.recipe(),
            "assumptions": request.assumed.model_dump(),
        }


def best_plan(request: PlanRequest) -> Plan:
    """Returns the fastest split that fits; if none fits, the fastest one, whose memory shows what is missing.

    Raises `TrimtabError` if the GPUs cannot be split.
    """
    splits = list(_splits(request))
    size = f"{request.tensor_parallel or '1, 2, 4 or 8'} GPUs"
    if not splits:
        option = f"--rollout-gpus {request.rollout_gpus} " if request.rollout_gpus is not None else ""
        raise TrimtabError(
            f"{request.gpus} GPUs cannot be split {option}into engines of {size} (a divisor of the model's "
            f"{request.shape.heads} heads) and at least one for training: change --gpus, --rollout-gpus or "
            "--tensor-parallel"
        )
    plans = [_plan(request, engine, engines) for engine, engines in splits if engine.slots(request.work)]
    if not plans:
        raise TrimtabError(
            f"no engine of {size} of a {request.device.name} holds {request.shape.name}: raise --tensor-parallel or "
            "--gpus, or take a --device with more memory"
        )
    return min(plans, key=lambda plan: (not plan.fits, not plan.engine_fits, plan.cycle.seconds, plan.phases.in_turn))


def steps_ahead(max_lag: int | None, updates: int, phases: Phases) -> int:
    """Returns the number of steps engines may be ahead under `max_lag` updates; with None the smallest sufficient one.

    Raises `TrimtabError` for a `max_lag` above 0 and below the updates of a step.
    """
    if max_lag is None:
        return phases.sufficient_ahead
    if 0 < max_lag < updates:
        raise TrimtabError(
            f"--max-lag {max_lag} is less than the {updates} updates of a step: nothing could be generated during "
            f"training; give {updates} or more, or 0"
        )
    return max_lag // updates


def lag(steady: Cycle, updates: int, ahead: int) -> dict[str, float]:
    """Returns the age of tokens in updates: mean, largest, and the bound for it."""
    return {
        "mean": steady.lag_mean * updates,
        "max": steady.lag_max * updates,
        "max_lag": ahead * updates,
        "updates": updates,
    }


def _splits(request: PlanRequest) -> Iterator[tuple[PlannedEngine, int]]:
    """Yields an engine and the number of engines, leaving at least one GPU for training."""
    unit = GPUS_PER_NODE if request.gpus > GPUS_PER_NODE else 1
    for size in (1, 2, 4, 8) if request.tensor_parallel is None else (request.tensor_parallel,):
        for rollout in range(unit, request.gpus, unit) if request.rollout_gpus is None else (request.rollout_gpus,):
            engines = rollout // size
            # An engine samples whole groups: engines beyond the number of prompts would be idle.
            is_divisible = rollout % size == 0 and request.shape.heads % size == 0
            if is_divisible and 0 < engines <= request.work.prompts and rollout < request.gpus:
                yield PlannedEngine(request.shape, request.device, size, request.assumed), engines


def _plan(request: PlanRequest, engine: PlannedEngine, engines: int) -> Plan:
    """Returns the split without recomputation if it fits, else with it, else with the optimizer in CPU memory."""
    shape, work, assumed = request.shape, request.work, request.assumed
    # The slowest engine samples its share of whole groups.
    groups = math.ceil(work.prompts / engines)
    lengths = work.lengths(groups * work.samples)
    generate = engine.prefill(groups * work.prompt) + generation_seconds(
        engine, work.prompt, lengths, engine.slots(work)
    )
    ranks = request.gpus - engine.gpus * engines
    rank = _rank(request, ranks, recompute=False, offload=False)
    # A single rank is not sharded, and offloading needs sharding.
    for recompute, offload in ((False, False), (True, False), (True, ranks > 1)):
        rank = replace(rank, recompute=recompute, offload=offload)
        if sum(rank_memory(shape, rank).values()) <= request.device.memory * assumed.train_memory:
            break
    prompts = work.prompts * math.ceil(work.samples / rank.rows)
    handover = rank.master * shape.parameters / assumed.handover
    train = training_seconds(shape, request.device, ranks, work, prompts, rank.recompute, assumed)
    phases = Phases(generate, train, score=assumed.score, publish=handover, load=handover)
    ahead = steps_ahead(request.max_lag, work.updates, phases)
    return Plan(request, engine, engines, rank, phases, ahead, rank_memory(shape, rank))


def _rank(request: PlanRequest, ranks: int, recompute: bool, offload: bool) -> Rank:
    work = request.work
    rows = min(work.samples, max(1, (request.micro_batch - work.prompt) // work.longest))
    scored = rows * work.longest
    return Rank(
        ranks, work.prompt + scored, scored, rows, work.prompt, work.longest, recompute=recompute, offload=offload
    )
