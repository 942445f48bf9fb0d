"""`correct` and `mismatch`: the correction for a loss of one's own, and the mismatch statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.correction import sweep
from trimtab.corrections.masks import Mask
from trimtab.corrections.reduce import widen
from trimtab.corrections.weights import Weight
from trimtab.objectives.metrics import Metrics


class Correction(NamedTuple):
    """weight (batch, time): bounded, without gradient, 0 where untrained or masked away; 1 without a Weight.
    keep (batch, time) bool: inside the mask, what no rule rejected. Multiply both into the loss, keep the denominator.
    """

    weight: Float[Tensor, "batch time"]
    keep: Bool[Tensor, "batch time"]
    metrics: Metrics


def correct(
    proximal: Float[Tensor, "batch time"],
    behavior: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    weight: Weight | None = None,
    masks: Sequence[Mask] = (),
    current: Float[Tensor, "batch time"] | None = None,
    advantage: Float[Tensor, "batch #time"] | None = None,
    sequence_ids: Int[Tensor, "batch time"] | None = None,
) -> Correction:
    """Importance weight and rejection of a batch, with every mismatch metric, in one sweep.

    `current` (batch, time) and `advantage` (batch, 1) are read by OPSM only. A weight with `normalize` is divided by
    its mean over this batch. Metrics hold what `mismatch` returns, plus `weight/...` and `reject/...`.
    """
    _check(mask, proximal=proximal, behavior=behavior, current=current, sequence_ids=sequence_ids)
    found = sweep(
        proximal,
        behavior,
        mask,
        weight=weight,
        masks=masks,
        current=current,
        advantage=advantage,
        sequence_ids=sequence_ids,
        measure=True,
    )
    assert found.mismatch is not None
    metrics = Metrics({"": found.mismatch, **found.statistics})
    seen = found.weight_statistics
    if weight is None or found.weight is None or seen is None:
        return Correction(mask.to(widen(proximal).dtype), found.keep, metrics)
    final = weight.normalized(found.weight, seen.total, seen.count)
    return Correction(final, found.keep, metrics)


def mismatch(
    logp_train: Float[Tensor, "batch time"],
    logp_rollout: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    sequence_ids: Int[Tensor, "batch time"] | None = None,
) -> Metrics:
    """How far the trainer's log-probs are from the sampler's over the mask; parts add up with `+`.

    `finalize()` gives k1 k2 k3 chi2_token chi2_seq ess_token ess_seq ratio_mean ppl_ratio pearson abs_diff_mean
    abs_diff_max ratio_q01..ratio_q99 ratio_bounded log_ratio_seq_max tokens sequences (docs/math.md).
    """
    _check(mask, logp_train=logp_train, logp_rollout=logp_rollout, sequence_ids=sequence_ids)
    found = sweep(logp_train, logp_rollout, mask, sequence_ids=sequence_ids, measure=True)
    assert found.mismatch is not None
    return Metrics({"": found.mismatch})


def _check(mask: Tensor, **tensors: Tensor | None) -> None:
    """A float mask would select nothing and a short tensor would broadcast: both silently."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask.dtype}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, mask {tuple(mask.shape)}: all must be (batch, time)"
            )
