"""The view by age: the number of updates between the policy that sampled a token and the trainer."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.ledger import KeyedSums
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.measure.views import BinnedSums
from trimtab.diagnosis.records import View

_AGES = np.array([0, 1, 2, 3, 4, 5, 9, 17, 33, 65, 129, 257])
"""First age of each bin, in updates; one bin more, in front, for tokens newer than the trainer."""
_CELLS = 4096


class AgeView:
    """The view by age in updates: the trainer's version (`proximal_version`) minus that of the token.

    Without `proximal_version`, the newest version of the token's step (of all data, if steps are unknown) replaces it.
    """

    def __init__(self) -> None:
        self._bins = BinnedSums(len(_AGES) + 1)
        self._cells = KeyedSums(_CELLS)
        self._note = ""

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.version is None or not len(tokens):
            return
        if tokens.table.age is not None:
            self._bins.add(_bin(tokens.at_tokens(tokens.table.age)), tokens)
            return
        step = tokens.table.step
        version = tokens.at_tokens(tokens.table.version)
        of_row = np.zeros(len(tokens.responses), dtype=np.int64) if step is None else tokens.per_response(step)
        keys, place = _runs(np.column_stack([of_row[tokens.rows], version]))
        sums = np.column_stack(
            [np.bincount(place, weights=values) for values in (tokens.excess, tokens.log, tokens.k3, tokens.size)]
        )
        self._cells.add(keys, sums, np.zeros((len(keys), 0)), (place, tokens.log_ratio_bin))
        self._note = "the data has no proximal_version: age is counted from the newest version of a token's " + (
            "file" if step is None else "step"
        )

    def view(self) -> View | None:
        cut = self._gathered()
        rows = np.flatnonzero(cut.count)
        if not len(rows):
            return None
        note = self._note
        if self._cells.width > 1:
            note += f" (of {self._cells.width} neighboring steps)"
        return cut.chosen(rows).view("version", [_LABELS[row] for row in rows], note=note)

    def _gathered(self) -> BinnedSums:
        """Adds the sums of all steps and versions to the bins of their ages."""
        newest: dict[int, int] = {}
        for (block, version), _ in self._cells.rows():
            newest[block] = max(version, newest.get(block, version))
        for (block, version), (sums, _, histogram) in self._cells.rows():
            row = _bin(np.array([newest[block] - version]))[0]
            self._bins.sums[row] += sums
            self._bins.histogram[row] += histogram
        return self._bins


def _bin(age: np.ndarray) -> np.ndarray:
    return np.searchsorted(_AGES, age, side="right")


def _runs(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns one row per run of equal rows, and the run of every row. It shortens the keys before they are sorted."""
    begins = np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))
    return pairs[begins], np.cumsum(begins) - 1


def _labels() -> list[str]:
    lasts = [*(_AGES[1:] - 1).tolist(), None]
    names = [f"{first}" if first == last else f"{first}-{last}" for first, last in zip(_AGES, lasts, strict=True)]
    return ["newer than the trainer", *names[:-1], f"{_AGES[-1]} and more"]


_LABELS = _labels()
