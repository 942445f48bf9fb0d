"""The statistics of one training step, their merging over ranks, and the metrics that every step has.

`runs/metrics.toml` lists all metrics; features add their own (`Feature.end_step`).
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from trimtab.corrections import Mergeable, Sequences, log_ratio
from trimtab.monitor.metrics_of_step import over_ranks
from trimtab.objectives import mismatch
from trimtab.objectives.state import Metrics
from trimtab.trainer.packing import MicroBatch
from trimtab.trainer.ranks import RankGroup
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.types import Trajectory


@dataclass
class StepStatistics:
    """Mergeable statistics of one batch, turned into floats at the end of the step.

    Values of rows stay on the device, so that updates need not wait for it; `to_cpu` copies them.
    """

    objective: Metrics | None = None
    mismatch: Metrics | None = None  # between sampler and trainer
    # By row: the trainer's log-probs that were compared with the sampler's; the perturbed policy's log-probs, if a
    # probe scored the row too; the version of the policy that computed `mismatch_logps`.
    mismatch_logps: dict[int, np.ndarray] = field(default_factory=dict)
    perturbed: dict[int, np.ndarray] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    # By row: means over its trained tokens of log π_old/μ (mismatch) and log π/π_old (staleness), with π the policy
    # before the last update on the row; NaN if no token was sampled.
    drifts: dict[int, np.ndarray] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # of features, by name
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    tokens: int = 0
    slots: int = 0  # micro-batches that the rounds of all ranks have room for
    idle_slots: int = 0  # slots without a micro-batch
    lr: float = 0.0
    _on_device: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def add_logps(
        self, micro: MicroBatch, logps: Tensor, perturbed: Tensor | None, version: int, *, measure: bool
    ) -> None:
        """Measures the mismatch of `logps`, of policy `version`, if `measure`; stores the first `logps` of each row.

        Later log-probs come after further updates. `proximal_versions` in the micro-batch's extras replace `version`.
        """
        if measure:
            self.mismatch = add_metrics(self.mismatch, mismatch(logps, micro.behavior, micro.on_policy), micro)
        versions = micro.extras.get("proximal_versions", (version,) * len(micro.rows))
        # Not strict: a micro-batch without rows still has one token.
        for index, (row, length) in enumerate(zip(micro.rows, micro.tokens.places.lengths, strict=False)):
            if row not in self._on_device["mismatch_logps"]:
                self._on_device["mismatch_logps"][row] = logps[index, :length]
                if perturbed is not None:
                    self._on_device["perturbed"][row] = perturbed[index, :length]
                self.versions[row] = versions[index]

    def add_drifts(self, micro: MicroBatch, current: Tensor) -> None:
        """Stores the drift of each row of a micro-batch, in place of the drift in an earlier epoch."""
        proximal = current if micro.proximal is None else micro.proximal
        trained = Sequences(micro.on_policy)
        parts = [log_ratio(proximal, micro.behavior, trained.mask), log_ratio(current, proximal, trained.mask)]
        drifts = torch.cat([trained.mean(part) for part in parts], dim=1)
        known = torch.where(trained.trained, drifts, torch.nan)
        self._on_device["drifts"] |= dict(zip(micro.rows, known, strict=True))

    def to_cpu(self) -> None:
        """Copies the values of rows from the device, all rows of a kind in one transfer."""
        for kind, rows in self._on_device.items():
            parts = torch.cat(list(rows.values())).cpu().split([len(values) for values in rows.values()])
            getattr(self, kind).update(zip(rows, (part.numpy() for part in parts), strict=True))
        self._on_device.clear()


def add_metrics(total: Metrics | None, metrics: Metrics, micro: MicroBatch) -> Metrics:
    """Returns `total` plus the metrics of one micro-batch, which count nothing if it has no rows."""
    part = metrics if micro.rows else without_counts(metrics)
    return part if total is None else total + part


def without_counts(metrics: Metrics) -> Metrics:
    """Returns the metrics of an empty micro-batch as zeros, so that adding them changes nothing."""
    parts: dict[str, Mergeable] = {}
    for name, part in metrics.parts.items():
        sums = {f.name: torch.zeros_like(getattr(part, f.name)) for f in fields(part) if "merge" not in f.metadata}
        parts[name] = replace(part, **sums)
    return Metrics(parts)


def all_gather_tensors(local: Mapping[str, Tensor], ranks: RankGroup) -> dict[str, Tensor]:
    """Returns the tensors of all ranks by name, on the CPU; no two ranks may use the same name."""
    tensors: dict[str, Tensor] = {}
    # Copies, because safetensors refuses tensors that share memory.
    own = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in local.items()})
    for data in ranks.gather(own):
        tensors |= load(data)
    return tensors


def all_reduce_statistics(stats: StepStatistics, ranks: RankGroup) -> None:
    """Merges the statistics of all ranks, in place, on every rank."""
    stats.objective, stats.mismatch = (
        None if metrics is None else over_ranks(metrics) for metrics in (stats.objective, stats.mismatch)
    )
    kinds = {"mismatch_logps": stats.mismatch_logps, "perturbed": stats.perturbed, "drifts": stats.drifts}
    local = {f"{kind}|{row}": torch.from_numpy(of_row) for kind, rows in kinds.items() for row, of_row in rows.items()}
    for name, tensor in all_gather_tensors(local, ranks).items():
        kind, _, row = name.partition("|")
        kinds[kind][int(row)] = tensor.numpy()
    data = {"versions": stats.versions, "tokens": stats.tokens, "counts": stats.counts}
    parts = [json.loads(part) for part in ranks.gather(json.dumps(data).encode())]
    stats.tokens = sum(part["tokens"] for part in parts)
    counts: Counter[str] = Counter()
    for part in parts:
        stats.versions |= {int(row): version for row, version in part["versions"].items()}
        counts.update(part["counts"])
    stats.counts = dict(counts)


def batch_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Returns rewards, lengths and ages (in optimizer updates) of the trajectories that were sampled from the policy.

    Lengths count sampled tokens. If there are observations between turns, `length/episode` counts all tokens.
    """
    if all(t.off_policy for t in trajectories):
        return {"trajectories/consumed": len(trajectories)}
    sampled = [t for t in trajectories if not t.off_policy]
    rewards = np.array([t.reward for t in sampled])
    lengths = np.array([t.completion.sampled_tokens for t in sampled])
    ages = version - np.concatenate([t.completion.policy_version[t.completion.sampled] for t in sampled])
    observed = any(t.completion.loss_mask is not None for t in sampled)
    parts = {f"reward/{name}": float(np.mean([t.rewards[name] for t in sampled])) for name in sampled[0].rewards}
    # In nats, of the sampling distributions, if the engine reports it for all responses.
    entropies = [t.completion.entropy[t.completion.sampled] for t in sampled if t.completion.entropy is not None]
    return {
        "trajectories/consumed": len(trajectories),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **parts,
        "length/mean": float(lengths.mean()),
        "length/max": int(lengths.max()),
        **({"length/episode": float(np.mean([len(t) for t in sampled]))} if observed else {}),
        "length/truncated": float(np.mean([t.completion.finish_reason == "length" for t in sampled])),
        "lag/mean": float(ages.mean()) if ages.size else 0.0,
        "lag/max": int(ages.max()) if ages.size else 0,
        **({"entropy/rollout": float(np.concatenate(entropies).mean())} if len(entropies) == len(sampled) else {}),
    }


