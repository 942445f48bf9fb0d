"""Log-probs of a foreign training run as JSON lines that `trimtab diagnose` reads; needs no library.

One file an update, in the column names of Trimtab's own trajectory files. A file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError

TOKENS = ("response_ids", "logp_behavior", "logp_proximal", "logp_current", "loss_mask", "policy_version", "turn")


def rows(length: Tensor, **columns: Tensor | Sequence[Any] | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each response of a padded batch.

    length: (batch,) tokens of each response, trained or not; the rest is padding. columns: (batch, time) for the names
    of `TOKENS`, otherwise one value a response; None is left out. A log-prob that is not finite becomes null.
    """
    present = {name: values for name, values in columns.items() if values is not None}
    listed = {name: values.tolist() if isinstance(values, Tensor) else values for name, values in present.items()}
    for index, size in enumerate(length.tolist()):
        yield {
            name: [_number(value) for value in values[index][:size]] if name in TOKENS else _number(values[index])
            for name, values in listed.items()
        }


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not torch.isfinite(torch.tensor(value)) else value


class Dump:
    """Writes the rows of each update into a file of a folder. Created on first use."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, step: int, batch: Sequence[Mapping[str, Any]], *, rank: int = 0) -> Path:
        """Writes `step_STEP_rank_RANK.jsonl` and returns its path. Raises `TrimtabError` where that fails."""
        path = self.folder / f"step_{step:06d}_rank_{rank}.jsonl"
        temporary = path.with_suffix(".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("w") as file:
                for row in batch:
                    file.write(json.dumps({"step": step, **row}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise TrimtabError(f"the log-probs of step {step} cannot be written to {path}: {error}") from error
        return path
