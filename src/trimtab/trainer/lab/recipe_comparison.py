"""Trains objectives x seeds of one recipe, as its `[compare]` section specifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.trainer.config import REQUIRED_SECTIONS, Config, parse_config
from trimtab.trainer.config.training_sections import COMPOSED, OBJECTIVE_PARTS, ObjectiveConfig
from trimtab.trainer.lab.experiment import ExperimentPlan, Method, PlannedRun
from trimtab.trainer.lab.regimes import Regime
from trimtab.trainer.lab.runner import ExperimentObserver, run_experiment
from trimtab.trainer.run import check


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
        check(run.config).close()
    assert config.compare is not None
    results = run_experiment(plan, workers=config.compare.workers, observer=observer, keep=True)
    for name, result in results.items():
        if result.status != "done":
            raise TrimtabError(f"{name}: {result.error}")
    return {name: [out / name / f"seed{seed}" for seed in config.compare.seeds] for name in config.compare.objectives}


def plan_from_recipe(config: Config, out: Path) -> ExperimentPlan:
    """Returns every objective and seed of `[compare]`, each with a validated recipe, as an experiment in one regime."""
    assert config.compare is not None
    if config.objective.name == COMPOSED and COMPOSED not in config.compare.objectives:
        raise TrimtabError(
            f"compare.objectives: none of {', '.join(config.compare.objectives)} has the parts of [objective], so that "
            f"nothing would use them: add {COMPOSED!r} to the list, or set objective.name to a method"
        )
    regime = Regime("recipe", config.description, {})
    runs = []
    for objective in config.compare.objectives:
        for seed in config.compare.seeds:
            name = f"{objective}/seed{seed}"
            data = _for_objective(config, objective) | {"seed": seed, "out": str(out / name)}
            data["trainer"] = data["trainer"] | {"max_idle_steps": 0}  # a collapsing method is a result, not an error
            recipe = parse_config(data, f"{objective}, seed {seed}")
            runs.append(PlannedRun(name, Method(objective, objective, ()), regime, seed, recipe))
    return ExperimentPlan(out, tuple(runs))


def _for_objective(config: Config, name: str) -> dict[str, Any]:
    """Returns the recipe with another objective, to which the recipe's added masks and its `advantage` are added too.

    Dropped are keywords that the other objective does not have, calibration if it has no bounds, the section that only
    the recipe's objective uses, and an advantage of another default. Any other incompatible key is rejected by `check`.
    """
    from trimtab.objectives.calibrate import bounds_of
    from trimtab.objectives.lookup import from_section

    data = config.model_dump(exclude={"compare"}, exclude_none=True)
    if name == config.objective.name:
        return data
    own_section = REQUIRED_SECTIONS.get(config.objective.name)
    if own_section is not None and own_section != REQUIRED_SECTIONS.get(name):
        data.pop(own_section, None)
    calibrate = config.objective.calibrate and bool(bounds_of(name))
    section = {"name": name, "calibrate": calibrate, **_accepted_keywords(name, config.objective)}
    if from_section(section).advantage != from_section(config.objective.model_dump()).advantage:
        data.pop("advantage", None)
    return data | {"objective": section}


def _accepted_keywords(name: str, given: ObjectiveConfig) -> dict[str, Any]:
    """Returns the keywords and parts that another objective takes over: added masks, and the kind of advantage.

    Nothing of an objective of parts alone is an addition. Raises `TrimtabError` for a part in the place of that of a
    method: every method would have the same one.
    """
    from trimtab.objectives import keywords_of

    accepted = {key: value for key, value in given.keywords.items() if key in keywords_of(name)}
    if given.name == COMPOSED:
        return accepted
    replaced = [part for part in OBJECTIVE_PARTS if part in given.keywords and part != "mask"]
    if replaced:
        raise TrimtabError(
            f"compare.objectives: objective.{replaced[0]} belongs to {given.name}, and {name} has its own: leave it "
            f"out, or compare with `trimtab compare --methods '{given.name}:{replaced[0]}={{...}}' --methods {name}`"
        )
    return accepted | {key: given.keywords[key] for key in ("mask", "advantage") if key in given.keywords}
