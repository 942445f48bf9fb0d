"""Checks of `numerics = "invariant"`: of the recipe before a model is loaded, and of the log-probs in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from trimtab.config import Config
from trimtab.engines.factory import weight_quantization
from trimtab.errors import TrimtabError
from trimtab.training.features.feature import Feature, StepRecord

NOT_CONFIRMED_MESSAGE = (
    "caution: no token of this batch was sampled under the weights it is trained with, so numerics = "
    '"invariant" was not confirmed (mismatch/confirmed)'
)


def check(config: Config) -> None:
    """Raise `TrimtabError` for a recipe whose sampler and trainer cannot agree bit for bit."""
    if config.numerics != "invariant":
        return
    engine = config.engine
    if engine.type != "embedded":
        raise TrimtabError(
            f'numerics = "invariant" needs engine.type = "embedded": kernels of {engine.type!r} choose their order of '
            "summation by the batch, and are not the trainer's"
        )
    compute_dtype = "bfloat16" if config.model.autocast == "bfloat16" else config.model.dtype
    if engine.dtype != compute_dtype:
        raise TrimtabError(
            f'numerics = "invariant" needs one type on both sides: engine.dtype = "{engine.dtype}", and the trainer '
            f'computes in {compute_dtype}; set engine.dtype = "{compute_dtype}", or model.dtype and model.autocast to '
            "match"
        )
    if weight_quantization(config).active:
        raise TrimtabError('numerics = "invariant" has nothing to keep equal with engine.quantize or engine.noise')
    if config.model.lora.rank:
        raise TrimtabError(
            'numerics = "invariant" trains whole weights: adapters are merged for the sampler and not for the trainer; '
            "set model.lora.rank = 0"
        )


class BitwiseCheck(Feature):
    """Compares the log-probs that were sampled and trained under the same weights, in every step."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        """Returns the number of log-probs that were compared. Raises `TrimtabError` if one of them differs."""
        compared, unequal, worst = 0, 0, 0.0
        for row, logps in record.statistics.mismatch_logps.items():
            completion = record.trajectories[row].completion
            same = completion.policy_version == record.statistics.versions[row]
            compared += int(same.sum())
            differing = same & (completion.logp_behavior != logps)
            if differing.any():
                unequal += int(differing.sum())
                worst = max(worst, float(np.abs(completion.logp_behavior - logps)[differing].max()))
        if unequal:
            raise TrimtabError(
                f"{unequal} of {compared} log-probs are not the sampler's bit for bit (largest difference {worst:.3g}):"
                f' numerics = "invariant" does not hold here with {torch.get_num_threads()} threads; '
                "`trimtab doctor --bitwise` names the operation, fewer `threads` may help"
            )
        if compared == 0 and record.step == 1:
            self._notify(NOT_CONFIRMED_MESSAGE)
        return {"mismatch/confirmed": compared}
