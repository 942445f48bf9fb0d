"""The off-policy correction and the mismatch statistics as functions, for use with any loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.correction import compute_correction
from trimtab.corrections.masks import Mask
from trimtab.corrections.policy_logps import PolicyLogps, check_advantage, check_batch
from trimtab.corrections.reduce import widen
from trimtab.corrections.weights import Weight
from trimtab.objectives.state import Metrics


class Correction(NamedTuple):
    """The result of `correct`. Multiply weight and keep into the loss and leave its denominator unchanged.

    weight: (batch, time), bounded, without gradient; 0 at tokens that are untrained or outside the bounds of a `Weight`
        with bound "mask". `masks` do not change it. Without a `Weight` it is the mask.
    keep: (batch, time) bool, True at trained tokens that no rule rejects.
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
    turn: Int[Tensor, "batch time"] | None = None,
) -> Correction:
    """Computes importance weights, rejection and mismatch metrics of a batch in one pass.

    `current` (batch, time), `advantage` (batch, 1) or (batch, time), and `turn` (batch, time), the turn number of each
    token, are required only if the weight or a mask lists them in `reads`. A weight with `normalize` is divided by its
    mean over this batch. The metrics are those of `mismatch`, plus `weight/...` and `reject/...`. Raises `ValueError`
    for an argument that is not a tensor, or has a wrong shape, dtype or device.
    """
    logps = PolicyLogps(current, behavior, mask, proximal=proximal, sequence_ids=sequence_ids, turn=turn)
    if advantage is not None:
        check_advantage(advantage, mask)
    if not isinstance(weight, Weight | None) or isinstance(masks, Mask) or not all(isinstance(m, Mask) for m in masks):
        raise ValueError(f"weight must be a Weight, masks a list of Band, Divergence, ...: {weight!r}, {masks!r}")
    result = compute_correction(logps, advantage, weight=weight, masks=masks, measure=True)
    metrics, statistics = Metrics(result.statistics), result.weight_statistics
    if weight is None or result.weight is None or statistics is None:
        return Correction(mask.to(widen(proximal).dtype), result.keep, metrics)
    normalized = weight.normalized(result.weight, statistics.total, statistics.count)
    return Correction(normalized, result.keep, metrics)


def mismatch(
    logp_train: Float[Tensor, "batch time"],
    logp_rollout: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    sequence_ids: Int[Tensor, "batch time"] | None = None,
) -> Metrics:
    """Measures the difference between the trainer's and the sampler's log-probs over the mask.

    `+` merges the metrics of parts of a batch. `finalize()` returns k1 k2 k3 chi2_token chi2_seq ess_token ess_seq
    ratio_mean ppl_ratio ppl_train pearson abs_diff_mean abs_diff_max ratio_min ratio_max ratio_q01..ratio_q99
    ratio_bounded log_ratio_seq_max tokens sequences (docs/reference-objectives.md). Raises `ValueError` as `correct`.
    """
    check_batch(mask, logp_train=logp_train, logp_rollout=logp_rollout, sequence_ids=sequence_ids)
    logps = PolicyLogps(None, logp_rollout, mask, proximal=logp_train, sequence_ids=sequence_ids)
    return Metrics(compute_correction(logps, measure=True).statistics)
