"""Renormalizes log-probs over the sampling masks of truncated sampling (docs/results/experiments.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trimtab.trainer.batching import MicroBatch
from trimtab.trainer.features.feature import Feature, ForwardPass
from trimtab.trainer.models.logprobs import pack_kept
from trimtab.types import Trajectory


class SamplingMask(Feature):
    """Passes the allowed tokens of truncated samples to every forward."""

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        if not any(trajectory.sampling.truncated for trajectory in trajectories):
            return micro
        kept = pack_kept(
            [trajectory.completion.sampling_mask or () for trajectory in trajectories], micro.mask.shape[1]
        )
        return micro.with_extras(kept=kept.to(micro.mask.device))

    def forward(self, call: ForwardPass) -> AbstractContextManager[Mapping[str, Any]]:
        return nullcontext({"kept": call.micro.extras.get("kept")})
