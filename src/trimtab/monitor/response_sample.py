"""A sample of responses of bounded size, uniform over everything observed, for `trimtab diagnose`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor


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
        self._rows: list[tuple[float, dict[str, Any]]] = []

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
        values = {name: _by_response(value, chosen) for name, value in rows.items() if value is not None}
        for position, number in enumerate(drawn[chosen]):
            trained = np.flatnonzero(columns["loss_mask"][position])
            if len(trained):
                cut = {name: column[position, : trained[-1] + 1].copy() for name, column in columns.items()}
                self._rows.append((number, cut | {name: column[position] for name, column in values.items()}))
                self._tokens += len(trained)
        if self._tokens > 1.25 * self.limit:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drops the responses with the largest numbers until the limit is met."""
        self._rows.sort(key=lambda pair: pair[0])
        while self._tokens > self.limit and len(self._rows) > 1:
            self._threshold, row = self._rows.pop()
            self._tokens -= int(row["loss_mask"].sum())

    def write(self, path: Path) -> None:
        """Writes JSON lines in the columns of Trimtab's trajectory files, under a temporary name that is renamed."""
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            for _, row in sorted(self._rows, key=lambda pair: (pair[1]["step"], pair[0])):
                file.write(json.dumps({name: _plain(value) for name, value in row.items()}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def __len__(self) -> int:
        return len(self._rows)


def _by_response(value: Any, chosen: np.ndarray) -> list[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return [value] * len(chosen) if np.ndim(value) == 0 else [value[int(i)] for i in chosen]


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, np.ndarray):
        numbers = value.astype(np.float64) if value.dtype.kind == "f" else value
        return [None if isinstance(one, float) and not math.isfinite(one) else one for one in numbers.tolist()]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
