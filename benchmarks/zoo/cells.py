"""Cells of the zoo: a base, a fault, its strength, a number of tokens; and what was answered in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zoo.answers import NONE, REFUSED, Answer, answer
from zoo.bases import UNEXPLAINED, Base
from zoo.plants import NOTHING, PAIRS, SINGLE, Plant

DOUBT = 0.5
"""Confidence below which a wrong cause counts as doubt, where the right one is not known to the diagnosis."""


@dataclass(frozen=True)
class Cell:
    """One data set. seed: of the responses drawn and of what is planted. without: a cause left out of the diagnosis."""

    base: Base
    plant: Plant
    level: int
    tokens: int
    seed: int = 0
    without: str = ""


@dataclass(frozen=True)
class Result:
    """truth: the row of the confusion matrix. accepted: first causes that count as right."""

    cell: Cell
    answer: Answer
    truth: str
    accepted: frozenset[str]

    @property
    def right(self) -> bool:
        if self.cell.without:
            doubted = self.answer.confidence < DOUBT and self.answer.first not in (NONE, REFUSED)
            return self.answer.first == UNEXPLAINED or doubted or self.answer.first in self.accepted
        return self.answer.first in self.accepted


def run(cell: Cell, file: Path) -> Result | None:
    """Draws, plants and diagnoses; None where the base has no such stream or it lacks what the fault needs."""
    plant, base = cell.plant, cell.base
    source = base.stream(plant.kind, cell.level)
    if source is None or not source.tokens.keys() >= plant.needs:
        return None
    key = [cell.seed, cell.level, cell.tokens, *f"{base.name}/{plant.name}".encode()]
    random = np.random.default_rng(key)
    drawn = source.resampled(cell.tokens, random)
    planted = plant.change(drawn, cell.level, random)
    bare = not plant.columns and bool(random.integers(2))
    given = answer(planted, file, bare=bare, without=(cell.without,) if cell.without else ())
    noises = base.noises(drawn)
    if plant is NOTHING:
        truth = base.noise if base.noise in noises else min(noises, default="clean")
        return Result(cell, given, truth, (noises or frozenset({NONE, "precision"})) - {cell.without})
    # Streams of some kinds hold the fault already: what the noise makes up is then known from the plain stream.
    alone = drawn if planted is not drawn else base.stream("plain", 0)
    outweighed = not plant.structural and alone is not None and alone.k3 > 0.5 * planted.k3
    accepted = plant.accepted | (noises if outweighed else set())
    if cell.without and plant.apart:
        accepted |= noises or {NONE}
    return Result(cell, given, plant.cause, accepted - {cell.without})


def results(cells: Iterable[Cell], folder: Path) -> Iterator[Result]:
    for cell in cells:
        if (result := run(cell, folder / "cell.parquet")) is not None:
            yield result


def every_cell(
    bases: Sequence[Base], plants: Sequence[Plant], sizes: Sequence[int], levels: Sequence[int], seeds: int
) -> Iterator[Cell]:
    for tokens in sizes:
        for base in bases:
            for plant in plants:
                for level in levels:
                    for seed in range(seeds):
                        yield Cell(base, plant, level, tokens, seed)


def grid(bases: Sequence[Base], *, full: bool) -> list[Cell]:
    """Every fault on every base; without `full` at every strength only where it is alone and in 5,000 tokens."""
    if full:
        return list(every_cell(bases, (*SINGLE, *PAIRS), (600, 5_000, 200_000), (0, 1, 2), 2))
    return [
        *every_cell(bases, SINGLE, (600,), (1,), 1),
        *every_cell(bases, SINGLE, (5_000,), (0, 1, 2), 1),
        *every_cell(bases, PAIRS, (5_000,), (1,), 1),
        *every_cell(bases[:1], SINGLE, (200_000,), (1,), 1),
    ]


def clean(bases: Sequence[Base], *, full: bool) -> list[Cell]:
    """Data without a fault, many times."""
    sizes = (600, 5_000, 200_000) if full else (600, 5_000)
    return [
        cell
        for tokens in sizes
        for cell in every_cell(bases, (NOTHING,), (tokens,), (0,), 3 if tokens > 5_000 else 50 if full else 10)
    ]


def left_out(bases: Sequence[Base], *, full: bool) -> list[Cell]:
    """Every cell of a single fault at 5,000 tokens, with its cause unknown to the diagnosis."""
    known = [plant for plant in SINGLE if plant.cause != UNEXPLAINED]
    cells = every_cell(bases, known, (5_000,), (0, 1, 2) if full else (1,), 1)
    noisy = [base for base in bases if base.noise]
    return [
        *(Cell(cell.base, cell.plant, cell.level, cell.tokens, 0, cell.plant.cause) for cell in cells),
        *(Cell(base, NOTHING, 0, 5_000, seed, base.noise) for base in noisy for seed in range(3)),
    ]
