"""The metrics of one step under the names of `docs/metrics.md`."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.models.perturbation import Perturbation
from trimtab.rollout.collector import RolloutStats
from trimtab.runs.expert_column import stored_bytes
from trimtab.training.step_statistics import StepStatistics
from trimtab.types import Trajectory


def batch_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Rewards, lengths and ages (in optimizer updates) of the trajectories that were sampled from the policy."""
    if all(t.off_policy for t in trajectories):
        return {"trajectories/consumed": len(trajectories)}
    sampled = [t for t in trajectories if not t.off_policy]
    rewards = np.array([t.reward for t in sampled])
    lengths = np.array([len(t) for t in sampled])
    ages = version - np.concatenate([t.completion.policy_version for t in sampled])
    parts = {f"reward/{name}": float(np.mean([t.rewards[name] for t in sampled])) for name in sampled[0].rewards}
    return {
        "trajectories/consumed": len(trajectories),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **parts,
        "length/mean": float(lengths.mean()),
        "length/max": int(lengths.max()),
        "length/truncated": float(np.mean([t.completion.finish == "length" for t in sampled])),
        "lag/mean": float(ages.mean()) if ages.size else 0.0,
        "lag/max": int(ages.max()) if ages.size else 0,
        **_entropy(sampled),
    }


def async_metrics(trajectories: Sequence[Trajectory], stats: RolloutStats, version: int) -> dict[str, float]:
    """Metrics of asynchronous runs: ages of tokens, lengths of used and of all responses, restarts, aborts, waiting.

    A response counts in the step in which it was consumed or discarded. A response that was discarded before its end
    counts with its length so far, so `lag/length_generated` is biased low.
    """
    ages = [version - t.completion.policy_version for t in trajectories]
    values, counts = np.unique(np.concatenate(ages), return_counts=True) if ages else ((), ())
    total = max(1, sum(len(age) for age in ages))
    accepted = [len(t) for t in trajectories]
    generated = accepted + stats.discarded_lengths
    return {
        **{f"lag/share/{int(age)}": float(count / total) for age, count in zip(values, counts, strict=True)},
        "lag/length_accepted": float(np.mean(accepted)) if accepted else 0.0,
        "lag/length_generated": float(np.mean(generated)) if generated else 0.0,
        "engine/restarts": stats.restarts,
        "engine/interrupted": stats.interrupted,
        "time/wait": stats.seconds_waiting,
    }


def _entropy(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean entropy, in nats, of the sampling distributions, if the engine reports it for all responses."""
    entropies = [t.completion.entropy for t in trajectories if t.completion.entropy is not None]
    return {"entropy/rollout": float(np.concatenate(entropies).mean())} if len(entropies) == len(trajectories) else {}


def prefix_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Shares, lengths and ages of prefixes of older policies; a prefix ends where the version changes."""
    versions = [t.completion.policy_version for t in trajectories]
    lengths = np.array([int((tokens < tokens[-1]).sum()) if len(tokens) else 0 for tokens in versions])
    ages = [version - tokens[0] for tokens, length in zip(versions, lengths, strict=True) if length]
    return {
        "prefix/tokens": float(lengths.sum() / max(1, sum(len(tokens) for tokens in versions))),
        "prefix/length": float(lengths.mean()) if len(lengths) else 0.0,
        "prefix/age": float(np.mean(ages)) if ages else 0.0,
    }


def expert_metrics(stats: RolloutStats) -> dict[str, float]:
    """Counts of demonstrations in this step: used, dropped as too long, and prompts without one."""
    return {
        "expert/traces": stats.traces,
        "expert/dropped": stats.traces_dropped,
        "expert/missing": stats.traces_missing,
    }


def perturbation_metrics(perturbation: Perturbation, stats: StepStatistics) -> dict[str, float]:
    """Sigma of every layer; in probe steps also the effect of the noise on matmul inputs and log-probs."""
    sigmas = perturbation.sigmas()
    metrics = {f"perturbation/sigma/{layer}": sigma for layer, sigma in sigmas.items()}
    metrics["perturbation/sigma_mean"] = float(np.mean(list(sigmas.values())))
    if stats.changes is None or not stats.perturbed:
        return metrics
    changed = stats.changes.fractions()
    if changed:
        metrics |= {f"perturbation/changed/{layer}": share for layer, share in changed.items()}
        metrics["perturbation/changed"] = float(np.mean(list(changed.values())))
    clean = np.concatenate([stats.mismatch_logps[row] for row in stats.perturbed]).astype(np.float64)
    noisy = np.concatenate(list(stats.perturbed.values())).astype(np.float64)
    metrics["perturbation/dlogp"] = float(np.abs(noisy - clean).mean())
    metrics["perturbation/dp_q75"] = float(np.quantile(np.abs(np.exp(noisy) - np.exp(clean)), 0.75))
    return metrics


def routing_metrics(trajectories: Sequence[Trajectory], stats: StepStatistics) -> dict[str, float]:
    """How often the routers would have chosen the replayed experts themselves, and the size of the engine's record."""
    metrics: dict[str, float] = {"routing/agreement": stats.agreed / stats.routed} if stats.routed else {}
    if any(trajectory.completion.routes is not None for trajectory in trajectories):
        metrics["routing/bytes"] = stored_bytes(trajectories)
    return metrics


def rollout_metrics(stats: RolloutStats, *, dropped: int) -> dict[str, float]:
    """Counts of sampled tokens and groups, and of trajectories that could not be used."""
    return {
        "tokens/decoded": stats.decoded,
        "tokens/prefilled": stats.prefilled,
        "reward/failed": stats.failed_rewards,
        "groups/no_signal": stats.no_signal,
        "groups/sampled": stats.groups,
        "groups/refilled": stats.refilled,
        "trajectories/stale": stats.stale,
        "trajectories/dropped": stats.dropped + stats.failed_rewards + dropped,
    }


def update_metrics(stats: StepStatistics, *, mismatch_policy: str, grad_clip: float, ranks: int = 1) -> dict[str, Any]:
    """Metrics of mismatch, objective and optimizer.

    `optim/grad_norm` is the mean over the step's updates, before clipping; `optim/grad_clipped` is the share of updates
    above the bound.
    """
    measured = {f"mismatch/{key}": value for key, value in stats.mismatch.finalize().items()} if stats.mismatch else {}
    return {
        **measured,
        "mismatch/anchor": mismatch_policy,
        **(stats.objective.finalize() if stats.objective else {}),
        "optim/lr": stats.lr,
        "optim/grad_norm": float(np.mean(stats.grad_norms)) if stats.grad_norms else float("nan"),
        **({"optim/grad_clipped": float(np.mean(np.array(stats.grad_norms) > grad_clip))} if stats.grad_norms else {}),
        "optim/skipped": stats.skipped,
        **({"ranks/idle": stats.idle / stats.turns} if ranks > 1 and stats.turns else {}),
    }


def speed_metrics(seconds: Mapping[str, float], rollout_tokens: int, train_tokens: int) -> dict[str, float]:
    """Seconds of each phase, tokens per second of rollout and training, and the peak resident memory in bytes."""
    return {
        **{f"time/{phase}": value for phase, value in seconds.items()},
        "tokens/rollout": rollout_tokens,
        "tokens/train": train_tokens,
        "tokens_per_second/rollout": rollout_tokens / max(seconds["collect"], 1e-9),
        "tokens_per_second/train": train_tokens / max(seconds["update"] + seconds["proximal"], 1e-9),
        "memory/rss": _peak_rss(),
    }


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes
