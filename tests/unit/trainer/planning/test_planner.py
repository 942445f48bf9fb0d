"""A plan as a whole: what it chooses, what it refuses, and that its keys are a recipe's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config, parse_config
from trimtab.trainer.planning.estimates import Workload, host_memory
from trimtab.trainer.planning.inputs import DEVICES, SHAPES, Assumptions
from trimtab.trainer.planning.planner import GPUS_PER_NODE, Plan, PlanRequest, best_plan

WORK = Workload(prompts=64, samples=16, prompt=512, response=1024, longest=2048)
SEVEN = PlanRequest(SHAPES["qwen2.5-7b"], DEVICES["h100"], 8, WORK, Assumptions())


def as_recipe(result: Plan) -> Config:
    data: dict[str, Any] = {}
    for key, value in result.recipe().items():
        *parents, leaf = key.split(".")
        place = data
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return parse_config(data, "plan")


def test_its_keys_are_keys_of_a_recipe() -> None:
    config = as_recipe(best_plan(SEVEN))
    assert (config.placement, config.trainer.prompts, config.sampling.max_tokens) == ("ray", 64, 2048)
    offloaded = best_plan(replace(SEVEN, device=DEVICES["l40s"], rollout_gpus=6))
    assert offloaded.rank.offload
    assert as_recipe(offloaded).sharding.offload


def test_its_lag_means_the_same_in_the_recipe_it_prints() -> None:
    trainer = as_recipe(best_plan(replace(SEVEN, work=replace(WORK, updates=4)))).trainer
    assert (trainer.minibatches, trainer.epochs, trainer.max_lag) == (4, 1, 4)


def test_one_rank_offloads_nothing() -> None:
    alone = best_plan(replace(SEVEN, gpus=2))
    assert (alone.rank.ranks, alone.rank.offload, alone.fits) == (1, False, False)


def test_every_gpu_has_one_duty() -> None:
    for gpus in (2, 3, 8):
        plan = best_plan(replace(SEVEN, gpus=gpus))
        assert plan.engines * plan.engine.gpus + plan.rank.ranks == gpus
    large = best_plan(replace(SEVEN, gpus=64))
    assert large.rank.ranks % GPUS_PER_NODE == 0


def test_it_is_the_fastest_split_that_fits() -> None:
    best = best_plan(SEVEN)
    assert best.fits
    for rollout in range(1, 8):
        other = best_plan(replace(SEVEN, rollout_gpus=rollout))
        assert not other.fits or other.cycle.seconds >= best.cycle.seconds


def test_recomputation_and_offload_come_only_when_needed() -> None:
    short = replace(WORK, response=64, longest=128)
    plan = best_plan(replace(SEVEN, work=short, rollout_gpus=4, micro_batch=1024))
    assert (plan.fits, plan.rank.recompute, plan.rank.offload) == (True, False, False)
    longer = best_plan(replace(SEVEN, rollout_gpus=4))
    assert (longer.fits, longer.rank.recompute, longer.rank.offload) == (True, True, False)


def test_a_plan_that_does_not_fit_names_the_response_length_that_does() -> None:
    plan = best_plan(replace(SEVEN, work=replace(WORK, response=131072, longest=131072)))
    assert not plan.trainer_fits
    fitting = replace(SEVEN, rollout_gpus=plan.engines * plan.engine.gpus, micro_batch=1)
    for longest, fits in ((plan.longest, True), (plan.longest + 1, False)):
        again = best_plan(replace(fitting, work=replace(WORK, response=longest, longest=longest)))
        assert again.trainer_fits == fits


def test_a_large_model_is_offloaded_and_costs_cpu_memory() -> None:
    plan = best_plan(replace(SEVEN, shape=SHAPES["llama-3.1-70b"], rollout_gpus=4, micro_batch=2560))
    assert (plan.engine.gpus, plan.rank.offload, plan.fits) == (4, True, True)
    assert host_memory(plan.request.shape, plan.rank) == pytest.approx(24 * 70.55e9, rel=1e-3)


def test_lag_is_counted_in_updates() -> None:
    four = replace(SEVEN, work=replace(WORK, updates=4))
    assert best_plan(four).as_dict()["lag"]["max_lag"] % 4 == 0
    assert best_plan(replace(four, max_lag=0)).cycle.seconds == pytest.approx(
        best_plan(replace(four, max_lag=0)).phases.in_turn
    )
    assert [best_plan(replace(four, max_lag=lag)).ahead for lag in (4, 7, 8)] == [1, 1, 2]


def test_more_gpus_are_never_slower() -> None:
    seconds = [best_plan(replace(SEVEN, gpus=gpus)).cycle.seconds for gpus in (4, 8, 16, 32)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rollout_gpus": 8}, "8 GPUs cannot be split --rollout-gpus 8"),
        ({"gpus": 3, "tensor_parallel": 4}, "engines of 4 GPUs"),
        ({"gpus": 16, "tensor_parallel": 8}, "a divisor of the model's 28 heads"),
        ({"work": replace(WORK, updates=4), "max_lag": 3}, "--max-lag 3 is less than the 4 updates of a step"),
        ({"shape": SHAPES["qwen2.5-72b"], "gpus": 2}, "no engine"),
    ],
)
def test_impossible_splits_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(TrimtabError, match=named):
        best_plan(replace(SEVEN, **change))
