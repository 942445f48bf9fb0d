"""Tunes methods before they are compared, with equally many settings for each, on separate seeds and problems.

A method listed in `OTHER_BOUND` tries each learning rate with two bounds: the published one and another. Other methods
try more learning rates instead. The setting with the highest mean accuracy over the tuning seeds is trained with the
seeds of the comparison and evaluated on its problems; its row follows that of the published setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from trimtab.errors import TrimtabError
from trimtab.runs.summary import RunSummary
from trimtab.trainer.config import parse_override
from trimtab.trainer.lab.experiment import ExperimentPlan, Method, PlannedRun, parse_method, plan_experiment

FOLDER = "tuning"
FIRST_SEED = 1000  # the seeds of the comparison begin with 0
# Factors of the regime's learning rate, the published rate first: for methods with two bounds, and for other methods.
# Both have the same number of settings and the same lowest rate.
RATES = (1.0, 0.5, 0.25)
RATES_ALONE = (1.0, 0.25, 0.5, 0.7, 1.4, 2.0)
BUDGET = len(RATES_ALONE)
# The second value that is tried for a method's bound; the published value is the default (objectives/presets.py). Most
# are wider, because published bounds on whole responses are for other lengths. Methods that are not listed here, or
# that the user gave with keywords, tune only the learning rate.
OTHER_BOUND = {
    "dapo": "clip_high=0.5",
    "gspo": "clip_low=3e-3,clip_high=4e-3",
    "cispo": "ceiling=2.0",
    **dict.fromkeys(("token-bypass", "token-alp-bypass"), "clip_low=0.5,clip_high=1.0"),
    "seq-bypass": "clip_low=0.9,clip_high=9.0",
    "token-tis": "weight_max=5.0",
    **dict.fromkeys(("seq-tis", "turn-tis", "seq-mis", "seq-mis-seq-ratio"), "weight_max=10.0"),
    "icepop": "weight_max=2.0",
    **dict.fromkeys(("geo-mask", "geo-mask-token-tis"), "keep_min=0.9,keep_max=1.1"),
    "k3-mask": "divergence_max=0.1",
    "opsm": "delta=0.5",
    **dict.fromkeys(("token-alp", "seq-alp"), "perturbation.std=0.01"),
    "soup": "prefix.ratio=0.25",
    "oapl": "beta=0.1",
    "m2po": "tau=0.4",
    "luffy": "gamma=0.3",
    **dict.fromkeys(("dppo", "cppo"), "divergence_max=0.3"),
    "dppo-kl": "divergence_max=0.2",
    "ipo": "divergence_max=1.0",
    "flash-reinforce": "divergence_max=0.03",
    "trm": "k2_max=0.5,k3_max=0.01",
    "ctpo": "clip_low=0.1,clip_high=0.2",
    **dict.fromkeys(("pnpo", "a3po"), "clip_low=0.4,clip_high=0.4"),
    "sapo": "tau_positive=2.0,tau_negative=2.1",
    "gmpo": "clip_low=0.2,clip_high=0.2",
    "drpo": "epsilon=0.3",
    "score-centering": "ceiling=5.0",
}


@dataclass(frozen=True, slots=True)
class Candidates:
    """The settings to try for each method and regime, and their runs."""

    plan: ExperimentPlan
    specs: Mapping[tuple[str, str], tuple[str, ...]]  # settings by (method, regime), the published setting first
    seeds: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen setting of a method in a regime; accuracies are means over the tuning seeds."""

    method: str
    regime: str
    spec: str
    accuracy: float
    published: float

    @property
    def settings(self) -> str:
        """The chosen setting in words, such as `optim.lr=2e-4 weight_max=5`, or `published`."""
        keywords = [change.removeprefix("objective.") for change in parse_method(self.spec).overrides]
        return "published" if self.spec == self.method else " ".join(keywords)


def list_candidates(method: Method, rate: float) -> tuple[str, ...]:
    """Returns `BUDGET` settings of a method as specs, the published first; `rate` is the published learning rate."""
    if any(parse_override(change)[0] == "optim.lr" for change in method.overrides):
        raise TrimtabError(f"method {method.spec!r}: --tune chooses optim.lr; leave it out")
    other = None if method.overrides else OTHER_BOUND.get(method.objective)
    grid = product(RATES, ("", other)) if other else product(RATES_ALONE, ("",))
    specs = []
    for factor, bound in grid:
        changes = [bound, "" if factor == 1 else f"optim.lr={factor * rate:.3g}"]
        given = ",".join(filter(None, changes))
        specs.append(f"{method.spec}{',' if method.overrides else ':'}{given}" if given else method.spec)
    return tuple(specs)


