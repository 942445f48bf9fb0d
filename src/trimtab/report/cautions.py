"""Warnings about comparability: different tasks, models or budgets; unfinished or unevaluated runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from trimtab.report.groups import Group
from trimtab.report.health import learned
from trimtab.runs.provenance import comparable_setting
from trimtab.text import format_value, join_names

PROBLEMS = "eval.problems"
_COUNT = re.compile(r"eval/[^/]+/problems")
_MEASURE = ("task.", "model.path", PROBLEMS, "reward")
"""Settings, and starts of their names, whose difference makes held-out accuracies incomparable."""
_SIZES = ("trainer.prompts", "trainer.samples", "trainer.steps")
"""Settings whose difference makes a step another amount of data, or the last one another step."""


def same_measure(groups: Sequence[Group]) -> bool:
    """Whether all groups have the same task, rewards, model and held-out problems, so that one can be best."""
    return not _differing(groups, _MEASURE)


def cautions(groups: Sequence[Group]) -> list[str]:
    """Returns one sentence for each difference that limits the comparison, most serious first."""
    sentences = []
    if measure := _differing(groups, _MEASURE):
        sentences.append(f"{measure} differ: accuracies and rewards are of different things, and none is called best.")
    if sizes := _differing(groups, _SIZES):
        sentences.append(f"{sizes} differ: a step is not the same amount of data, or last values are of other steps.")
    if len({comparable_setting(part) for group in groups for run in group.runs for part in run.starts}) > 1:
        sentences.append(
            "The runs were made with different versions, commits or hardware (provenance.json): equal seeds need not "
            "give equal results."
        )
    unfinished, unmeasured, worse = [], [], []
    for group in groups:
        for run in group.runs:
            name = group.name if len(group.runs) == 1 else f"{group.name} seed {run.config.get('seed', run.path.name)}"
            planned = group.config.get("trainer.steps")
            if isinstance(planned, int) and run.steps < planned:
                unfinished.append(f"{name} at step {run.steps} of {planned}")
            if run.held_out.after is None:
                unmeasured.append(name)
            worse += [f"{name}: {change.fault}" for change in learned(run.kept) if change.fault]
    if unfinished:
        sentences.append(
            f"Unfinished: {join_names(unfinished)}. Its numbers are those so far; means and bands end at its last step."
        )
    if unmeasured:
        sentences.append(f"Held-out accuracy was not measured after training: {join_names(unmeasured)}.")
    if worse:
        sentences.append(f"Got worse: {'; '.join(worse)}.")
    return [*sentences, *_seeds(groups)]


def _seeds(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        repeated = [str(seed) for seed, count in Counter(group.seeds).items() if count > 1]
        if repeated:
            yield f"{group.name}: seed {', '.join(repeated)} more than once; runs of one seed are not independent."
    if any(len(group.runs) != len(groups[0].runs) for group in groups):
        counts = _by_group(groups, [str(len(group.runs)) for group in groups])
        yield f"The numbers of seeds differ ({counts}): intervals of few seeds are ranges, not confidence."
    elif any(set(group.seeds) != set(groups[0].seeds) for group in groups):
        yield "The seeds differ between groups: part of a difference may be that of the seeds."


def _differing(groups: Sequence[Group], keys: Sequence[str]) -> str:
    """Returns `task.digits (a 2; b 3)` for up to four settings that start with one of `keys` and differ, or ""."""
    names = sorted({name for group in groups for name in group.config} | {PROBLEMS})
    parts = []
    for name in (name for key in keys for name in names if name.startswith(key)):
        if any(_value(group, name) != _value(groups[0], name) for group in groups):
            parts.append(f"{name} ({_by_group(groups, [format_value(_value(group, name)) for group in groups])})")
    return ", ".join(parts[:4])


def _value(group: Group, key: str) -> Any:
    """Returns a setting of the group.

    The number of held-out problems is the logged one: a task may have fewer problems than the recipe asks for.
    """
    if key == PROBLEMS:
        counts = [run.series(name)[1] for run in group.runs for name in run.keys if _COUNT.fullmatch(name)]
        if evaluated := sorted({int(count[-1]) for count in counts if len(count)}):
            return evaluated[0] if len(evaluated) == 1 else evaluated
    return group.config.get(key)


def _by_group(groups: Sequence[Group], values: Sequence[str]) -> str:
    """Returns `a 1; b, c 2`: the value of each group, with groups of equal value together."""
    names: dict[str, list[str]] = {}
    for group, value in zip(groups, values, strict=True):
        names.setdefault(value, []).append(group.name)
    return "; ".join(f"{join_names(of)} {value}" for value, of in names.items())
