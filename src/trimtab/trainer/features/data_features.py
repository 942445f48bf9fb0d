"""Metrics of methods that change the data: prefixes, demonstrations, a teacher, asynchronous rollouts, the canary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from trimtab.trainer.batching import MiniBatch
from trimtab.trainer.features.feature import Feature, PolicyLearner, StepRecord
from trimtab.trainer.rollout.canary import Canary


class PrefixMetrics(Feature):
    """Shares, lengths and ages of prefixes of older policies (`[prefix]`); a prefix ends where the version changes."""

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        versions = [t.completion.policy_version for t in record.trajectories]
        lengths = np.array([int((tokens < tokens[-1]).sum()) if len(tokens) else 0 for tokens in versions])
        ages = [record.version - tokens[0] for tokens, length in zip(versions, lengths, strict=True) if length]
        return {
            "prefix/tokens": float(lengths.sum() / max(1, sum(len(tokens) for tokens in versions))),
            "prefix/length": float(lengths.mean()) if len(lengths) else 0.0,
            "prefix/age": float(np.mean(ages)) if ages else 0.0,
        }


class DemonstrationMetrics(Feature):
    """Counts of demonstrations (`[demonstrations]`) in a step: used, dropped as too long, and prompts without one."""

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        return {
            "expert/traces": record.rollout.traces,
            "expert/dropped": record.rollout.traces_dropped,
            "expert/missing": record.rollout.traces_missing,
        }


class DistillationMetrics(Feature):
    """The reverse KL to the teacher of `advantage.kind = "distillation"`, estimated at the sampled tokens."""

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        micros = [micro for batch in batches for micro in batch]
        tokens = sum(int(micro.mask.sum()) for micro in micros)
        self._kl = -sum(float(micro.advantage.double().sum()) for micro in micros) / max(1, tokens)

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        return {"distillation/kl": self._kl}


class MixtureMetrics(Feature):
    """Share and mean reward of each task of a mixture, whose problems have ids that begin with the task's label."""

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        rewards: dict[str, list[float]] = {}
        for trajectory in record.trajectories:
            if not trajectory.off_policy:
                rewards.setdefault(trajectory.prompt.problem.id.partition("/")[0], []).append(trajectory.reward)
        total = sum(map(len, rewards.values()))
        return {
            f"mixture/{label}/{name}": value
            for label, values in rewards.items()
            for name, value in (("reward", float(np.mean(values))), ("share", len(values) / total))
        }


class LagMetrics(Feature):
    """Asynchronous runs: ages of tokens, lengths of used and of all responses, restarts, aborts, waiting.

    A response counts in the step in which it was consumed or discarded. A response that was discarded before its end
    counts with its length so far, so `lag/length_generated` is biased low.
    """

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        stats = record.rollout
        completions = [t.completion for t in record.trajectories]
        ages = [record.version - completion.policy_version[completion.sampled] for completion in completions]
        values, counts = np.unique(np.concatenate(ages), return_counts=True) if ages else ((), ())
        total = max(1, sum(len(age) for age in ages))
        accepted = [completion.sampled_tokens for completion in completions]
        generated = accepted + stats.discarded_lengths
        return {
            **{f"lag/share/{int(age)}": float(count / total) for age, count in zip(values, counts, strict=True)},
            "lag/length_accepted": float(np.mean(accepted)) if accepted else 0.0,
            "lag/length_generated": float(np.mean(generated)) if generated else 0.0,
            "engine/restarts": stats.restarts,
            "engine/interrupted": stats.interrupted,
            "time/wait": stats.seconds_waiting,
        }


class CanaryFeature(Feature):
    """Gives the canary (`[engine.canary]`) the log-probs that engines must have after each weight update."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        return self._canary.metrics()

    def publish_options(self, model: nn.Module, version: int) -> Mapping[str, Any]:
        return {"expected": self._canary.predict(model, version)}

    def state(self) -> Mapping[str, Any]:
        return {"canary": self._canary.noise}

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any]) -> None:
        self._canary.noise = saved["canary"]
