"""Warnings about comparability: different tasks, models or budgets; unfinished or unevaluated runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.report.groups import Group, listed, written
from trimtab.report.summary_columns import accuracy_of
from trimtab.runs.origins import setting
from trimtab.runs.reader import Run

PROBLEMS = "eval.problems"
_COUNT = re.compile(r"eval/[^/]+/problems")
# What makes held-out accuracies of different measures.
_MEASURE = (
    ("task.name", "The tasks differ", "accuracy, reward and length mean different things"),
    ("model.path", "The models differ", "they started from different places"),
    (PROBLEMS, "The numbers of held-out problems differ", "accuracies are of different problems"),
)


def same_measure(groups: Sequence[Group]) -> bool:
    """Whether accuracies and rewards are of one task, one model and the same problems, so that one can be best."""
    keys = {key for group in groups for key in group.config if key.startswith(("task.", "reward"))}
    return not any(_differs(groups, key) for key in (*keys, *(key for key, *_ in _MEASURE)))


def cautions(groups: Sequence[Group]) -> list[str]:
    """One sentence each, most serious first; empty when the runs are alike in all of this."""
    found = [
        f"{what} ({_each(groups, lambda group, key=key: written(_value(group, key)))}): {why}."
        for key, what, why in _MEASURE
        if _differs(groups, key)
    ]
    if not _differs(groups, "task.name"):
        found += _settings(groups, "task.", "The settings of the task differ")
    found += _settings(groups, "reward", "The rewards differ")
    if _differs(groups, "trainer.prompts") or _differs(groups, "trainer.samples"):
        each = _each(groups, lambda group: f"{_get(group, 'trainer.prompts')} x {_get(group, 'trainer.samples')}")
        found.append(f"The batches differ (prompts x samples: {each}): a step is not the same amount of data.")
    if _differs(groups, "trainer.steps"):
        each = _each(groups, lambda group: _get(group, "trainer.steps"))
        found.append(f"The planned numbers of steps differ ({each}): last values are not of the same step.")
    if len({setting(part) for group in groups for run in group.runs for part in run.origins}) > 1:
        found.append(
            "The runs were made with different versions, commits or hardware (provenance.json): equal seeds need not "
            "give equal numbers."
        )
    found += _unfinished(groups)
    found += _unmeasured(groups)
    return found + _seeds(groups)


def _unfinished(groups: Sequence[Group]) -> list[str]:
    """Runs short of what was planned."""
    short = []
    for group in groups:
        planned = group.config.get("trainer.steps")
        runs = [run for run in group.runs if isinstance(planned, int) and run.last["step"] < planned]
        short += [f"{_who(group, run)} at step {run.last['step']} of {planned}" for run in runs]
    if not short:
        return []
    return [f"Unfinished: {listed(short)}. Its numbers are of where it stands; means and bands end there."]


def _unmeasured(groups: Sequence[Group]) -> list[str]:
    """Runs that were not evaluated after their first update; an accuracy of 0 is a measurement."""
    missing = [
        _who(group, run)
        for group in groups
        for run in group.runs
        if (found := accuracy_of(run)) is None or found.after is None
    ]
    return [f"Held-out accuracy was not measured after training: {listed(missing)}."] if missing else []


def _seeds(groups: Sequence[Group]) -> list[str]:
    found = []
    for group in groups:
        twice = [str(seed) for seed, count in Counter(group.seeds).items() if count > 1]
        if twice:
            found.append(
                f"{group.name}: seed {', '.join(twice)} more than once; runs of one seed are no independent evidence."
            )
    if any(len(group.runs) != len(groups[0].runs) for group in groups):
        each = _each(groups, lambda group: str(len(group.runs)))
        found.append(f"The numbers of seeds differ ({each}): intervals of few seeds are ranges, not confidence.")
    elif any(set(group.seeds) != set(groups[0].seeds) for group in groups):
        found.append("The seeds differ between groups: part of a difference may be that of the seeds.")
    return found


def _settings(groups: Sequence[Group], prefix: str, what: str) -> list[str]:
    keys = sorted({key for group in groups for key in group.config if key.startswith(prefix)})
    differing = [key for key in keys if _differs(groups, key)]
    return [f"{what} ({', '.join(differing[:4])}): accuracy and reward are of different measures."] if differing else []


def _differs(groups: Sequence[Group], key: str) -> bool:
    return any(_value(group, key) != _value(groups[0], key) for group in groups)


def _value(group: Group, key: str) -> Any:
    """A setting of the group. Held-out problems are those that were asked: a task may have fewer than the recipe's."""
    if key == PROBLEMS:
        counts = [run.series(name)[1] for run in group.runs for name in run.keys if _COUNT.fullmatch(name)]
        asked = {int(count[-1]) for count in counts if len(count)}
        if asked:
            return asked.pop() if len(asked) == 1 else tuple(sorted(asked))
    return group.config.get(key)


def _get(group: Group, key: str) -> str:
    return written(group.config.get(key))


def _each(groups: Sequence[Group], say: Callable[[Group], str]) -> str:
    """`a 1; b, c 2`: groups that say the same together."""
    together: dict[str, list[str]] = {}
    for group in groups:
        together.setdefault(say(group), []).append(group.name)
    return "; ".join(f"{listed(names)} {value}" for value, names in together.items())


def _who(group: Group, run: Run) -> str:
    if len(group.runs) == 1:
        return group.name
    seed: Any = run.config.get("seed", run.path.name)
    return f"{group.name} seed {seed}"
