"""Groups runs that differ only in seed and output folder, and lists what limits a comparison of the groups."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, neighbors
from trimtab.files import natural_key
from trimtab.report.health import judge_learning
from trimtab.runs.layout import CONFIG, METRICS
from trimtab.runs.provenance import comparable_setting
from trimtab.runs.reader import Run, read_run
from trimtab.runs.summary import RunSummary, summarize
from trimtab.text import flatten, format_value, join_names, one_line
from trimtab.trainer.config import parse_config

# Keys that may differ within a group.
IGNORED_KEYS = ("seed", "out")
_SEED = re.compile(r"[-_. ]?seed[-_]?\d+$")
_MEASURE = ("task.", "model.path", "eval.problems", "reward")
"""Prefixes of settings. If one of these settings differs, held-out accuracies are not comparable."""
_SIZES = ("trainer.prompts", "trainer.samples", "trainer.steps")
"""Settings that determine how much data a step contains and how many steps there are."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in seed and output folder."""

    name: str
    runs: list[Run]
    config: Mapping[str, Any]  # the recipe of the runs with all defaults, flattened to dotted keys

    @property
    def seeds(self) -> list[int | None]:
        return [run.config.get("seed") for run in self.runs]

    @cached_property
    def summaries(self) -> list[RunSummary]:
        """The summary of each run; its seconds are the sum over the steps."""
        return [summarize(run, "done", float(run.series("time/step")[1].sum())) for run in self.runs]


def find_runs(path: Path) -> list[Path]:
    """Returns `path` itself if it is a run directory, otherwise the run directories one or two levels below it.

    Raises `TrimtabError` if there is no run.
    """
    if (path / CONFIG).is_file():
        return [path]
    found = {file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{CONFIG}")}
    runs = sorted(found, key=lambda run: natural_key(str(run)))
    if not runs:
        raise TrimtabError(f"{path} holds no run (config.toml is missing): check the path{neighbors(path)}")
    return runs


def group_runs(paths: Sequence[Path]) -> tuple[list[Group], list[str]]:
    """Returns the runs grouped by their recipe without seed and output folder, and notes about skipped runs.

    Groups are in the order of their first run; a path given twice counts once. Runs without a finished step are
    skipped, with a note. Raises `TrimtabError` if no run is left or a file is damaged.
    """
    unique = list({path.resolve(): path for path in paths}.values())
    started = [path for path in unique if _has_step(path)]
    # If no run has a finished step, `read_run` raises an error that says what is missing.
    runs = [read_run(path) for path in started or unique]
    notes = [f"{path} has no finished step yet and is left out." for path in unique if path not in started]
    groups: list[tuple[Mapping[str, Any], list[Run]]] = []
    for run in runs:
        recipe = recipe_of(run, notes)
        members = next((members for known, members in groups if known == recipe), None)
        if members is None:
            groups.append((recipe, members := []))
        members.append(run)
    names = _names(groups)
    return [Group(name, runs, recipe) for name, (recipe, runs) in zip(names, groups, strict=True)], notes


def recipe_of(run: Run, notes: list[str]) -> dict[str, Any]:
    """Returns the resolved recipe of a run without seed and output folder, flattened to dotted keys.

    If this version rejects the recipe, the function returns it as written and appends a note to `notes`.
    """
    config: Mapping[str, Any] = run.config
    try:
        config = parse_config(config, str(run.path)).model_dump(mode="json", exclude_none=True)
    except TrimtabError as error:
        notes.append(f"The recipe is of another version of trimtab and compared as it is written. {error}")
    return flatten({key: value for key, value in config.items() if key not in IGNORED_KEYS})


def _has_step(path: Path) -> bool:
    file = path / METRICS
    if not (path / CONFIG).is_file():
        return True  # `read_run` raises the error that says what is missing
    return file.is_file() and b"\n" in file.read_bytes()


def _names(groups: Sequence[tuple[Mapping[str, Any], Sequence[Run]]]) -> list[str]:
    """Returns a name for each group: its objective, followed by the folder if several groups share the objective."""
    objectives = [format_value(recipe.get("objective.name", "run")) for recipe, _ in groups]
    names: list[str] = []
    for objective, (_, runs) in zip(objectives, groups, strict=True):
        path = runs[0].path.resolve()
        # The folder is `soup` for the runs soup/seed0 and soup-seed0.
        folder = path.parent.name if _SEED.fullmatch(path.name) else _SEED.sub("", path.name) or path.name
        name = objective if objectives.count(objective) == 1 else f"{objective} ({one_line(folder)})"
        candidates = (name if count == 1 else f"{name} #{count}" for count in itertools.count(1))
        names.append(next(label for label in candidates if label not in names))
    return names


def same_measure(groups: Sequence[Group]) -> bool:
    """Whether all groups have the same task, rewards, model and held-out problems; otherwise no group is the best."""
    return not _differing(groups, _MEASURE)


def list_cautions(groups: Sequence[Group]) -> list[str]:
    """Returns one sentence for each difference that limits the comparison, the most serious first."""
    return [*_setting_cautions(groups), *_run_cautions(groups), *_seed_cautions(groups)]


def _setting_cautions(groups: Sequence[Group]) -> Iterator[str]:
    if measure := _differing(groups, _MEASURE):
        yield f"{measure} differ: accuracies and rewards are of different things, and none is called best."
    if sizes := _differing(groups, _SIZES):
        yield f"{sizes} differ: a step is not the same amount of data, or last values are of other steps."
    if len({comparable_setting(part) for group in groups for run in group.runs for part in run.starts}) > 1:
        yield (
            "The runs were made with different versions, commits or hardware (provenance.json): equal seeds need not "
            "give equal results."
        )


def _run_cautions(groups: Sequence[Group]) -> Iterator[str]:
    unfinished, unmeasured, worse = [], [], []
    for group in groups:
        planned = group.config.get("trainer.steps")
        for run in group.runs:
            name = group.name if len(group.runs) == 1 else f"{group.name} seed {run.config.get('seed', run.path.name)}"
            if isinstance(planned, int) and run.steps < planned:
                unfinished.append(f"{name} at step {run.steps} of {planned}")
            if run.held_out.after is None:
                unmeasured.append(name)
            worse += [f"{name}: {change.fault}" for change in judge_learning(run.kept) if change.fault]
    if unfinished:
        ends = "Its numbers are those so far; means and bands end at its last step."
        yield f"Unfinished: {join_names(unfinished)}. {ends}"
    if unmeasured:
        yield f"Held-out accuracy was not measured after training: {join_names(unmeasured)}."
    if worse:
        yield f"Got worse: {'; '.join(worse)}."


def _seed_cautions(groups: Sequence[Group]) -> Iterator[str]:
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
    """Returns up to four settings that differ, such as `task.digits (a 2; b 3)`; empty if none differs.

    `keys` are prefixes of the settings that are compared.
    """
    names = sorted({name for group in groups for name in group.config})
    parts = []
    for name in (name for key in keys for name in names if name.startswith(key)):
        values = [group.config.get(name) for group in groups]
        if any(value != values[0] for value in values):
            parts.append(f"{name} ({_by_group(groups, list(map(format_value, values)))})")
    return ", ".join(parts[:4])


def _by_group(groups: Sequence[Group], values: Sequence[str]) -> str:
    """Returns the value of each group, such as `a 1; b, c 2`; groups with equal values are listed together."""
    names: dict[str, list[str]] = {}
    for group, value in zip(groups, values, strict=True):
        names.setdefault(value, []).append(group.name)
    return "; ".join(f"{join_names(of)} {value}" for value, of in names.items())
