"""Plans an experiment: one complete recipe for every method, regime and seed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import TrimtabError, require_distinct
from trimtab.objectives.lookup import split_name
from trimtab.trainer.config import Config, load_config, parse_override, split_overrides
from trimtab.trainer.lab.regimes import RECIPE, Regime
from trimtab.trainer.run import build_parts

METHODS = (
    "grpo",
    "reinforce",
    "cispo",
    "token-bypass",
    "seq-bypass",
    "token-tis",
    "seq-tis",
    "seq-mis",
    "seq-mis-seq-ratio",
    "icepop",
    "geo-mask-token-tis:calibrate=true",
    "m2po",
    "token-alp",
    "seq-alp",
)
REGIMES = ("on-policy", "stale-32", "int3", "reuse-16")
SEEDS = 5

REAL_RECIPE = "quickstart"
LONG_RECIPE = "laboratory-long"
OWN_RECIPES = ("laboratory-tools", LONG_RECIPE)  # recipes with the name of their model
WARM_STARTS = 3  # `laboratory-long` has this many warm-started models; the seed of a run selects one
EVALUATIONS = 5
FOLDER_LENGTH = 120  # characters; file systems allow 255 bytes
_EXPERIMENT_KEYS = {
    "seed": "--seeds",
    "out": "--out",
    "objective.name": "--methods",
    "model.path": "--model",
    "base": "--model",
}


@dataclass(frozen=True, slots=True)
class Method:
    """An objective with changed keywords."""

    # The text given by the user, such as `icepop:weight_max=3`. A keyword with a dot is a recipe key
    # (`token-alp:perturbation.std=0.01`).
    spec: str
    objective: str  # the name of a preset, or a user's `module:function`
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The name of the folder of the method's runs; a name that is too long is cut and ends with a hash."""
        name = re.sub(r"[^\w.+-]+", "_", self.spec, flags=re.ASCII)
        if len(name) <= FOLDER_LENGTH:
            return name
        digest = hashlib.sha256(self.spec.encode()).hexdigest()[:8]
        return f"{name[: FOLDER_LENGTH - 9]}-{digest}"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the experiment."""

    name: str  # path of the run directory, relative to the folder of the experiment
    method: Method
    regime: Regime
    seed: int
    config: Config  # `config.out` is the run directory


@dataclass(frozen=True, slots=True)
class SkippedRun:
    """A method that cannot be trained in a regime, and the reason (such as prefixes with a stale sampler)."""

    method: Method
    regime: Regime
    reason: str


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """All runs of an experiment in training order: seed by seed, so that partial results cover the same seeds."""

    out: Path  # the folder of the experiment
    runs: tuple[PlannedRun, ...]
    skipped: tuple[SkippedRun, ...] = ()
    model: str | None = None  # option --model, for all runs
    sets: Sequence[str] = ()  # options --set, for all runs


def parse_method(spec: str) -> Method:
    """Parses `NAME` or `NAME:KEY=VALUE,KEY=VALUE`, where NAME is a preset or a user's `module:function`."""
    name, rest = split_name(spec)
    if not name:
        raise TrimtabError(
            f"method {spec!r}: write it as NAME or NAME:KEY=VALUE,KEY=VALUE, where NAME may be your own module:function"
        )
    changes = split_overrides(rest, f"method {spec!r}")
    keys = [parse_override(change)[0] for change in changes]
    for key in keys:
        if key in _EXPERIMENT_KEYS:
            raise TrimtabError(f"method {spec!r}: {key} belongs to the experiment, use {_EXPERIMENT_KEYS[key]}")
    overrides = tuple(
        change if "." in key else f"objective.{change}" for key, change in zip(keys, changes, strict=True)
    )
    return Method(spec, name, overrides)


