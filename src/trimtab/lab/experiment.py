"""Plans an experiment: every method in every regime with every seed, each as a whole recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.config import Config, load_config, parse_override
from trimtab.errors import TrimtabError
from trimtab.lab.regimes import RECIPE, Regime
from trimtab.training.run import check

METHODS = (
    "grpo",
    "reinforce",
    "cispo",
    "token-bypass",
    "seq-bypass",
    "token-tis",
    "seq-tis",
    "token-mis",
    "seq-mis",
    "icepop",
    "geo-mask-token-tis:calibrate=true",
    "m2po",
    "token-alp",
    "seq-alp",
)
REGIMES = ("on-policy", "stale-32", "int3", "reuse-16")
SEEDS = 5

REAL_RECIPE = "quickstart"
BUDGET = {"trainer.steps", "optim.lr"}  # measured on the laboratory model; other models keep their recipe's
EVALUATIONS = 5
_OURS = {
    "seed": "--seeds",
    "out": "--out",
    "objective.name": "--methods",
    "model.path": "--model",
    "base": "--model",
}


@dataclass(frozen=True, slots=True)
class Method:
    """`spec` is how it was asked for: an objective, with changed keywords as in `icepop:weight_max=3`; a keyword with a
    dot is a key of the recipe (`token-alp:perturbation.std=0.01`)."""

    spec: str
    objective: str
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.+-]+", "_", self.spec)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the grid. `config.out` is its run directory."""

    method: Method
    regime: Regime
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return f"{self.regime.name}/{self.method.folder}/seed{self.seed}"


@dataclass(frozen=True, slots=True)
class SkippedRun:
    """A method that is impossible in a regime, and why (prefixes of an older policy with a stale sampler, say)."""

    method: Method
    regime: Regime
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of a grid, in the order they are trained: seed by seed, so that a grid cut short is even."""

    cells: tuple[PlannedRun, ...]
    refused: tuple[SkippedRun, ...]


def parse_method(spec: str) -> Method:
    """Raises `TrimtabError` for a keyword without a value."""
    name, _, rest = spec.partition(":")
    changes = re.split(r",(?=[\w.]+=)", rest) if rest else []
    keys = [parse_override(change)[0] for change in changes if "=" in change]
    if not name or len(keys) < len(changes):
        raise TrimtabError(f"method {spec!r}: write it as NAME or NAME:KEY=VALUE,KEY=VALUE")
    for key in keys:
        if key in _OURS:
            raise TrimtabError(f"method {spec!r}: {key} belongs to the grid, use {_OURS[key]}")
    overrides = tuple(
        change if "." in key else f"objective.{change}" for key, change in zip(keys, changes, strict=True)
    )
    return Method(spec, name, overrides)


def plan(
    methods: Sequence[str],
    regimes: Sequence[Regime],
    seeds: int,
    out: Path,
    *,
    model: str | None = None,
    sets: Sequence[str] = (),
) -> Plan:
    """Every method x regime x seed, checked before anything is trained.

    `sets` changes all cells. Raises `TrimtabError` for what cannot be meant: a word named twice, a key that belongs to
    the grid or to a regime, a method that no regime can train.
    """
    chosen = [parse_method(spec) for spec in methods]
    _no_repeats("method", [method.folder for method in chosen])
    _no_repeats("regime", [regime.name for regime in regimes])
    _check_sets(sets, regimes, model)
    refused: list[SkippedRun] = []
    rows: list[tuple[Method, Regime]] = []
    for method in chosen:
        reasons = []
        for regime in regimes:
            try:
                check(_config(method, regime, 0, out, model, sets)).scorer.close()
                rows.append((method, regime))
            except TrimtabError as error:
                reasons.append(SkippedRun(method, regime, str(error)))
        if len(reasons) == len(regimes):
            raise TrimtabError(f"method {method.spec!r}: {reasons[0].reason}")
        refused += reasons
    cells = [
        PlannedRun(method, regime, seed, _config(method, regime, seed, out, model, sets))
        for seed in range(seeds)
        for method, regime in rows
    ]
    return Plan(tuple(cells), tuple(refused))


def _config(method: Method, regime: Regime, seed: int, out: Path, model: str | None, sets: Sequence[str]) -> Config:
    real = model is not None and not model.startswith(RECIPE)
    place = out / regime.name / method.folder / f"seed{seed}"
    changes = [
        # Twice, because naming the recipe's own objective again would keep the keywords the recipe has for it.
        "objective.name=another",
        f"objective.name={method.objective}",
        "threads=1",
        "log.trajectories_every=0",
        "trainer.max_idle_steps=0",  # a method that collapses is a result
        *([] if model is None else [f"model.path={model}"]),
        *(setting for setting in regime.settings if not (real and setting.partition("=")[0] in BUDGET)),
        *sets,
        *method.overrides,
        f"seed={seed}",
    ]
    config = load_config(REAL_RECIPE if real else RECIPE, changes)
    if not any(parse_override(change)[0] == "eval.every" for change in sets):
        every = max(1, config.trainer.steps // EVALUATIONS)
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": every})})
    return config.model_copy(update={"out": str(place)})


def _check_sets(sets: Sequence[str], regimes: Sequence[Regime], model: str | None) -> None:
    for change in sets:
        key, _ = parse_override(change)
        if key in _OURS or key.startswith("compare"):
            raise TrimtabError(f"--set {change}: {key} belongs to the grid, use {_OURS.get(key, '--methods')}")
        owner = next((r.name for r in regimes if key in r.overrides and key not in BUDGET), None)
        if owner is not None:
            raise TrimtabError(f"--set {change}: {key} is what regime {owner!r} sets; choose another regime")
    owner = next((r.name for r in regimes if "model.path" in r.overrides), None)
    if model is not None and owner is not None:
        raise TrimtabError(f"--model {model}: regime {owner!r} has a model of its own; leave one of them out")


def _no_repeats(kind: str, words: Iterable[str]) -> None:
    seen: set[str] = set()
    for word in words:
        if word in seen:
            raise TrimtabError(f"{kind} {word!r} is named twice; name each once")
        seen.add(word)
