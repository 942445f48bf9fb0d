"""The metrics that every step has, under the names of `runs/metrics.toml`; features add theirs (`Feature.end_step`)."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.trainer.rollout.response_source import RolloutStats
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Trajectory


def batch_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Returns rewards, lengths and ages (in optimizer updates) of the trajectories that were sampled from the policy.

    A length counts sampled tokens; with observations between turns `length/episode` counts all.
    """
    if all(t.off_policy for t in trajectories):
        return {"trajectories/consumed": len(trajectories)}
    sampled = [t for t in trajectories if not t.off_policy]
    rewards = np.array([t.reward for t in sampled])
    lengths = np.array([t.completion.sampled_tokens for t in sampled])
    ages = version - np.concatenate([t.completion.policy_version[t.completion.sampled] for t in sampled])
    observed = any(t.completion.loss_mask is not None for t in sampled)
    parts = {f"reward/{name}": float(np.mean([t.rewards[name] for t in sampled])) for name in sampled[0].rewards}
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
        **_entropy(sampled),
    }


def _entropy(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean entropy, in nats, of the sampling distributions, if the engine reports it for all responses."""
    completions = [t.completion for t in trajectories]
    entropies = [c.entropy[c.sampled] for c in completions if c.entropy is not None]
    return {"entropy/rollout": float(np.concatenate(entropies).mean())} if len(entropies) == len(trajectories) else {}


def rollout_metrics(stats: RolloutStats, *, dropped: int) -> dict[str, float]:
    """Returns the counts of sampled tokens and groups, and of trajectories that could not be used."""
    episodes = stats.episodes
    return {
        "tokens/decoded": stats.decoded,
        "tokens/prefilled": stats.prefilled,
        "reward/failed": stats.failed_rewards,
        "groups/no_signal": stats.no_signal,
        "groups/sampled": stats.groups,
        "groups/refilled": stats.refilled,
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
    """Returns the quantiles over responses of the two parts of their mean log π/μ."""
    known = [drift for drift in stats.drifts.values() if not np.isnan(drift).any()]
    return {
        f"drift/{part}_q{round(100 * level):02d}": float(np.quantile(values, level))
        for part, values in zip(("mismatch", "staleness"), np.array(known, float).T, strict=False)
        for level in (0.05, 0.5, 0.95)
    }


def speed_metrics(seconds: Mapping[str, float], rollout_tokens: int, train_tokens: int) -> dict[str, float]:
    """Seconds of each phase, tokens per second of rollout and training, and the peak resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        **{f"time/{phase}": value for phase, value in seconds.items()},
        "tokens/rollout": rollout_tokens,
        "tokens/train": train_tokens,
        "tokens_per_second/rollout": rollout_tokens / max(seconds["collect"], 1e-9),
        "tokens_per_second/train": train_tokens / max(seconds["update"] + seconds["proximal"], 1e-9),
        "memory/rss": peak if sys.platform == "darwin" else peak * 1024,  # macOS counts bytes, Linux kibibytes
    }
