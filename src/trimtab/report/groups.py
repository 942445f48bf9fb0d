"""Groups runs that differ only in seed and output folder, and gives each group a distinguishing name."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, neighbors
from trimtab.files import natural_key
from trimtab.runs.dotted_keys import flatten
from trimtab.runs.layout import CONFIG, METRICS
from trimtab.runs.reader import Run, read_run
from trimtab.trainer.config import parse_config

# Keys that may differ within a group.
IGNORED_KEYS = ("seed", "out")
_MAX_NAME_LENGTH = 40
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


@dataclass(frozen=True, eq=False)
class Groups:
    """All groups in the order in which their first run was given, and notes about reading the runs."""

    groups: list[Group]
    notes: list[str] = field(default_factory=list)


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


def group_runs(paths: Sequence[Path]) -> Groups:
    """Returns the runs grouped by their recipe without seed and output folder; a path given twice counts once.

    Runs without a finished step are left out, with a note. Raises `TrimtabError` when none is left or a file is
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
    return Groups([Group(*parts) for parts in zip(names, members, recipes, strict=True)], notes)


def named_runs(runs: Mapping[str, Sequence[Path]]) -> Groups:
    """Returns groups for labels with the run directories of their seeds; raises `TrimtabError` without any run."""
    notes: list[str] = []
    groups = []
    for name, folders in zip(_unique([plain(name) for name in runs]), runs.values(), strict=True):
        group_members = [read_run(Path(folder)) for folder in folders]
        if group_members:
            groups.append(Group(name, group_members, recipe_of(group_members[0], notes)))
    if not groups:
        raise TrimtabError("nothing to compare: name at least one run directory")
    return Groups(groups, notes)


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


def plain(text: str) -> str:
    """Returns the text with unprintable characters replaced: folder names must not control a page or a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def join_names(names: Sequence[str]) -> str:
    """Returns the names separated by commas; of more than four the first three and the number of the others."""
    return f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 4 else ", ".join(names)


def format_value(value: Any) -> str:
    """Returns a configured value as text; None stands for an absent key."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    return plain(str(value))


def _has_step(path: Path) -> bool:
    file = path / METRICS
    if not (path / CONFIG).is_file():
        return True  # `read_run` raises the error that says what is missing
    return file.is_file() and b"\n" in file.read_bytes()


def _names(recipes: Sequence[Mapping[str, Any]], members: Sequence[list[Run]]) -> list[str]:
    """Returns a name for each group: its objective.

    Groups that share an objective get the differing settings appended, or their folder where these are too long.
    """
    objectives = [format_value(recipe.get("objective.name", "run")) for recipe in recipes]
    names = []
    for recipe, name, runs in zip(recipes, objectives, members, strict=True):
        rivals = [other for other, rival in zip(recipes, objectives, strict=True) if rival == name]
        settings = name if len(rivals) == 1 else f"{name} {_settings(recipe, rivals)}"
        folder = plain(_folder(runs))
        # The folder name may contain that of the objective (`dapo-lr1e-5`) or not (`run3`).
        named = folder if name in folder else f"{name} ({folder})"
        names.append(settings if len(settings) <= _MAX_NAME_LENGTH else named)
    return _unique([_shorten(name) for name in names])


def _settings(recipe: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """Returns `sync_every=8 lr=1e-05`: a minimal set of keys that distinguishes the recipes of one objective."""
    keys = [key for key in dict.fromkeys(key for rival in rivals for key in rival) if key != "description"]
    distinguishing = [key for key in keys if any(rival.get(key) != rivals[0].get(key) for rival in rivals)]
    for key in reversed(distinguishing):
        # Drop a key whose value follows from the others, such as a learning rate set for each temperature.
        rest = [other for other in distinguishing if other != key]
        if _all_distinct(rest, rivals):
            distinguishing = rest
    leaves = Counter(key.rpartition(".")[2] for key in distinguishing)
    short = {key: key.rpartition(".")[2] if leaves[key.rpartition(".")[2]] == 1 else key for key in distinguishing}
    return " ".join(f"{short[key]}={format_value(recipe.get(key))}" for key in distinguishing)


def _all_distinct(keys: Sequence[str], recipes: Sequence[Mapping[str, Any]]) -> bool:
    values = [[recipe.get(key) for key in keys] for recipe in recipes]
    return all(row not in values[:index] for index, row in enumerate(values))


def _folder(runs: Sequence[Run]) -> str:
    """Returns the folder name without seed: `soup` for soup/seed0 and for soup-seed0."""
    path = runs[0].path.resolve()
    return path.parent.name if _SEED.fullmatch(path.name) else _SEED.sub("", path.name) or path.name


def _shorten(name: str) -> str:
    """Returns a long name with its middle left out; folder names often differ at the end."""
    half = (_MAX_NAME_LENGTH - 1) // 2
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[:half]}…{name[-half:]}"


def _unique(names: Sequence[str]) -> list[str]:
    """Returns the names, with a number behind those that were there before."""
    labels: list[str] = []
    for name in names:
        candidates = (name if count == 1 else f"{name} #{count}" for count in itertools.count(1))
        labels.append(next(label for label in candidates if label not in labels))
    return labels
