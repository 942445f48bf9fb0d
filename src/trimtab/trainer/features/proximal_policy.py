"""Scores each token's proximal log-prob with the weights that sampled it (`trainer.proximal = "snapshot"`).

The ratio proximal/behavior then shows only the numerical difference between sampler and trainer, and current/proximal
only the staleness ("old logits", arXiv 2605.12070).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.trainer.checkpoint.sharded_sections import copy_into
from trimtab.trainer.config import Config
from trimtab.trainer.features.feature import Feature, PolicyLearner, ProximalPass, Sections
from trimtab.trainer.models.sharding import local_shard
from trimtab.trainer.packing import MicroBatch, MiniBatch, pad
from trimtab.types import EXTERNAL_VERSION, Trajectory

Weights = dict[str, Tensor]
SNAPSHOT = "proximal-"
"""Checkpoint section of a snapshot, before its version."""


class Snapshots(Feature):
    """Scores every token with the weights that sampled it.

    Keeps a copy of the trained parameters in CPU memory for each published version that tokens may still come from. The
    extra `version` (rows, time) of a micro-batch names the version that scores each token. Padding, observations and
    external traces, whose log-probs are never read, get the newest version of the micro-batch.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        # The trained parameters themselves, no copies; with LoRA the adapters.
        self._weights: Weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._max_age = config.trainer.max_age
        self._snapshots: dict[int, Weights] = {}

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        version = pad([t.completion.policy_version for t in trajectories], micro.mask.shape[1], EXTERNAL_VERSION)
        version = torch.where(version == EXTERNAL_VERSION, version.max(), version)
        # A response of several policies has one version in the trajectory file: the newest.
        newest = tuple(int(np.max(t.completion.policy_version, initial=EXTERNAL_VERSION)) for t in trajectories)
        return micro.with_extras(version=version, proximal_versions=newest)

    def proximal_passes(self, batch: MiniBatch, updates: int) -> Iterator[ProximalPass]:
        """Yields a pass for each version in the batch. Raises `TrimtabError` if a version has no snapshot."""
        for version in sorted({int(found) for micro in batch for found in micro.extras["version"].unique()}):
            yield ProximalPass(
                self._weights_of(version, updates), lambda micro, version=version: micro.extras["version"] == version
            )

    def _weights_of(self, version: int, updates: int) -> AbstractContextManager[None]:
        if version in (updates, EXTERNAL_VERSION):  # the model has these weights
            return nullcontext()
        if version not in self._snapshots:
            raise TrimtabError(
                f"a token was sampled by the weights of update {version}, and trainer.proximal has snapshots of "
                f'{sorted(self._snapshots)} only: set trainer.proximal = "current"'
            )
        return _exchanged(self._weights, self._snapshots[version])

    def publish_options(self, model: nn.Module, version: int) -> Mapping[str, Any]:
        """Takes a snapshot of the weights, and drops the snapshots that no token can come from anymore."""
        oldest = version - self._max_age
        self._snapshots = {number: weights for number, weights in self._snapshots.items() if number >= oldest}
        self._snapshots[version] = self._copy()
        return {}

    def _copy(self) -> Weights:
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self._weights.items()}

    def tensors(self) -> Sections:
        return {f"{SNAPSHOT}{version}": weights for version, weights in self._snapshots.items()}

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any], sections: Sections) -> None:
        names = [name for name in sections if name.startswith(SNAPSHOT)]
        self._snapshots = {int(name.removeprefix(SNAPSHOT)): self._copy() for name in names}
        for name, weights in self.tensors().items():
            copy_into(weights, sections[name])


@contextmanager
def _exchanged(weights: Weights, others: Weights) -> Iterator[None]:
    """Exchanges the values of two sets of tensors inside, bit for bit: no further copy of the model is needed."""

    @torch.no_grad()
    def exchange() -> None:
        for name, weight in weights.items():
            own, other = local_shard(weight), local_shard(others[name])
            kept = own.to(other.device, copy=True)
            own.copy_(other)
            other.copy_(kept)

    exchange()
    try:
        yield
    finally:
        exchange()
