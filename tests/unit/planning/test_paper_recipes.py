"""The recipes at the scale of the papers: what they set, that nothing is refused, and that they fit the machine."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.config import Config, load_config, recipe_names
from trimtab.config.rule import Facts
from trimtab.config.validation import validate
from trimtab.objectives import Band, Objective, Veto, Weight
from trimtab.objectives.calibrate import from_section
from trimtab.planning.assumptions import DEVICES, Assumptions
from trimtab.planning.planner import PlanRequest, best_plan
from trimtab.planning.rates import Workload
from trimtab.planning.shapes import find_shape

# Recipe -> objective, prompts x samples, updates a batch, longest response, parameters of the model in billions.
PAPERS: dict[str, tuple[str, int, int, int, int, float]] = {
    "paper-alp": ("token-alp", 512, 8, 16, 2048, 1.5),
    "paper-alp-tools": ("seq-alp", 512, 16, 16, 16384, 7.6),
    "paper-soup": ("soup", 32, 8, 1, 3072, 7.6),
    "paper-oapl": ("oapl", 64, 8, 1, 16384, 4.0),
    **{f"paper-miles-{number}": ("dapo", 256, 16, 1, 16384, 4.0) for number in range(1, 5)},
}


def built(name: str) -> tuple[Config, Objective]:
    config = load_config(name)
    return config, from_section(config.objective.model_dump())


def test_every_recipe_of_a_paper_is_here() -> None:
    assert {name for name in recipe_names() if name.startswith("paper-")} == set(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_it_has_the_figures_of_its_paper_and_fits(name: str) -> None:
    config, objective = built(name)
    expected, prompts, samples, updates, longest, billions = PAPERS[name]
    trainer = config.trainer
    assert (objective.name, trainer.prompts, trainer.samples) == (expected, prompts, samples)
    assert (trainer.updates_per_step, config.sampling.max_tokens) == (updates, longest)
    validate(Facts(config, objective, 4), "objective")
    shape = find_shape(config.model.path)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.05)
    assert config.engine.vllm.context is not None
    assert config.engine.vllm.context >= longest + 512
    assert config.engine.workers is not None
    gpus = config.engine.workers * config.engine.vllm.tensor_parallel
    work = Workload(prompts, samples, 512, longest / 2, longest, updates, trainer.epochs)
    options: dict[str, Any] = {"rollout_gpus": gpus, "tensor_parallel": config.engine.vllm.tensor_parallel}
    plan = best_plan(PlanRequest(shape, DEVICES["h100"], 8, work, Assumptions(), micro_batch=16896, **options))
    assert plan.fits


@pytest.mark.parametrize("name", ["paper-alp", "paper-alp-tools"])
def test_alp_draws_its_noise_as_the_paper_does(name: str) -> None:
    config, objective = built(name)
    assert config.perturbation is not None
    assert (config.perturbation.std, config.perturbation.lr, config.perturbation.per_response) == (1e-4, 5e-4, True)
    assert (objective.kl.coef, objective.entropy_coef, config.optim.weight_decay) == (1e-3, 1e-3, 0.01)


def test_soup_selects_by_the_mean_of_two_tasks() -> None:
    config, _ = built("paper-soup")
    assert config.eval.best_metrics == ["eval/aime24/avg@32", "eval/aime25/avg@32"]
    assert [(task.name, task.samples) for task in config.eval.task] == [("hf", 32)] * 2
    assert config.prefix is not None
    assert (config.prefix.ratio, config.prefix.refresh, config.prefix.whole) == (0.5, 8, True)


def test_oapl_samples_fifty_updates_behind() -> None:
    trainer = built("paper-oapl")[0].trainer
    assert (trainer.sync_every, trainer.max_lag, trainer.in_flight) == (50, 50, "discard")


def test_the_four_configurations_of_miles_add_one_part_each() -> None:
    first, second, third, fourth = (built(f"paper-miles-{number}")[1] for number in range(1, 5))
    weight = Weight("token", "clip", 0.5, 2.0)
    masks = (Band("geometric", 0.99, 1.001), Veto(1e-6, "probability"))
    assert (first.weight, first.masks) == (None, ())
    assert (second.weight, second.masks) == (weight, ())
    assert (third.weight, third.masks) == (weight, masks)
    assert (fourth.weight, fourth.masks) == (Weight("token", "clip", 0.5, 2.0, normalize=True), masks)
