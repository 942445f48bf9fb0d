"""A sample of responses of bounded size, uniform over everything observed, for `trimtab diagnose`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True, eq=False)
class _Part:
    """Responses that were observed together. tokens: one column after the other response; rows: a value a response."""

    drawn: np.ndarray
    ends: np.ndarray  # number of tokens of each response
    trained: np.ndarray  # how many of these are trained
    tokens: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    def below(self, threshold: float) -> _Part:
        """Returns the responses that drew less."""
        keep = self.drawn < threshold
        within = np.repeat(keep, self.ends)
        tokens = {name: values[within] for name, values in self.tokens.items()}
        rows = {name: values[keep] for name, values in self.rows.items()}
        return _Part(self.drawn[keep], self.ends[keep], self.trained[keep], tokens, rows)

    def records(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yields the number that each response drew, and its columns."""
        stops = self.ends.cumsum()
        for row, (stop, length) in enumerate(zip(stops, self.ends, strict=True)):
            tokens = {name: values[stop - length : stop] for name, values in self.tokens.items()}
            yield self.drawn[row], tokens | {name: values[row] for name, values in self.rows.items()}


class Sample:
    """Keeps whole responses with about `limit` trained tokens.

    Every response draws a number; those with the smallest are kept (bottom-k sampling), so that each response observed
    has the same chance, whichever step it is of.
    """

    def __init__(self, limit: int, seed: int) -> None:
        self.limit = limit
        self._random = np.random.default_rng(seed)
        self._threshold = 1.0
        self._tokens = 0
        self._parts: list[_Part] = []
        self._written: int | None = None  # parts in the file; None where it has to be written anew

    def add(
        self, mask: Bool[Tensor, "batch time"], tokens: Mapping[str, Tensor | None], rows: Mapping[str, Any]
    ) -> None:
        """Adds responses. tokens: columns (batch, time); rows: a value, or a column (batch,); None is left out.

        A response ends with its last trained token. Only those that are kept are copied from the device.
        """
        drawn = self._random.random(len(mask))
        chosen = np.flatnonzero(drawn < self._threshold)
        if len(chosen) == 0:
            return
        index = torch.from_numpy(chosen).to(mask.device)
        here = {"loss_mask": mask, **{name: values for name, values in tokens.items() if values is not None}}
        columns = {name: values.detach()[index].cpu().numpy() for name, values in here.items()}
        trained = columns["loss_mask"]
        positions = np.arange(1, trained.shape[1] + 1)
        ends = (trained * positions).max(1, initial=0)
        within = positions <= ends[:, None]
        part = _Part(
            np.where(ends > 0, drawn[chosen], 1.0),  # without a trained token it is never below the threshold
            ends,
            trained.sum(1),
            {name: values[within] for name, values in columns.items()},
            {name: _by_response(value, chosen) for name, value in rows.items() if value is not None},
        )
        if not (ends > 0).any():
            return
        self._parts.append(part.below(self._threshold))
        self._tokens += int(part.trained.sum())
        if self._tokens > 1.25 * self.limit:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drops the responses with the largest numbers until the limit is met."""
        drawn, trained = (
            np.concatenate([getattr(part, name) for part in self._parts]) for name in ("drawn", "trained")
        )
        order = drawn.argsort()
        kept = max(1, int(np.searchsorted(trained[order].cumsum(), self.limit, side="right")))
        if kept == len(order):
            return
        self._threshold, self._written = float(drawn[order[kept]]), None
        self._parts = _joined([part.below(self._threshold) for part in self._parts])
        self._tokens = sum(int(part.trained.sum()) for part in self._parts)

    def write(self, path: Path) -> None:
        """Writes JSON lines in the columns of Trimtab's trajectory files, under a temporary name that is renamed."""
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(_lines(self._parts))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._written = len(self._parts)

    def flush(self, path: Path) -> None:
        """Adds what came since to the file. It is written anew, which becomes rare, where responses were dropped."""
        if self._written is None:
            self.write(path)
            return
        with path.open("a", encoding="utf-8") as file:
            file.writelines(_lines(self._parts[self._written :]))
        self._written = len(self._parts)

    def __len__(self) -> int:
        return sum(len(part.drawn) for part in self._parts)


def _lines(parts: Sequence[_Part]) -> Iterator[str]:
    """Yields the responses of the parts by step, as JSON."""
    records = (record for part in parts for record in part.records())
    for _, row in sorted(records, key=lambda pair: (pair[1]["step"], pair[0])):
        yield json.dumps({name: _plain(value) for name, value in row.items()}) + "\n"


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """Returns one part for all that have the same columns, so that their number does not grow with the run."""
    alike: dict[tuple[str, ...], list[_Part]] = {}
    for part in parts:
        alike.setdefault((*part.tokens, "", *part.rows), []).append(part)
    return [
        _Part(**{field.name: _merged([getattr(part, field.name) for part in group]) for field in fields(_Part)})
        for group in alike.values()
    ]


def _merged(values: Sequence[Any]) -> Any:
    """Returns arrays, or dicts of arrays with equal keys, one behind the other."""
    if isinstance(values[0], dict):
        return {name: np.concatenate([one[name] for one in values]) for name in values[0]}
    return np.concatenate(values)


def _by_response(value: Any, chosen: np.ndarray) -> np.ndarray:
    values = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return np.broadcast_to(values, len(chosen)) if values.ndim == 0 else values[chosen]


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, np.ndarray):
        numbers = value.astype(np.float64) if value.dtype.kind == "f" else value
        return [None if isinstance(one, float) and not math.isfinite(one) else one for one in numbers.tolist()]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
