"""Groups runs that differ only in their seed, and gives each group a distinguishing name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.config import parse_config
from trimtab.errors import TrimtabError
from trimtab.runs.reader import Run, read_run

# What makes a run another seed of the same recipe.
APART = ("seed", "out")
_LONGEST = 40
_SEED = re.compile(r"[-_. ]?seed[-_]?\d+$")


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in seed and place only. `config` is their recipe with every default, flat: dotted keys."""

    name: str
    runs: list[Run]
    config: Mapping[str, Any]

    @property
    def seeds(self) -> list[int | None]:
        return [run.config.get("seed") for run in self.runs]


@dataclass(frozen=True, eq=False)
class Groups:
    """All groups in the order they were named, and what a reader must know about reading them."""

    groups: list[Group]
    notes: list[str] = field(default_factory=list)


def find_runs(path: Path) -> list[Path]:
    """`path` itself when it is a run, else the runs up to two folders below it (as a comparison leaves them)."""
    if (path / "config.toml").is_file():
        return [path]
    found = sorted({file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/config.toml")}, key=_natural)
    if not found:
        raise TrimtabError(f"{path} holds no run (config.toml is missing): check the path")
    return found


def group_runs(paths: Sequence[Path]) -> Groups:
    """Run directories by what they have in common: everything but seed and place. A directory named twice counts once.

    Runs without a finished step are left out, with a note. `TrimtabError` when none is left or a file is damaged.
    """
    unique = list({path.resolve(): path for path in paths}.values())
    begun = [path for path in unique if _has_step(path)]
    # Without any the reader of a single run says best what is missing.
    runs = [read_run(path) for path in begun or unique]
    notes = [f"{path} has no finished step yet and is left out." for path in unique if path not in begun]
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
    """Groups that are already formed and named, as in a grid of objectives and seeds."""
    notes: list[str] = []
    groups = []
    for name, folders in zip(_unique([plain(name) for name in runs]), runs.values(), strict=True):
        read = [read_run(Path(folder)) for folder in folders]
        if read:
            groups.append(Group(name, read, recipe_of(read[0], notes)))
    if not groups:
        raise TrimtabError("nothing to compare: name at least one run directory")
    return Groups(groups, notes)


def recipe_of(run: Run, notes: list[str]) -> dict[str, Any]:
    """The resolved recipe without seed and place, flat. Where this version refuses it: as written, with a note."""
    config: Mapping[str, Any] = run.config
    try:
        config = parse_config(config, str(run.path)).model_dump(mode="json", exclude_none=True)
    except TrimtabError as error:
        notes.append(f"The recipe is of another version of trimtab and compared as it is written. {error}")
    return dict(_flat({key: value for key, value in config.items() if key not in APART}, ""))


def plain(text: str) -> str:
    """A name as one line of printable characters: what a folder is called must not steer a page or a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more."""
    return f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 4 else ", ".join(names)


def written(value: Any) -> str:
    """A configured value as people read it; None: the key is not there."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(written, value)) or "none"
    return plain(str(value))


def _has_step(path: Path) -> bool:
    file = path / "metrics.jsonl"
    if not (path / "config.toml").is_file():
        return True  # the reader will say what is missing
    return file.is_file() and b"\n" in file.read_bytes()


def _flat(value: Any, place: str) -> list[tuple[str, Any]]:
    """Dotted keys; the tables of a list are numbered."""
    if isinstance(value, Mapping):
        items = [(f"{place}.{key}" if place else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = [(f"{place}.{index}", item) for index, item in enumerate(value)]
    else:
        return [(place, value)]
    return [pair for key, item in items for pair in _flat(item, key)]


def _names(recipes: Sequence[Mapping[str, Any]], members: Sequence[list[Run]]) -> list[str]:
    """The objective; where several share it, with what tells them apart, or their folder if that is shorter."""
    objectives = [written(recipe.get("objective.name", "run")) for recipe in recipes]
    names = []
    for recipe, name, runs in zip(recipes, objectives, members, strict=True):
        rivals = [other for other, rival in zip(recipes, objectives, strict=True) if rival == name]
        settings = name if len(rivals) == 1 else f"{name} {_settings(recipe, rivals)}"
        folder = plain(_folder(runs))
        # A folder may be called after its objective or not at all: `dapo-lr1e-5`, `run3`.
        named = folder if name in folder else f"{name} ({folder})"
        names.append(settings if len(settings) <= _LONGEST else named)
    return _unique([_shortened(name) for name in names])


def _settings(recipe: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> str:
    """`sync_every=8 lr=1e-05`: keys that tell the recipes of one objective apart, no more of them than it takes."""
    keys = [key for key in dict.fromkeys(key for rival in rivals for key in rival) if key != "description"]
    apart = [key for key in keys if any(rival.get(key) != rivals[0].get(key) for rival in rivals)]
    for key in reversed(apart):
        # A rate that was set for each temperature says nothing that the temperature does not.
        rest = [other for other in apart if other != key]
        if _tell_apart(rest, rivals):
            apart = rest
    leaves = Counter(key.rpartition(".")[2] for key in apart)
    short = {key: key.rpartition(".")[2] if leaves[key.rpartition(".")[2]] == 1 else key for key in apart}
    return " ".join(f"{short[key]}={written(recipe.get(key))}" for key in apart)


def _tell_apart(keys: Sequence[str], recipes: Sequence[Mapping[str, Any]]) -> bool:
    values = [[recipe.get(key) for key in keys] for recipe in recipes]
    return all(one not in values[:index] for index, one in enumerate(values))


def _folder(runs: Sequence[Run]) -> str:
    """`soup` of soup/seed0, soup/seed1 and of soup-seed0, soup-seed1."""
    path = runs[0].path.resolve()
    return path.parent.name if _SEED.fullmatch(path.name) else _SEED.sub("", path.name) or path.name


def _shortened(name: str) -> str:
    """Both ends of a long name: folders are often told apart by how they end."""
    half = (_LONGEST - 1) // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        number, label = 1, name
        while label in found:
            number += 1
            label = f"{name} #{number}"
        found.append(label)
    return found


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """seed2 before seed10."""
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
