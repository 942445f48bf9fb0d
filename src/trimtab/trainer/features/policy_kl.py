"""Measures how far the updates of a step moved the policy (`update/policy_kl`), alike for every objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trimtab.corrections import log_ratio
from trimtab.corrections.divergences import k3
from trimtab.trainer.assignment import assigned_micro_batches
from trimtab.trainer.batching import MicroBatch, MiniBatch
from trimtab.trainer.config import Config
from trimtab.trainer.features.feature import Feature, PolicyLearner, StepRecord
from trimtab.trainer.ranks import RankGroup


class PolicyKL(Feature):
    """Scores the last mini-batch of a step before its first and after its last update, without perturbation.

    In one step of `diagnose.every`, whatever the length of the run, so that a resumed one measures the same. The
    log-probs before are those of the proximal pass where there was one of the current weights, else of an additional
    forward. Every rank runs as many forwards as the others.
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

    def after_updates(self, learner: PolicyLearner) -> None:
        if not self._before:
            return
        total, tokens = 0.0, 0
        for micro, before in self._before:
            after = learner.logp(micro)
            total += float(k3(log_ratio(after, before, micro.on_policy)).double().sum())
            tokens += int(micro.on_policy.sum())
        self._before = []
        total, count = self._ranks.all_reduce_sum(total), self._ranks.all_reduce_sum(tokens)
        self._kl = total / count if count else None

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        return {} if self._kl is None else {"update/policy_kl": self._kl}