def plan_experiment(
    methods: Sequence[str],
    regimes: Sequence[Regime],
    seeds: int,
    out: Path,
    *,
    model: str | None = None,
    sets: Sequence[str] = (),
    first_seed: int = 0,
) -> ExperimentPlan:
    """Returns the runs of every method x regime x seed. Each recipe is validated before anything is trained.

    `sets` are recipe changes for all runs. Raises `TrimtabError` if a method or regime is named twice, if a key belongs
    to the experiment or to a regime, or if a method cannot be trained in any of the regimes.
    """
    parsed = [parse_method(spec) for spec in methods]
    require_distinct("method", [method.folder for method in parsed])
    require_distinct("regime", [regime.name for regime in regimes])
    _check_sets(sets, regimes, model)
    skipped: list[SkippedRun] = []
    pairs: list[tuple[Method, Regime]] = []
    for method in parsed:
        reasons = []
        for regime in regimes:
            try:
                build_parts(_config(method, regime, 0, out, model, sets)).close()
                pairs.append((method, regime))
            except TrimtabError as error:
                reasons.append(SkippedRun(method, regime, str(error)))
        if len(reasons) == len(regimes):
            raise TrimtabError(f"method {method.spec!r}: {reasons[0].reason}")
        skipped += reasons
    runs = [
        PlannedRun(_name(method, regime, seed), method, regime, seed, _config(method, regime, seed, out, model, sets))
        for seed in range(first_seed, first_seed + seeds)
        for method, regime in pairs
    ]
    return ExperimentPlan(out, tuple(runs), tuple(skipped), model, sets)


def plan_from_recipe(config: Config, out: Path) -> ExperimentPlan:
    """Returns the runs of every objective and seed of `[compare]`, with validated recipes, as one regime.

    An objective other than that of the recipe starts from its defaults, as with `--set objective.name=...`.
    """
    assert config.compare is not None
    require_distinct("objective", config.compare.objectives)
    require_distinct("seed", [str(seed) for seed in config.compare.seeds])
    data = config.model_dump(exclude={"compare"}, exclude_none=True)
    data["trainer"]["max_idle_steps"] = 0  # a collapsing method is a result, not an error
    regime = Regime(config.description, name="recipe")
    runs = []
    for objective in config.compare.objectives:
        other = [] if objective == config.objective.name else [f"objective.name={objective}"]
        for seed in config.compare.seeds:
            name = f"{objective}/seed{seed}"
            recipe = load_config(data | {"seed": seed, "out": str(out / name)}, other)
            runs.append(PlannedRun(name, Method(objective, objective, ()), regime, seed, recipe))
    return ExperimentPlan(out, tuple(runs))


def _name(method: Method, regime: Regime, seed: int) -> str:
    return f"{regime.name}/{method.folder}/seed{seed}"


def _config(method: Method, regime: Regime, seed: int, out: Path, model: str | None, sets: Sequence[str]) -> Config:
    recipe = _recipe_of(model)
    changes = [
        'unset=["objective"]',  # otherwise an objective of the same name would inherit the recipe's keywords
        f"objective.name={method.objective}",
        "threads=1",
        "log.trajectories_every=0",
        "trainer.max_idle_steps=0",  # a collapsing method is a result, not an error
        *([] if model is None else [f"model.path={model}"]),
        *_regime_settings(regime, recipe),
        *([f"sft.seed={seed % WARM_STARTS}"] if recipe == LONG_RECIPE else []),
        *sets,
        *method.overrides,
        f"seed={seed}",
    ]
    config = load_config(recipe, changes)
    if not any(parse_override(change)[0] == "eval.every" for change in sets):
        every = max(1, config.trainer.steps // EVALUATIONS)
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": every})})
    return config.model_copy(update={"out": str(out / _name(method, regime, seed))})


def _recipe_of(model: str | None) -> str:
    if model in OWN_RECIPES:
        return str(model)
    return RECIPE if model is None or model.startswith(RECIPE) else REAL_RECIPE


def _regime_settings(regime: Regime, recipe: str) -> Sequence[str]:
    """Returns the settings of a regime. Its budget is for the laboratory; other models keep that of their recipe."""
    if recipe not in (RECIPE, LONG_RECIPE):
        return [f"{key}={value}" for key, value in regime.changes.items()]
    own = load_config(recipe)
    return regime.settings(own.trainer.steps, own.optim.lr)


def _check_sets(sets: Sequence[str], regimes: Sequence[Regime], model: str | None) -> None:
    for change in sets:
        key, value = parse_override(change)
        if key == "unset":
            raise TrimtabError(f"--set {change}: methods start from their own defaults; set {value} to a value instead")
        if key in _EXPERIMENT_KEYS or key.startswith("compare"):
            option = _EXPERIMENT_KEYS.get(key, "--methods")
            raise TrimtabError(f"--set {change}: {key} belongs to the experiment, use {option}")
        owner = next((r.name for r in regimes if key in r.changes), None)
        if owner is not None:
            raise TrimtabError(f"--set {change}: {key} is set by regime {owner!r}; choose another regime")
    owner = next((r.name for r in regimes if "model.path" in r.changes), None)
    if model is not None and owner is not None:
        raise TrimtabError(f"--model {model}: regime {owner!r} has its own model; leave one of them out")
