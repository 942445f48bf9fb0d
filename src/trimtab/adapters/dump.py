"""Log-probs of a foreign training run as JSON lines that `trimtab diagnose` reads; needs no library.

One file an update, in the column names of Trimtab's own trajectory files. A file appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.objectives import PolicyLogps

Columns = Mapping[str, Tensor | Sequence[Any] | None]
"""Values by name of the column; None is left out."""


def rows(length: Tensor, tokens: Columns, responses: Columns) -> Iterator[dict[str, Any]]:
    """Yields a row for each response of a padded batch.

    length: (batch,) tokens of each response, trained or not; the rest is padding. tokens: columns of (batch, time).
    responses: columns of one value a response. A number that is not finite becomes null.
    """
    of_tokens, of_responses = _lists(tokens), _lists(responses)
    for index, size in enumerate(length.tolist()):
        cut = {name: [_number(value) for value in values[index][:size]] for name, values in of_tokens.items()}
        yield cut | {name: _number(values[index]) for name, values in of_responses.items()}


def _lists(columns: Columns) -> dict[str, Sequence[Any]]:
    present = {name: values for name, values in columns.items() if values is not None}
    return {name: values.tolist() if isinstance(values, Tensor) else values for name, values in present.items()}


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Dump:
    """Writes the rows of each update, or of each call of a loss, into a file of a folder. Created on first use."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._calls: int | None = None

    def write(self, step: int, batch: Sequence[Mapping[str, Any]], *, rank: int = 0) -> Path:
        """Writes `step_STEP_rank_RANK.jsonl` and returns its path. Raises `TrimtabError` where that fails."""
        return self._write(f"step_{step:06d}_rank_{rank}.jsonl", [{"step": step, **row} for row in batch])

    def write_call(self, logps: PolicyLogps, advantage: Tensor) -> Path:
        """Writes the log-probs of one call of a loss that knows no step, as `call_NUMBER_rank_RANK.jsonl`.

        Each response ends with its last trained token. advantage: (batch, time). The trainer's view is `proximal` where
        it is another policy than the current one.
        """
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if self._calls is None:  # Those of an earlier process stay.
            self._calls = len(list(self.folder.glob(f"call_*_rank_{rank}.jsonl")))
        self._calls += 1
        positions = torch.arange(1, logps.mask.shape[1] + 1, device=logps.mask.device)
        batch = rows(
            (logps.mask * positions).amax(1),
            {"logp_behavior": logps.behavior, "logp_proximal": logps.proximal, "loss_mask": logps.mask.long()},
            {"advantage": torch.where(logps.mask, advantage, 0.0).sum(1) / logps.mask.sum(1).clamp(min=1)},
        )
        return self._write(f"call_{self._calls:06d}_rank_{rank}.jsonl", list(batch))

    def _write(self, name: str, batch: Sequence[Mapping[str, Any]]) -> Path:
        path = self.folder / name
        temporary = path.with_suffix(".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("w") as file:
                for row in batch:
                    file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise TrimtabError(f"log-probs cannot be written to {path}: {error}") from error
        return path