def plan_tuning(published: ExperimentPlan, seeds: int) -> Candidates:
    """Returns the runs of all candidates. They are evaluated on the held-out problems after those of the comparison.

    `published` is the plan of the comparison with published settings. Raises what `plan_experiment` raises, and
    `TrimtabError` if the test split has no further problems.
    """
    specs: dict[tuple[str, str], tuple[str, ...]] = {}
    runs: list[PlannedRun] = []
    out, model = published.out / FOLDER, published.model
    for run in published.runs:
        if (run.method.spec, run.regime.name) in specs:  # another seed
            continue
        chosen = list_candidates(run.method, run.config.optim.lr)
        skip = run.config.eval.skip + run.config.eval.problems
        sets = [*published.sets, f"eval.skip={skip}", "eval.every=0"]
        specs[run.method.spec, run.regime.name] = chosen
        plan = plan_experiment(chosen, [run.regime], seeds, out, model=model, sets=sets, first_seed=FIRST_SEED)
        runs += plan.runs
    runs.sort(key=lambda run: run.seed)
    return Candidates(ExperimentPlan(out, tuple(runs)), specs, seeds)


def choose(tuned: Candidates, results: Mapping[str, RunSummary]) -> list[Choice]:
    """Returns the candidate with the highest mean accuracy for each method and regime, the first of equal ones.

    A diverged run counts as 0. Raises `TrimtabError` if a run failed.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for run in tuned.plan.runs:
        result = results[run.name]
        if result.status == "failed":
            raise TrimtabError(f"{FOLDER}/{run.name}: {result.error}; the same command tries it again")
        values.setdefault((run.method.spec, run.regime.name), []).append(result.accuracy or 0.0)
    choices = []
    for (method, regime), specs in tuned.specs.items():
        means = {spec: sum(values[spec, regime]) / tuned.seeds for spec in specs}
        best = max(specs, key=lambda spec: means[spec])
        choices.append(Choice(method, regime, best, means[best], means[specs[0]]))
    return choices


def plan_comparison(published: ExperimentPlan, choices: Sequence[Choice]) -> ExperimentPlan:
    """Returns the plan of the published settings, each followed by the chosen setting as `METHOD (tuned)`.

    If the published setting was chosen, both rows have the same run.
    """
    regimes = {run.regime.name: run.regime for run in published.runs}
    seeds, out = len({run.seed for run in published.runs}), published.out
    options = {"model": published.model, "sets": published.sets}
    tuned = [
        replace(run, method=replace(run.method, spec=tuned_name(choice.method)))
        for choice in choices
        for run in plan_experiment([choice.spec], [regimes[choice.regime]], seeds, out, **options).runs
    ]
    order = [name for run in published.runs for name in (run.method.spec, tuned_name(run.method.spec))]
    runs = sorted([*published.runs, *tuned], key=lambda run: (run.seed, order.index(run.method.spec)))
    return replace(published, runs=tuple(runs))


def tuned_name(method: str) -> str:
    """Returns the name of the row of a method with the chosen setting."""
    return f"{method} (tuned)"


def describe(choices: Sequence[Choice], tuned: Candidates) -> list[str]:
    """Returns lines for the page of the comparison: one on the tuning budget, and one for each choice."""
    section = tuned.plan.runs[0].config.eval
    seeds = f"seed {FIRST_SEED}" if tuned.seeds == 1 else f"seeds {FIRST_SEED} to {FIRST_SEED + tuned.seeds - 1}"
    budget = (
        f"Tuned: {BUDGET} settings of each method in each regime (the learning rate, and one bound of its own where it "
        f"has one), trained with {seeds} and evaluated on held-out problems {section.skip + 1} to "
        f"{section.skip + section.problems}. The seeds and problems of the table had no part in the choice."
    )
    return [budget] + [
        f"{choice.method} in {choice.regime}: {choice.settings} "
        f"(while tuning {choice.accuracy:.3f}, published {choice.published:.3f})"
        for choice in choices
    ]
