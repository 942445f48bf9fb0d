"""Reads the files of a run, and finds the steps that the guard of the run discarded.

Every error is a `TrimtabError` that names the file and the remedy.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from trimtab.errors import TrimtabError, neighbors
from trimtab.files import parse_toml, regular_file
from trimtab.runs.directory import parse_metrics
from trimtab.runs.layout import CONFIG, METRICS
from trimtab.runs.provenance import read_starts

T = TypeVar("T")
EVENT, RETURNS = "guard/event", "guard/returns"
CONTINUES_FROM = "guard/continues_from"
"""Metric of the first step after a guard's return: the step of the restored policy. Steps between are discarded."""
CLIPS = ("clip/low", "clip/high", "clip/dual", "clip/second_moment")


class Return(NamedTuple):
    """A return of the guard to an earlier policy."""

    step: int  # the first step after the return
    start: int  # the step of the restored policy


@dataclass(frozen=True, eq=False)
class Run:
    """The files of a run."""

    path: Path
    config: Mapping[str, Any]  # the resolved recipe
    rows: list[dict[str, Any]]  # the metrics of each step, in order; None if a metric was not finite
    starts: Sequence[Mapping[str, Any]] = ()  # of provenance.json, one per start

    @property
    def keys(self) -> list[str]:
        """All keys logged in any step, sorted."""
        return sorted({key for row in self.rows for key in row})

    @property
    def last(self) -> Mapping[str, Any]:
        return self.rows[-1]

    @property
    def returns(self) -> list[Return]:
        """The returns of the guard to earlier policies."""
        return [Return(row["step"], row[CONTINUES_FROM]) for row in self.rows if row.get(CONTINUES_FROM) is not None]

    @property
    def kept(self) -> Run:
        """The run without the steps that the guard discarded.

        What was measured before training is in the first row; if discarded, it is copied to the first kept row.
        """
        kept: list[dict[str, Any]] = []
        for row in self.rows:
            if (start := row.get(CONTINUES_FROM)) is not None:
                kept = [one for one in kept if one["step"] <= start]
            kept.append(row)
        if kept and kept[0] is not self.rows[0]:
            kept[0] = {key: value for key, value in self.rows[0].items() if key.endswith("/before")} | kept[0]
        return replace(self, rows=kept)

    @property
    def discarded(self) -> list[tuple[int, int]]:
        """The first and the last step of each range of steps that the guard discarded."""
        kept = {row["step"] for row in self.kept.rows}
        parts = groupby((row["step"] for row in self.rows), key=lambda step: step in kept)
        return [(steps[0], steps[-1]) for is_kept, part in parts if not is_kept for steps in [list(part)]]

    @property
    def steps(self) -> int:
        """Number of the last step, minus the discarded steps: the steps that count toward the recipe's number."""
        return int(self.last["step"]) - (len(self.rows) - len(self.kept.rows))

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values, each (count,) float64, of the steps that logged a number under `key`."""
        pairs = [
            (row["step"], row[key])
            for row in self.rows
            if isinstance(row.get(key), int | float) and not isinstance(row[key], bool)
        ]
        return np.array([step for step, _ in pairs], np.float64), np.array([value for _, value in pairs], np.float64)

    def clipped(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and the share of tokens clipped by any bound; shares add up because the bounds are disjoint."""
        rows = [(row["step"], [row[key] for key in CLIPS if row.get(key) is not None]) for row in self.rows]
        pairs = [(step, sum(shares)) for step, shares in rows if shares]
        return np.array([step for step, _ in pairs], np.float64), np.array([share for _, share in pairs], np.float64)

    def accuracy(self) -> dict[str, Accuracy]:
        """Returns the held-out greedy accuracy by task; step 0 is before training."""
        tasks = sorted({key.split("/")[1] for key in self.keys if re.fullmatch(r"eval/[^/]+/greedy", key)})
        return {task: self._accuracy(task) for task in tasks}

    @property
    def held_out(self) -> Accuracy:
        """The held-out greedy accuracy on the task that was trained; empty if it was not measured."""
        return self.accuracy().get(self.config.get("task", {}).get("name"), Accuracy(np.empty(0), np.empty(0)))

    def _accuracy(self, task: str) -> Accuracy:
        steps, values = (list(column) for column in self.series(f"eval/{task}/greedy"))
        first, before = self.series(f"eval/{task}/before")
        if len(before):
            # The first row holds the value before its update, unless the recipe also evaluates after that step.
            same = bool(steps) and (steps[0], values[0]) == (first[0], before[0])
            every, last = self.config.get("eval", {}).get("every", 0), self.config.get("trainer", {}).get("steps")
            evaluates_after = first[0] == last or bool(every and first[0] % every == 0)
            if same and not evaluates_after:
                steps, values = steps[1:], values[1:]
            steps, values = [0.0, *steps], [float(before[0]), *values]
        return Accuracy(np.array(steps), np.array(values))


@dataclass(frozen=True, eq=False)
class Accuracy:
    """Held-out accuracy in [0, 1] over steps; both arrays are (count,)."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def before(self) -> float | None:
        return float(self.values[0]) if len(self.steps) and self.steps[0] == 0 else None

    @property
    def after(self) -> float | None:
        return float(self.values[-1]) if len(self.steps) and self.steps[-1] > 0 else None


def read_run(path: Path) -> Run:
    """Reads a run directory. An incomplete last line of metrics.jsonl (a running or killed run) is left out."""
    if not path.is_dir():
        raise TrimtabError(f"no run directory {path}: check the path{neighbors(path)}; `trimtab train` prints it")
    return Run(path, read_config(path), read_steps(path), read_starts(path))


def read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        return parse_toml(_read_bytes(file).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrimtabError(f"{file} is damaged ({error}): restore it from the recipe") from None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Reads all finished steps of a run, oldest first. Raises `TrimtabError` if there is none."""
    file = path / METRICS
    rows = parse_metrics(_read_bytes(file), file)
    if not rows:
        raise TrimtabError(f"{file} holds no finished step yet: wait for the first one, or train again")
    return rows


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` evenly spaced items, both ends included."""
    if len(items) <= count:
        return list(items)
    return [items[index] for index in np.linspace(0, len(items) - 1, count).round().astype(int)]


def _read_bytes(file: Path) -> bytes:
    try:
        data = regular_file(file).read_bytes()
    except FileNotFoundError:
        raise TrimtabError(
            f"{file.parent} holds no run ({file.name} is missing): check the path{neighbors(file.parent)}"
        ) from None
    except OSError as error:
        raise TrimtabError(f"cannot read {file}: {error.strerror}") from None
    if not data.strip():
        raise TrimtabError(f"{file} is empty: the run has not written it yet, or the disk was full")
    return data
