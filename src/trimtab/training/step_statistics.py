"""The statistics of one training step, and their merging over ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from trimtab.corrections.statistics import Mergeable
from trimtab.models.perturbation import PerturbationCoverage
from trimtab.objectives.metrics import Metrics
from trimtab.training.ranks import Ranks

Part = TypeVar("Part", bound=Mergeable)


@dataclass
class StepStatistics:
    """Mergeable statistics of one batch; floats are made once, at the end of the step."""

    objective: Any = None
    mismatch: Any = None
    anchors: dict[int, np.ndarray] = field(default_factory=dict)
    perturbed: dict[int, np.ndarray] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    changes: PerturbationCoverage | None = None
    agreed: int = 0  # (token, layer) pairs sent to the experts they were given, had their own routers decided
    routed: int = 0  # all pairs this was looked at for
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    tokens: int = 0
    turns: int = 0  # of several ranks, each with at most one micro-batch
    idle: int = 0  # turns without one
    lr: float = 0.0


def without_counts(metrics: Metrics) -> Metrics:
    """What adds nothing: the metrics of an empty micro-batch without its counts (there was no micro-batch)."""
    return Metrics({name: _without_counts(part) for name, part in metrics.parts.items()})


def _without_counts(part: Part) -> Part:
    sums = {f.name: torch.zeros_like(getattr(part, f.name)) for f in fields(part) if "merge" not in f.metadata}
    return replace(part, **sums)


def all_reduce_metrics(metrics: Metrics, ranks: Ranks) -> Metrics:
    """Statistics of all ranks; every rank must have the same ones."""
    mine = {
        f"{name}|{f.name}": value
        for name, part in metrics.parts.items()
        for f in fields(part)
        if isinstance(value := getattr(part, f.name), Tensor)
    }
    parts = []
    for data in ranks.gather(_packed(mine)):
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load(data).items():
            name, _, place = key.rpartition("|")
            found.setdefault(name, {})[place] = tensor
        parts.append(Metrics({name: replace(part, **found[name]) for name, part in metrics.parts.items()}))
    return reduce(add, parts)


def all_gather_tensors(mine: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Tensors of all ranks by name, on the CPU; no two ranks may use the same name."""
    found: dict[str, Tensor] = {}
    for data in ranks.gather(_packed(mine)):
        found |= load(data)
    return found


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Copies: the format refuses tensors that share memory."""
    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def all_reduce_statistics(stats: StepStatistics, ranks: Ranks) -> None:
    """Make the statistics of one rank's share those of the whole batch, in place, on every rank."""
    if stats.objective is not None:
        stats.objective = all_reduce_metrics(stats.objective, ranks)
    if stats.mismatch is not None:
        stats.mismatch = all_reduce_metrics(stats.mismatch, ranks)
    mine = {f"anchors|{row}": torch.from_numpy(logps) for row, logps in stats.anchors.items()}
    mine |= {f"perturbed|{row}": torch.from_numpy(logps) for row, logps in stats.perturbed.items()}
    kinds = {"anchors": stats.anchors, "perturbed": stats.perturbed}
    for name, tensor in all_gather_tensors(mine, ranks).items():
        kind, _, row = name.partition("|")
        kinds[kind][int(row)] = tensor.numpy()
    counts = stats.changes.counts() if stats.changes is not None else {}
    sums = {name: getattr(stats, name) for name in ("tokens", "agreed", "routed")}
    said = {"versions": stats.versions, "changes": counts, "sums": sums}
    parts = [json.loads(part) for part in ranks.gather(json.dumps(said).encode())]
    for name in sums:
        setattr(stats, name, sum(part["sums"][name] for part in parts))
    for part in parts:
        stats.versions |= {int(row): version for row, version in part["versions"].items()}
    if stats.changes is not None:
        stats.changes = type(stats.changes).merged([part["changes"] for part in parts])
