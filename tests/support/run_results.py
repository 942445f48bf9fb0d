"""What tests read of a run: messages, metrics without times, and weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import METRICS, list_checkpoints
from trimtab.runs.metric_catalog import metric
from trimtab.trainer.observer import NullObserver

TIMED = ("time/", "tokens_per_second/", "memory/")


class Messages(NullObserver):
    """Collects the lines for the user."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def untimed(folder: Path, *hidden: str) -> list[dict[str, Any]]:
    """Metrics by step, without what the clock and the system say and keys that begin with one of `hidden`."""
    rows = read_metrics(folder / METRICS)
    return [{key: value for key, value in row.items() if not key.startswith((*TIMED, *hidden))} for row in rows]


def undocumented(keys: Iterable[str]) -> list[str]:
    """Returns the keys of metrics that no row of the catalog documents, sorted."""
    return sorted({key for key in keys if metric(key) is None})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, as `section/name`."""
    files = sorted(list_checkpoints(folder / "checkpoints")[-1].glob("*.safetensors"))
    return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def weights(folder: Path, section: str = "model") -> dict[str, torch.Tensor]:
    """Tensors of a section of the newest checkpoint."""
    return load_file(list_checkpoints(folder / "checkpoints")[-1] / f"{section}.safetensors")
