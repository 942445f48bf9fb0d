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
    """Rewards, lengths and ages of the consumed trajectories that the policy wrote; ages are in optimizer updates."""
    if all(t.off_policy for t in trajectories):
        return {"trajectories/consumed": len(trajectories)}
    own = [t for t in trajectories if not t.off_policy]
    rewards = np.array([t.reward for t in own])
    lengths = np.array([len(t) for t in own])
    ages = version - np.concatenate([t.completion.policy_version for t in own])
    parts = {f"reward/{name}": float(np.mean([t.rewards[name] for t in own])) for name in own[0].rewards}
    return {
        "trajectories/consumed": len(trajectories),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **parts,
        "length/mean": float(lengths.mean()),
        "length/max": int(lengths.max()),
        "length/truncated": float(np.mean([t.completion.finish == "length" for t in own])),
        "lag/mean": float(ages.mean()) if ages.size else 0.0,
        "lag/max": int(ages.max()) if ages.size else 0,
        **_entropy(own),
    }


def beside_metrics(trajectories: Sequence[Trajectory], stats: RolloutStats, version: int) -> dict[str, float]:
    """Of runs whose engines work beside the trainer: how old tokens were, what discarding favored, what went wrong.

    Every response counts once, in the step in which it was consumed or given up. Of those that were given up before
    their end only the first tokens are known, so that `lag/length_generated` is rather too small.
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
    """Mean entropy, in nats, of the distributions the tokens were drawn from; engines may not report it."""
    found = [t.completion.entropy for t in trajectories if t.completion.entropy is not None]
    return {"entropy/rollout": float(np.concatenate(found).mean())} if len(found) == len(trajectories) else {}


def prefix_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How much of the batch was begun by an older policy; a prefix ends where the version changes."""
    versions = [t.completion.policy_version for t in trajectories]
    lengths = np.array([int((written < written[-1]).sum()) if len(written) else 0 for written in versions])
    begun = [version - written[0] for written, length in zip(versions, lengths, strict=True) if length]
    return {
        "prefix/tokens": float(lengths.sum() / max(1, sum(len(written) for written in versions))),
        "prefix/length": float(lengths.mean()) if len(lengths) else 0.0,
        "prefix/age": float(np.mean(begun)) if begun else 0.0,
    }


def expert_metrics(stats: RolloutStats) -> dict[str, float]:
    """External traces of this step: joined, too long for the context, and prompts that have none."""
    return {
        "expert/traces": stats.traces,
        "expert/dropped": stats.traces_dropped,
        "expert/missing": stats.traces_missing,
    }


def perturbation_metrics(perturbation: Perturbation, stats: StepStatistics) -> dict[str, float]:
    """Sigma of every layer in every step; on probe steps also what the noise did to matmul inputs and to log-probs."""
    sigmas = perturbation.sigmas()
    found = {f"perturbation/sigma/{layer}": sigma for layer, sigma in sigmas.items()}
    found["perturbation/sigma_mean"] = float(np.mean(list(sigmas.values())))
    if stats.changes is None or not stats.perturbed:
        return found
    changed = stats.changes.fractions()
    if changed:
        found |= {f"perturbation/changed/{layer}": share for layer, share in changed.items()}
        found["perturbation/changed"] = float(np.mean(list(changed.values())))
    clean = np.concatenate([stats.anchors[row] for row in stats.perturbed]).astype(np.float64)
    noisy = np.concatenate(list(stats.perturbed.values())).astype(np.float64)
    found["perturbation/dlogp"] = float(np.abs(noisy - clean).mean())
    found["perturbation/dp_q75"] = float(np.quantile(np.abs(np.exp(noisy) - np.exp(clean)), 0.75))
    return found


def routing_metrics(trajectories: Sequence[Trajectory], stats: StepStatistics) -> dict[str, float]:
    """How often the trained model would have chosen the experts that were replayed, and what an engine's record of them
    takes."""
    found: dict[str, float] = {"routing/agreement": stats.agreed / stats.routed} if stats.routed else {}
    if any(trajectory.completion.routes is not None for trajectory in trajectories):
        found["routing/bytes"] = stored_bytes(trajectories)
    return found


def collect_metrics(stats: RolloutStats, *, dropped: int) -> dict[str, float]:
    """What was sampled at which cost, and what of it could not be used."""
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


def update_metrics(stats: StepStatistics, *, anchor: str, grad_clip: float, ranks: int = 1) -> dict[str, Any]:
    """Mismatch, objective and optimizer. `optim/grad_norm` is the mean over the step's updates, before clipping;
    `optim/grad_clipped` the share of them above the bound."""
    measured = {f"mismatch/{key}": value for key, value in stats.mismatch.finalize().items()} if stats.mismatch else {}
    return {
        **measured,
        "mismatch/anchor": anchor,
        **(stats.objective.finalize() if stats.objective else {}),
        "optim/lr": stats.lr,
        "optim/grad_norm": float(np.mean(stats.grad_norms)) if stats.grad_norms else float("nan"),
        **({"optim/grad_clipped": float(np.mean(np.array(stats.grad_norms) > grad_clip))} if stats.grad_norms else {}),
        "optim/skipped": stats.skipped,
        **({"ranks/idle": stats.idle / stats.turns} if ranks > 1 and stats.turns else {}),
    }


def speed_metrics(seconds: Mapping[str, float], rollout_tokens: int, train_tokens: int) -> dict[str, float]:
    """Seconds by phase, tokens per second of the two big ones, and the peak resident memory of the process so far."""
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
