"""Trains objectives x seeds of one recipe, as its `[compare]` section specifies."""

from __future__ import annotations

from pathlib import Path

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.lab.experiment import ExperimentPlan, Method, PlannedRun
from trimtab.trainer.lab.regimes import Regime
from trimtab.trainer.lab.runner import ExperimentObserver, run_experiment
from trimtab.trainer.run import build_parts


def run_recipe_comparison(
    config: Config, out: Path, observer: ExperimentObserver, *, resume: bool
) -> dict[str, list[Path]]:
    """Trains every objective of `[compare]` with every seed into `out/<objective>/seed<k>`; returns these by objective.

    Raises `TrimtabError` if `out` is not empty and `resume` is off, if it is empty and `resume` is on, or if a run
    failed or diverged.
    """
    has_runs = out.exists() and any(out.iterdir())
    if resume and not has_runs:
        raise TrimtabError(f"{out} holds no comparison: check --out, or start without --resume")
    if has_runs and not resume:
        raise TrimtabError(f"{out} is not empty: continue it with --resume, or choose another --out")
    plan = plan_from_recipe(config, out)
    for run in plan.runs:
        build_parts(run.config).close()
    assert config.compare is not None
    results = run_experiment(plan, workers=config.compare.workers, observer=observer, keep=True)
    for name, result in results.items():
        if result.status != "done":
            raise TrimtabError(f"{name}: {result.error}")
    return {name: [out / name / f"seed{seed}" for seed in config.compare.seeds] for name in config.compare.objectives}


def plan_from_recipe(config: Config, out: Path) -> ExperimentPlan:
    """Returns every objective and seed of `[compare]`, each with a validated recipe, as an experiment in one regime.

    Another objective than the recipe's starts from its own defaults, as with `--set objective.name=...`.
    """
    assert config.compare is not None
    data = config.model_dump(exclude={"compare"}, exclude_none=True)
    data["trainer"]["max_idle_steps"] = 0  # a collapsing method is a result, not an error
    regime = Regime("recipe", config.description, {})
    runs = []
    for objective in config.compare.objectives:
        other = [] if objective == config.objective.name else [f"objective.name={objective}"]
        for seed in config.compare.seeds:
            name = f"{objective}/seed{seed}"
            recipe = load_config(data | {"seed": seed, "out": str(out / name)}, other)
            runs.append(PlannedRun(name, Method(objective, objective, ()), regime, seed, recipe))
    return ExperimentPlan(out, tuple(runs))
