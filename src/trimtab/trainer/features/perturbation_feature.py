"""Adaptive layerwise perturbation (`[perturbation]`, `trainer/models/perturbation.py`) in the training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab.trainer.config import Config
from trimtab.trainer.features.feature import Feature, ForwardPass, PolicyLearner, StepRecord, TrainedModule
from trimtab.trainer.models.perturbation import MAX_STD, Perturbation, PerturbationCoverage
from trimtab.trainer.optim import NonFiniteUpdateError
from trimtab.trainer.packing import MiniBatch
from trimtab.trainer.seeds import derive

CHANGED, COMPARED = "perturbation/changed/", "perturbation/compared/"


class PerturbationFeature(Feature):
    """Perturbs the "prepare" and "train" forwards, and trains the standard deviations of the noise.

    The policy without noise is scored in probe steps only: the first, the last, and every `diagnose.every` steps.
    """

    perturbs_policy = True

    def __init__(self, config: Config, model: nn.Module) -> None:
        assert config.perturbation is not None
        self._config, self._lr = config, config.perturbation.lr
        self._start = float(np.mean(config.perturbation.std))  # the mean of the standard deviations
        self.perturbation = Perturbation(model, str(config.perturbation.layers), config.perturbation.std)
        self._sigmas: Mapping[str, float] | None = None  # current values, read once after each update
        self._coverage: PerturbationCoverage | None = None
        self._gradients: list[float] = []

    def modules(self) -> Mapping[str, TrainedModule]:
        return {"perturbation": TrainedModule(self.perturbation, self._lr)}

    @contextmanager
    def forward(self, call: ForwardPass) -> Iterator[Mapping[str, Any]]:
        """The noise depends on run, update and micro-batch alone, so that `prepare`, gradient checkpointing and a
        resumed run draw the same noise."""
        if call.purpose not in ("prepare", "train"):
            yield {}
            return
        seed = derive(self._config.seed, "noise", call.update, call.position)
        coverage = self._coverage if call.purpose == "train" and call.micro.rows else None
        with self.perturbation.attached(seed=seed, coverage=coverage, sigmas=self._sigmas):
            yield {}

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        self.probes = step in (1, self._config.trainer.steps) or step % self._config.diagnose.every == 0
        self._sigmas = self.perturbation.sigmas()
        self._coverage = PerturbationCoverage() if self.probes else None
        self._gradients = []

    def end_update(self) -> None:
        """Records the norm of the gradient of log sigma, and the new values."""
        gradients = [p.grad.detach().flatten() for p in self.perturbation.parameters() if p.grad is not None]
        if gradients:
            self._gradients.append(float(torch.cat(gradients).norm()))
        self._sigmas = self.perturbation.sigmas()
        if max(self._sigmas.values()) > MAX_STD:
            raise NonFiniteUpdateError(
                f"an update made the perturbation's standard deviation larger than {MAX_STD:g}",
                weights_are_good=False,
                advice="lower perturbation.lr",
            )

    def after_updates(self, learner: PolicyLearner) -> Mapping[str, int]:
        layers = {} if self._coverage is None else self._coverage.counts()
        return {
            name + layer: count
            for layer, both in layers.items()
            for name, count in zip((CHANGED, COMPARED), both, strict=True)
        }

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        """Returns sigma of every layer; in probe steps also the effect of the noise on matmul inputs and log-probs."""
        stats, sigmas = record.statistics, self.perturbation.sigmas()
        metrics = {f"perturbation/sigma/{layer}": sigma for layer, sigma in sigmas.items()}
        metrics["perturbation/sigma_mean"] = mean = float(np.mean(list(sigmas.values())))
        if self._start > 0:
            metrics["perturbation/sigma_drift"] = mean / self._start - 1
        if self._gradients:
            metrics["perturbation/grad_norm"] = float(np.mean(self._gradients))
        if not stats.perturbed:
            return metrics
        changed = {
            name: count / max(stats.counts[name.replace(CHANGED, COMPARED)], 1)
            for name, count in stats.counts.items()
            if name.startswith(CHANGED)
        }
        if changed:
            metrics |= {**changed, "perturbation/changed": float(np.mean(list(changed.values())))}
        clean = np.concatenate([stats.mismatch_logps[row] for row in stats.perturbed]).astype(np.float64)
        noisy = np.concatenate(list(stats.perturbed.values())).astype(np.float64)
        metrics["perturbation/dlogp"] = float(np.abs(noisy - clean).mean())
        metrics["perturbation/dp_q75"] = float(np.quantile(np.abs(np.exp(noisy) - np.exp(clean)), 0.75))
        return metrics