def rollout_metrics(stats: RolloutStats, *, dropped: int) -> dict[str, float]:
    """Returns the counts of sampled tokens and groups, and of trajectories that could not be used."""
    episodes = stats.episodes
    return {
        "tokens/decoded": stats.decoded,
        "tokens/prefilled": stats.prefilled,
        "reward/failed": stats.failed_rewards,
        "groups/no_signal": stats.no_signal,
        "groups/sampled": stats.groups,
        "trajectories/stale": stats.stale,
        "trajectories/dropped": stats.dropped + stats.failed_rewards + dropped,
        **({f"episode/{name}": value for name, value in episodes.as_dict().items()} if episodes.episodes else {}),
    }


def update_metrics(stats: StepStatistics, *, mismatch_policy: str, grad_clip: float, ranks: int = 1) -> dict[str, Any]:
    """Returns the metrics of mismatch, objective and optimizer.

    `optim/grad_norm` is the mean over the step's updates, before clipping; `optim/grad_clipped` is the share of updates
    above the bound.
    """
    measured = {f"mismatch/{key}": value for key, value in stats.mismatch.finalize().items()} if stats.mismatch else {}
    return {
        **measured,
        "mismatch/anchor": mismatch_policy,
        **_drift(stats),
        **(stats.objective.finalize() if stats.objective else {}),
        "optim/lr": stats.lr,
        "optim/grad_norm": float(np.mean(stats.grad_norms)) if stats.grad_norms else float("nan"),
        **({"optim/grad_clipped": float(np.mean(np.array(stats.grad_norms) > grad_clip))} if stats.grad_norms else {}),
        "optim/skipped": stats.skipped,
        **({"ranks/idle": stats.idle_slots / stats.slots} if ranks > 1 and stats.slots else {}),
    }


def _drift(stats: StepStatistics) -> dict[str, float]:
    """Returns quantiles over responses of `drifts`: the two parts of a response's mean log π/μ."""
    known = [drift for drift in stats.drifts.values() if not np.isnan(drift).any()]
    return {
        f"drift/{part}_q{round(100 * level):02d}": float(np.quantile(values, level))
        for part, values in zip(("mismatch", "staleness"), np.array(known, float).T, strict=False)
        for level in (0.05, 0.5, 0.95)
    }


def speed_metrics(seconds: Mapping[str, float], rollout_tokens: int, train_tokens: int) -> dict[str, float]:
    """Returns seconds of each phase, tokens per second of rollout and training, and peak resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        **{f"time/{phase}": value for phase, value in seconds.items()},
        "tokens/rollout": rollout_tokens,
        "tokens/train": train_tokens,
        "tokens_per_second/rollout": rollout_tokens / max(seconds["collect"], 1e-9),
        "tokens_per_second/train": train_tokens / max(seconds["update"] + seconds["proximal"], 1e-9),
        "memory/rss": peak if sys.platform == "darwin" else peak * 1024,  # macOS counts bytes, Linux kibibytes
    }
