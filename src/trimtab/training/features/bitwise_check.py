"""Checks each step that sampler and trainer log-probs are bitwise equal where `numerics = "invariant"` promises it.

A recipe that cannot keep the promise is refused before a model is loaded; in a run every step is held to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trimtab.config import Config
from trimtab.engines.factory import weight_quantization
from trimtab.errors import TrimtabError
from trimtab.training.step_statistics import StepStatistics
from trimtab.types import Trajectory


def check(config: Config) -> None:
    """Raise `TrimtabError` where sampler and trainer could not agree."""
    if config.numerics != "invariant":
        return
    engine = config.engine
    if engine.type != "embedded":
        raise TrimtabError(
            f'numerics = "invariant" needs engine.type = "embedded": kernels of {engine.type!r} choose their order of '
            "summation by the batch, and are not the trainer's"
        )
    computes = "bfloat16" if config.model.autocast == "bfloat16" else config.model.dtype
    if engine.dtype != computes:
        raise TrimtabError(
            f'numerics = "invariant" needs one type on both sides: engine.dtype = "{engine.dtype}", and the trainer '
            f'computes in {computes}; set engine.dtype = "{computes}", or model.dtype and model.autocast to match'
        )
    if weight_quantization(config).active:
        raise TrimtabError('numerics = "invariant" has nothing to keep equal with engine.quantize or engine.noise')
    if config.model.lora.rank:
        raise TrimtabError(
            'numerics = "invariant" trains whole weights: adapters are merged for the sampler and not for the trainer; '
            "set model.lora.rank = 0"
        )


def confirm(trajectories: Sequence[Trajectory], stats: StepStatistics) -> int:
    """How many log-probs were sampled and trained under the same weights; all of them are equal.

    Raises:
        TrimtabError: one is not.
    """
    compared, unequal, worst = 0, 0, 0.0
    for row, anchor in stats.anchors.items():
        written = trajectories[row].completion
        same = written.policy_version == stats.versions[row]
        compared += int(same.sum())
        differing = same & (written.logp_behavior != anchor)
        if differing.any():
            unequal += int(differing.sum())
            worst = max(worst, float(np.abs(written.logp_behavior - anchor)[differing].max()))
    if unequal:
        raise TrimtabError(
            f"{unequal} of {compared} log-probs are not the sampler's bit for bit (largest difference {worst:.3g}): "
            f'numerics = "invariant" does not hold here with {torch.get_num_threads()} threads; '
            "`trimtab doctor --bitwise` names the operation, fewer `threads` may help"
        )
    return compared
