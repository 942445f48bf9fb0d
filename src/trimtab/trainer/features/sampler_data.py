"""Passes what the sampler returns for each token, besides its log-prob, to the trainer's forward.

- `SamplingMask`: the tokens that truncated sampling allowed (docs/results/experiments.md).
- `TopLogprobs`: the most probable ids, for objectives that center scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from trimtab.errors import TrimtabError
from trimtab.trainer.features.feature import Feature, ForwardPass
from trimtab.trainer.models.logprobs import pack_kept
from trimtab.trainer.packing import MicroBatch
from trimtab.types import TopTokens, Trajectory


class SamplingMask(Feature):
    """Passes the allowed tokens of truncated samples to every forward."""

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        if not any(trajectory.sampling.truncated for trajectory in trajectories):
            return micro
        kept = pack_kept([t.completion.sampling_mask or () for t in trajectories], micro.mask.shape[1])
        return micro.with_extras(kept=kept.to(micro.mask.device))

    def forward(self, call: ForwardPass) -> AbstractContextManager[Mapping[str, Any]]:
        return nullcontext({"kept": call.micro.extras.get("kept")})


MASS_MAX = 1 + 1e-3
"""Largest mass of the most probable ids that rounding explains."""


class TopLogprobs(Feature):
    """Passes the most probable ids of each token to "train" forwards."""

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        ids, logps = _pack([_validated_top(trajectory) for trajectory in trajectories], micro.mask.shape[1])
        device = micro.mask.device
        return micro.with_extras(head=ids.to(device), head_behavior=logps.to(device))

    def forward(self, call: ForwardPass) -> AbstractContextManager[Mapping[str, Any]]:
        if call.purpose != "train":
            return nullcontext({})
        nothing = torch.full((1, 1, 1), -1, device=call.micro.mask.device)  # for the token of an empty micro-batch
        return nullcontext({"head": call.micro.extras["head"] if call.micro.rows else nothing})


def _validated_top(trajectory: Trajectory) -> TopTokens:
    """Returns a response's most probable ids; raises `TrimtabError` if they are missing or their mass exceeds 1."""
    top, name = trajectory.completion.top, f"response to {trajectory.prompt.problem.id!r}"
    if top is None:
        raise TrimtabError(
            f"{name}: its sampler returned no most probable ids, which the objective reads: use an engine of this run "
            "with sampling.top_logprobs"
        )
    mass = np.exp(top.logps.astype(np.float64)).sum(-1)
    if len(mass) and mass.max() > MASS_MAX:
        raise TrimtabError(
            f"{name}: the sampler's most probable ids have a mass of {mass.max():.4g}: log-probs must be those of the "
            "whole vocabulary after temperature"
        )
    return top


def _pack(tops: Sequence[TopTokens], time: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and log-probs as tensors (rows, time, k), padded with -1 and -inf."""
    width = max(top.ids.shape[1] for top in tops)
    ids = np.full((len(tops), time, width), -1, dtype=np.int64)
    logps = np.full((len(tops), time, width), -np.inf, dtype=np.float32)
    for row, top in enumerate(tops):
        ids[row, : len(top), : top.ids.shape[1]] = top.ids
        logps[row, : len(top), : top.ids.shape[1]] = top.logps
    return torch.from_numpy(ids), torch.from_numpy(logps)
