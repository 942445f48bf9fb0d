"""Warnings about comparability: different tasks, models or budgets; unfinished or unevaluated runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.report.groups import Group, format_value, join_names
from trimtab.report.summary_columns import accuracy_of
from trimtab.runs.provenance import setting
from trimtab.runs.reader import Run

PROBLEMS = "eval.problems"
_COUNT = re.compile(r"eval/[^/]+/problems")
# Settings whose difference makes held-out accuracies incomparable.
_MEASURE = (
    ("task.name", "The tasks differ", "accuracy, reward and length mean different things"),
    ("model.path", "The models differ", "they started from different places"),
    (PROBLEMS, "The numbers of held-out problems differ", "accuracies are of different problems"),
)


def same_measure(groups: Sequence[Group]) -> bool:
    """Whether all groups have the same task, rewards, model and held-out problems, so that one can be best."""
    keys = {key for group in groups for key in group.config if key.startswith(("task.", "reward"))}
    return not any(_differs(groups, key) for key in (*keys, *(key for key, *_ in _MEASURE)))


def cautions(groups: Sequence[Group]) -> list[str]:
    """Returns one sentence for each difference that limits the comparison, most serious first."""
    sentences = [
        f"{statement} ({_values_by_group(groups, lambda group, key=key: format_value(_value(group, key)))}): {effect}."
        for key, statement, effect in _MEASURE
        if _differs(groups, key)
    ]
    if not _differs(groups, "task.name"):
        sentences += _settings(groups, "task.", "The settings of the task differ")
    sentences += _settings(groups, "reward", "The rewards differ")
    if _differs(groups, "trainer.prompts") or _differs(groups, "trainer.samples"):
        values = _values_by_group(
            groups, lambda group: f"{_shown_value(group, 'trainer.prompts')} x {_shown_value(group, 'trainer.samples')}"
        )
        sentences.append(f"The batches differ (prompts x samples: {values}): a step is not the same amount of data.")
    if _differs(groups, "trainer.steps"):
        values = _values_by_group(groups, lambda group: _shown_value(group, "trainer.steps"))
        sentences.append(f"The planned numbers of steps differ ({values}): last values are not of the same step.")
    if len({setting(part) for group in groups for run in group.runs for part in run.origins}) > 1:
        sentences.append(
            "The runs were made with different versions, commits or hardware (provenance.json): equal seeds need not "
            "give equal results."
        )
    sentences += _unfinished(groups)
    sentences += _unmeasured(groups)
    return sentences + _seeds(groups)


def _unfinished(groups: Sequence[Group]) -> list[str]:
    """Returns a sentence naming the runs with fewer steps than planned."""
    unfinished = []
    for group in groups:
        planned = group.config.get("trainer.steps")
        runs = [run for run in group.runs if isinstance(planned, int) and run.last["step"] < planned]
        unfinished += [f"{_run_name(group, run)} at step {run.last['step']} of {planned}" for run in runs]
    if not unfinished:
        return []
    return [
        f"Unfinished: {join_names(unfinished)}. Its numbers are those so far; means and bands end at its last step."
    ]


def _unmeasured(groups: Sequence[Group]) -> list[str]:
    """Returns a sentence naming the runs that were not evaluated after training (an accuracy of 0 was measured)."""
    missing = [
        _run_name(group, run)
        for group in groups
        for run in group.runs
        if (accuracy := accuracy_of(run)) is None or accuracy.after is None
    ]
    return [f"Held-out accuracy was not measured after training: {join_names(missing)}."] if missing else []


def _seeds(groups: Sequence[Group]) -> list[str]:
    sentences = []
    for group in groups:
        repeated = [str(seed) for seed, count in Counter(group.seeds).items() if count > 1]
        if repeated:
            sentences.append(
                f"{group.name}: seed {', '.join(repeated)} more than once; runs of one seed are not independent."
            )
    if any(len(group.runs) != len(groups[0].runs) for group in groups):
        counts = _values_by_group(groups, lambda group: str(len(group.runs)))
        sentences.append(f"The numbers of seeds differ ({counts}): intervals of few seeds are ranges, not confidence.")
    elif any(set(group.seeds) != set(groups[0].seeds) for group in groups):
        sentences.append("The seeds differ between groups: part of a difference may be that of the seeds.")
    return sentences


def _settings(groups: Sequence[Group], prefix: str, statement: str) -> list[str]:
    keys = sorted({key for group in groups for key in group.config if key.startswith(prefix)})
    differing = [key for key in keys if _differs(groups, key)]
    return (
        [f"{statement} ({', '.join(differing[:4])}): accuracy and reward are of different measures."]
        if differing
        else []
    )


def _differs(groups: Sequence[Group], key: str) -> bool:
    return any(_value(group, key) != _value(groups[0], key) for group in groups)


def _value(group: Group, key: str) -> Any:
    """Returns a setting of the group.

    The number of held-out problems is the logged one: a task may have fewer problems than the recipe asks for.
    """
    if key == PROBLEMS:
        counts = [run.series(name)[1] for run in group.runs for name in run.keys if _COUNT.fullmatch(name)]
        evaluated = {int(count[-1]) for count in counts if len(count)}
        if evaluated:
            return evaluated.pop() if len(evaluated) == 1 else tuple(sorted(evaluated))
    return group.config.get(key)


def _shown_value(group: Group, key: str) -> str:
    return format_value(group.config.get(key))


def _values_by_group(groups: Sequence[Group], show: Callable[[Group], str]) -> str:
    """Returns `a 1; b, c 2`: the value of each group, with groups of equal value together."""
    names_by_value: dict[str, list[str]] = {}
    for group in groups:
        names_by_value.setdefault(show(group), []).append(group.name)
    return "; ".join(f"{join_names(names)} {value}" for value, names in names_by_value.items())


def _run_name(group: Group, run: Run) -> str:
    if len(group.runs) == 1:
        return group.name
    seed: Any = run.config.get("seed", run.path.name)
    return f"{group.name} seed {seed}"
