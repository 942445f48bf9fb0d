"""The shipped recipes of many GPUs resolve, build their objective, use every GPU once, and fit by the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.config import Config, load_config
from trimtab.objectives.from_section import from_section
from trimtab.planning.estimates import Workload
from trimtab.planning.inputs import DEVICES, Assumptions, find_shape
from trimtab.planning.planner import Plan, PlanRequest, best_plan
from trimtab.training.requirements import check_recipe

GPUS = {"7b-8gpu": 8, "32b-64gpu": 64}


def split(config: Config) -> tuple[int, int, int]:
    """Engines, GPUs of each, ranks."""
    if config.placement == "ray":
        return config.ray.engines, config.engine.vllm.tensor_parallel, config.ray.trainers
    assert config.engine.workers is not None
    return config.engine.workers, config.engine.vllm.tensor_parallel, 8 - config.engine.workers


def planned(name: str) -> Plan:
    config = load_config(name)
    longest, trainer = config.sampling.max_tokens, config.trainer
    assert longest is not None
    updates = trainer.minibatches * trainer.epochs
    work = Workload(trainer.prompts, trainer.samples, 512, longest / 2, longest, updates, trainer.epochs)
    engines, each, _ = split(config)
    return best_plan(
        PlanRequest(
            find_shape(config.model.path),
            DEVICES["h100"],
            GPUS[name],
            work,
            Assumptions(),
            rollout_gpus=engines * each,
            tensor_parallel=each,
            micro_batch=trainer.micro_batch_tokens,
            max_lag=trainer.max_lag,
        )
    )


@pytest.mark.parametrize("name", GPUS)
def test_the_recipe_is_its_own_plan(name: str) -> None:
    config, result = load_config(name), planned(name)
    engines, each, ranks = split(config)
    assert engines * each + ranks == GPUS[name]
    assert (result.engines, result.engine.gpus, result.rank.ranks) == (engines, each, ranks)
    assert result.fits
    assert config.model.gradient_checkpointing == result.rank.recompute
    assert config.sharding.offload == result.rank.offload
    assert config.engine.vllm.context is not None
    assert config.engine.vllm.context >= 512 + result.request.work.longest
    assert config.trainer.micro_batch_tokens >= 512 + result.request.work.longest
    if config.placement == "ray":
        assert config.ray.engine_gpus == each


@pytest.mark.parametrize("name", GPUS)
def test_another_split_is_no_faster(name: str) -> None:
    plan = planned(name)
    best = best_plan(replace(plan.request, rollout_gpus=None, tensor_parallel=None))
    assert best.cycle.seconds == pytest.approx(plan.cycle.seconds, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_its_objective_reads_the_behavior_policy(name: str) -> None:
    """Tokens of older weights are only corrected by an objective that reads the behavior policy; nothing is refused."""
    config = load_config(name)
    assert config.trainer.max_lag
    built = from_section(config.objective.model_dump())
    assert "behavior" in built.needs
    check_recipe(config, built, config.ray.trainers)
