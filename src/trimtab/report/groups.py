"""Groups runs that differ only in seed and output folder, and gives each group a distinguishing name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, neighbors
from trimtab.files import natural_key
from trimtab.runs.layout import CONFIG, METRICS
from trimtab.runs.reader import Run, read_run
from trimtab.text import flatten, format_value, one_line
from trimtab.trainer.config import parse_config

# Keys that may differ within a group.
IGNORED_KEYS = ("seed", "out")
_SEED = re.compile(r"[-_. ]?seed[-_]?\d+$")


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in seed and output folder.

    `config` is their recipe with every default, flattened to dotted keys.
    """

    name: str
    runs: list[Run]
    config: Mapping[str, Any]

    @property
    def seeds(self) -> list[int | None]:
        return [run.config.get("seed") for run in self.runs]


def find_runs(path: Path) -> list[Path]:
    """Returns `path` itself if it is a run directory, otherwise the runs up to two folders below it.

    Raises `TrimtabError` when there is none.
    """
    if (path / CONFIG).is_file():
        return [path]
    found = {file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{CONFIG}")}
    runs = sorted(found, key=lambda run: natural_key(str(run)))
    if not runs:
        raise TrimtabError(f"{path} holds no run (config.toml is missing): check the path{neighbors(path)}")
    return runs


def group_runs(paths: Sequence[Path]) -> tuple[list[Group], list[str]]:
    """Returns the runs grouped by their recipe without seed and output folder, and notes about reading them.

    Groups are in the order of their first run; a path given twice counts once. Runs without a finished step are left
    out, with a note. Raises `TrimtabError` when none is left or a file is
    damaged.
    """
    unique = list({path.resolve(): path for path in paths}.values())
    started = [path for path in unique if _has_step(path)]
    # If no run has a step, `read_run` raises the error that says what is missing.
    runs = [read_run(path) for path in started or unique]
    notes = [f"{path} has no finished step yet and is left out." for path in unique if path not in started]
    recipes: list[Mapping[str, Any]] = []
    members: list[list[Run]] = []
    for run in runs:
        recipe = recipe_of(run, notes)
        if recipe in recipes:
            members[recipes.index(recipe)].append(run)
        else:
            recipes.append(recipe)
            members.append([run])
    names = _names(recipes, members)
    return [Group(*parts) for parts in zip(names, members, recipes, strict=True)], notes


def recipe_of(run: Run, notes: list[str]) -> dict[str, Any]:
    """Returns the resolved recipe without seed and output folder, as dotted keys.

    A recipe that this version rejects is returned as written, and a note is appended to `notes`.
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


def _names(recipes: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Run]]) -> list[str]:
    """Returns a name for each group: its objective, with the folder where several groups have that objective."""
    objectives = [format_value(recipe.get("objective.name", "run")) for recipe in recipes]
    names: list[str] = []
    for objective, runs in zip(objectives, members, strict=True):
        path = runs[0].path.resolve()
        # `soup` for soup/seed0 and for soup-seed0.
        folder = path.parent.name if _SEED.fullmatch(path.name) else _SEED.sub("", path.name) or path.name
        name = objective if objectives.count(objective) == 1 else f"{objective} ({one_line(folder)})"
        candidates = (name if count == 1 else f"{name} #{count}" for count in itertools.count(1))
        names.append(next(label for label in candidates if label not in names))
    return names
