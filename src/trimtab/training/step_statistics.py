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
    """Mergeable statistics of one batch, turned into floats at the end of the step.

    Attributes:
        objective, mismatch: metrics of the objective and of the mismatch between sampler and trainer.
        mismatch_logps: for each row, the trainer's log-probs that the sampler's were compared with.
        perturbed: for each row of a probe step, the log-probs of the perturbed policy.
        versions: for each row, the version of the policy that computed `mismatch_logps`.
        changes: coverage of the perturbation; None except in probe steps.
        agreed: number of (token, layer) pairs whose routers would have chosen the replayed experts themselves.
        routed: number of pairs that were compared for `agreed`.
        turns: micro-batch slots of all ranks; idle: slots without a micro-batch.
    """

    objective: Any = None
    mismatch: Any = None
    mismatch_logps: dict[int, np.ndarray] = field(default_factory=dict)
    perturbed: dict[int, np.ndarray] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    changes: PerturbationCoverage | None = None
    agreed: int = 0
    routed: int = 0
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    tokens: int = 0
    turns: int = 0
    idle: int = 0
    lr: float = 0.0


def without_counts(metrics: Metrics) -> Metrics:
    """The metrics of an empty micro-batch as zeros, so that adding them changes nothing."""
    return Metrics({name: _without_counts(part) for name, part in metrics.parts.items()})


def _without_counts(part: Part) -> Part:
    sums = {f.name: torch.zeros_like(getattr(part, f.name)) for f in fields(part) if "merge" not in f.metadata}
    return replace(part, **sums)


def all_reduce_metrics(metrics: Metrics, ranks: Ranks) -> Metrics:
    """The merged metrics of all ranks; every rank must have the same names."""
    local = {
        f"{name}|{f.name}": value
        for name, part in metrics.parts.items()
        for f in fields(part)
        if isinstance(value := getattr(part, f.name), Tensor)
    }
    by_rank = []
    for data in ranks.gather(_to_bytes(local)):
        values: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load(data).items():
            name, _, field_name = key.rpartition("|")
            values.setdefault(name, {})[field_name] = tensor
        by_rank.append(Metrics({name: replace(part, **values[name]) for name, part in metrics.parts.items()}))
    return reduce(add, by_rank)


def all_gather_tensors(local: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The tensors of all ranks by name, on the CPU; no two ranks may use the same name."""
    tensors: dict[str, Tensor] = {}
    for data in ranks.gather(_to_bytes(local)):
        tensors |= load(data)
    return tensors


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    # Copies, because safetensors refuses tensors that share memory.
    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def all_reduce_statistics(stats: StepStatistics, ranks: Ranks) -> None:
    """Merge the statistics of all ranks, in place, on every rank."""
    if stats.objective is not None:
        stats.objective = all_reduce_metrics(stats.objective, ranks)
    if stats.mismatch is not None:
        stats.mismatch = all_reduce_metrics(stats.mismatch, ranks)
    local = {f"mismatch_logps|{row}": torch.from_numpy(logps) for row, logps in stats.mismatch_logps.items()}
    local |= {f"perturbed|{row}": torch.from_numpy(logps) for row, logps in stats.perturbed.items()}
    kinds = {"mismatch_logps": stats.mismatch_logps, "perturbed": stats.perturbed}
    for name, tensor in all_gather_tensors(local, ranks).items():
        kind, _, row = name.partition("|")
        kinds[kind][int(row)] = tensor.numpy()
    counts = stats.changes.counts() if stats.changes is not None else {}
    sums = {name: getattr(stats, name) for name in ("tokens", "agreed", "routed")}
    data = {"versions": stats.versions, "changes": counts, "sums": sums}
    parts = [json.loads(part) for part in ranks.gather(json.dumps(data).encode())]
    for name in sums:
        setattr(stats, name, sum(part["sums"][name] for part in parts))
    for part in parts:
        stats.versions |= {int(row): version for row, version in part["versions"].items()}
    if stats.changes is not None:
        stats.changes = type(stats.changes).merged([part["changes"] for part in parts])
