"""Features that only measure: prefixes, demonstrations, distillation, mixtures of tasks, asynchronous rollouts, and how
far updates move the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from trimtab.corrections import log_ratio
from trimtab.corrections.divergences import k3
from trimtab.trainer.config import Config
from trimtab.trainer.features.feature import Feature, PolicyLearner, StepRecord
from trimtab.trainer.packing import MicroBatch, MiniBatch, assigned_micro_batches
from trimtab.trainer.ranks import RankGroup


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
    """Share and mean reward of each task of a mixture, whose problem ids begin with the label of their task."""

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
    """Measures asynchronous runs: ages of tokens, engine restarts, interrupted responses, waiting time."""

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        stats = record.rollout
        completions = [t.completion for t in record.trajectories]
        ages = [record.version - completion.policy_version[completion.sampled] for completion in completions]
        values, counts = np.unique(np.concatenate(ages), return_counts=True) if ages else ((), ())
        total = max(1, sum(len(age) for age in ages))
        return {
            **{f"lag/share/{int(age)}": float(count / total) for age, count in zip(values, counts, strict=True)},
            "engine/restarts": stats.restarts,
            "engine/interrupted": stats.interrupted,
            "time/wait": stats.seconds_waiting,
        }


class PolicyKL(Feature):
    """Measures how far a step's updates move the policy, on the step's last mini-batch and without perturbation.

    Scores it before the first and after the last update, every `diagnose.every` steps, by absolute step number, so that
    a resumed run measures the same steps. The log-probs before the updates come from the proximal pass if it used the
    current weights, else from an additional forward. Every rank runs the same number of forwards.
    """

    def __init__(self, config: Config, ranks: RankGroup) -> None:
        self._config, self._ranks = config, ranks
        self._before: list[tuple[MicroBatch, Tensor]] = []
        self._kl: float | None = None

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        self._before, self._kl = [], None
        if not batches or step % self._config.diagnose.every:
            return
        is_scored = self._config.trainer.proximal == "current"
        for _, micro in assigned_micro_batches(batches[-1], self._ranks):
            before = micro.proximal if is_scored and micro.proximal is not None else learner.logp(micro)
            self._before.append((micro, before))

    def after_updates(self, learner: PolicyLearner) -> Mapping[str, int]:
        if not self._before:
            return {}
        total, tokens = 0.0, 0
        for micro, before in self._before:
            after = learner.logp(micro)
            total += float(k3(log_ratio(after, before, micro.on_policy)).double().sum())
            tokens += int(micro.on_policy.sum())
        self._before = []
        total, count = self._ranks.all_reduce_sum(total), self._ranks.all_reduce_sum(tokens)
        self._kl = total / count if count else None
        return {}

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        return {} if self._kl is None else {"update/policy_kl": self._kl}
