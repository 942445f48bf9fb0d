"""Warnings about comparability: different tasks, models or budgets; unfinished or unevaluated runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trimtab.report.groups import Group, format_value, join_names
from trimtab.report.health import learned
from trimtab.report.summary_columns import accuracy_of
from trimtab.runs.provenance import comparable_setting
from trimtab.runs.reader import Run

PROBLEMS = "eval.problems"
_COUNT = re.compile(r"eval/[^/]+/problems")
# What differs, the setting, and why it limits a comparison; most serious first. A trailing dot stands for all settings
# of a section.
_DIFFERENCES = (
    ("tasks", "task.name", "accuracy, reward and length mean different things"),
    ("models", "model.path", "they started from different places"),
    ("numbers of held-out problems", PROBLEMS, "accuracies are of different problems"),
    ("settings of the task", "task.", "accuracy and reward are of different measures"),
    ("rewards", "reward", "accuracy and reward are of different measures"),
    ("prompts of a step", "trainer.prompts", "a step is not the same amount of data"),
    ("samples of a prompt", "trainer.samples", "a step is not the same amount of data"),
    ("planned numbers of steps", "trainer.steps", "last values are not of the same step"),
)
_MEASURE = ("task.", "model.path", PROBLEMS, "reward")
"""Settings whose difference makes held-out accuracies incomparable."""


def same_measure(groups: Sequence[Group]) -> bool:
    """Whether all groups have the same task, rewards, model and held-out problems, so that one can be best."""
    return not any(_differing(groups, key) for key in _MEASURE)


def cautions(groups: Sequence[Group]) -> list[str]:
    """Returns one sentence for each difference that limits the comparison, most serious first."""
    named = _differing(groups, "task.name")
    sentences = []
    for what, key, effect in _DIFFERENCES:
        differing = _differing(groups, key)
        if differing and not (named and key == "task."):  # other tasks have other settings
            values = _values_by_group(groups, lambda group, key=key: format_value(_value(group, key)))
            shown = values if differing == [key] else ", ".join(differing[:4])
            sentences.append(f"The {what} differ ({shown}): {effect}.")
    return [
        *sentences,
        *_provenance(groups),
        *_unfinished(groups),
        *_unmeasured(groups),
        *_worse(groups),
        *_seeds(groups),
    ]


def _provenance(groups: Sequence[Group]) -> Iterator[str]:
    if len({comparable_setting(part) for group in groups for run in group.runs for part in run.origins}) > 1:
        yield (
            "The runs were made with different versions, commits or hardware (provenance.json): equal seeds need not "
            "give equal results."
        )


def _unfinished(groups: Sequence[Group]) -> Iterator[str]:
    unfinished = [
        f"{_run_name(group, run)} at step {run.last['step']} of {planned}"
        for group in groups
        if isinstance(planned := group.config.get("trainer.steps"), int)
        for run in group.runs
        if run.last["step"] < planned
    ]
    if unfinished:
        yield (
            f"Unfinished: {join_names(unfinished)}. Its numbers are those so far; means and bands end at its last step."
        )


def _unmeasured(groups: Sequence[Group]) -> Iterator[str]:
    """Yields the runs that were not evaluated after training (an accuracy of 0 was measured)."""
    missing = [
        _run_name(group, run)
        for group in groups
        for run in group.runs
        if (accuracy := accuracy_of(run)) is None or accuracy.after is None
    ]
    if missing:
        yield f"Held-out accuracy was not measured after training: {join_names(missing)}."


def _worse(groups: Sequence[Group]) -> Iterator[str]:
    """Yields the runs that unlearned: a comparison says which is better, not whether any is good."""
    faults = [
        f"{_run_name(group, run)}: {change.fault}"
        for group in groups
        for run in group.runs
        for change in learned(run)
        if change.fault
    ]
    if faults:
        yield f"Got worse: {'; '.join(faults)}."


def _seeds(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        repeated = [str(seed) for seed, count in Counter(group.seeds).items() if count > 1]
        if repeated:
            yield f"{group.name}: seed {', '.join(repeated)} more than once; runs of one seed are not independent."
    if any(len(group.runs) != len(groups[0].runs) for group in groups):
        counts = _values_by_group(groups, lambda group: str(len(group.runs)))
        yield f"The numbers of seeds differ ({counts}): intervals of few seeds are ranges, not confidence."
    elif any(set(group.seeds) != set(groups[0].seeds) for group in groups):
        yield "The seeds differ between groups: part of a difference may be that of the seeds."


def _differing(groups: Sequence[Group], key: str) -> list[str]:
    """Returns the settings that start with `key` and differ between groups."""
    keys = sorted({name for group in groups for name in group.config} | {PROBLEMS})
    below = (name for name in keys if name.startswith(key))
    return [name for name in below if any(_value(group, name) != _value(groups[0], name) for group in groups)]


def _value(group: Group, key: str) -> Any:
    """Returns a setting of the group.

    The number of held-out problems is the logged one: a task may have fewer problems than the recipe asks for.
    """
    if key == PROBLEMS:
        counts = [run.series(name)[1] for run in group.runs for name in run.keys if _COUNT.fullmatch(name)]
        evaluated = sorted({int(count[-1]) for count in counts if len(count)})
        if evaluated:
            return evaluated[0] if len(evaluated) == 1 else tuple(evaluated)
    return group.config.get(key)


def _values_by_group(groups: Sequence[Group], show: Callable[[Group], str]) -> str:
    """Returns `a 1; b, c 2`: the value of each group, with groups of equal value together."""
    names_by_value: dict[str, list[str]] = {}
    for group in groups:
        names_by_value.setdefault(show(group), []).append(group.name)
    return "; ".join(f"{join_names(names)} {value}" for value, names in names_by_value.items())


def _run_name(group: Group, run: Run) -> str:
    return group.name if len(group.runs) == 1 else f"{group.name} seed {run.config.get('seed', run.path.name)}"
