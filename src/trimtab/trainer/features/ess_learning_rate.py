"""Scales the learning rate of an update by the effective sample size of its importance weights (`[optim.ess]`).

Few responses carry most of the weight of a stale batch: the update is as noisy as one of a smaller batch, and gets the
rate of one. With Adam, scaling the loss would change nothing. Variance-controlled policy optimization, arXiv
2602.17616.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.corrections import Ratios, Sequences, log_ratio
from trimtab.trainer.batching import MicroBatch, MiniBatch
from trimtab.trainer.config import EssConfig
from trimtab.trainer.features.feature import Feature, ForwardPass, PolicyLearner, StepRecord
from trimtab.trainer.models.logprobs import TokenScores
from trimtab.trainer.ranks import RankGroup


def relative_sample_size(log_weight: Tensor) -> float:
    """Returns (sum W)^2 / (n sum W^2) of the weights (n,) with these logarithms, in (0, 1]; 1 without any."""
    if len(log_weight) == 0:
        return 1.0
    weight = (log_weight.double() - log_weight.max()).exp()  # the shift cancels
    return float(weight.sum().square() / (len(weight) * weight.square().sum()))


class SampleSizeRate(Feature):
    """Collects the log-weights current/behavior of the responses of each update, and scales its learning rate."""

    def __init__(self, config: EssConfig, ranks: RankGroup) -> None:
        self._config, self._ranks = config, ranks
        self._log_weights: list[Tensor] = []
        self._sizes: list[float] = []
        self._factors: list[float] = []

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        self._sizes, self._factors = [], []

    def after_score(self, call: ForwardPass, scores: TokenScores) -> MicroBatch:
        micro = call.micro
        if call.purpose == "train":
            sequences = Sequences(micro.on_policy)
            ratios = Ratios(log_ratio(scores.logp.detach(), micro.behavior, micro.on_policy), sequences)
            self._log_weights.append(ratios.log_at(self._config.level)[sequences.trained].double().cpu())
        return micro

    def learning_rate_factor(self) -> float:
        local = torch.cat([torch.zeros(0, dtype=torch.float64), *self._log_weights])
        self._log_weights = []
        parts = self._ranks.gather(local.numpy().tobytes())
        # Sorted: the same sum for any number of ranks.
        size = relative_sample_size(torch.from_numpy(np.sort(np.frombuffer(b"".join(parts), np.float64))))
        share = min(1.0, size / self._config.base)
        factor = share**0.5 if self._config.rule == "sqrt" else share
        self._sizes.append(size)
        self._factors.append(factor)
        return factor

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        if not self._sizes:
            return {}
        return {
            "optim/ess": sum(self._sizes) / len(self._sizes),
            "optim/ess_factor": sum(self._factors) / len(self._factors),
        }
