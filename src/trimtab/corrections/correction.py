"""Computes weights, masks and statistics of a batch in one pass over blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections.masks import Mask, RuleInputs
from trimtab.corrections.policy_logps import PolicyLogps
from trimtab.corrections.ratios import PER_TOKEN_LEVELS, Ratios, log_ratio, units_of
from trimtab.corrections.reduce import Sequences, nan_below_minimum, select
from trimtab.corrections.statistics import Histogram, Mean, Mergeable, RatioStatistics, total
from trimtab.corrections.weights import Weight, WeightStatistics
from trimtab.errors import TrimtabError

BLOCK_TOKENS = {"cpu": 1 << 18}
BLOCK_TOKENS_ELSEWHERE = 1 << 19
"""Tokens per block: few enough for a CPU core's cache, enough to occupy an accelerator with bounded memory for
intermediate tensors."""


@dataclass(frozen=True, eq=False)
class BatchCorrection:
    """The result of `compute_correction` over one batch.

    weight: (batch, time), bounded, not yet normalized; 0 if untrained or rejected by a `Weight`; None without one.
    keep: (batch, time) bool, True at trained tokens that neither a rule nor the weight rejected.
    statistics: mergeable, by metric key; with `measure` also the mismatch, whose metrics have no prefix.
    """

    weight: Float[Tensor, "batch time"] | None
    keep: Bool[Tensor, "batch time"]
    statistics: dict[str, Mergeable]

    @property
    def weight_statistics(self) -> WeightStatistics | None:
        statistics = self.statistics.get("weight")
        return statistics if isinstance(statistics, WeightStatistics) else None


def compute_correction(
    logps: PolicyLogps,
    advantage: Float[Tensor, "batch #time"] | None = None,
    *,
    weight: Weight | None = None,
    masks: Sequence[Mask] = (),
    measure: bool = False,
) -> BatchCorrection:
    """Computes weight, keep and their statistics. No gradient, no synchronization with the device.

    advantage: (batch, 1) or (batch, time); may be None if no mask reads it. measure: whether to add the statistics of
    proximal/behavior over the original mask. Raises `ValueError` naming a tensor that is None although the weight, a
    mask or `measure` reads it. The cost is linear in tokens. A batch with `sequence_ids` is one block, because its
    sequences may span all rows.
    """
    read = {"behavior": "the correction", **({"proximal": "the mismatch"} if measure else {})}  # by which part
    for part in (*masks, *([] if weight is None else [weight])):
        read |= dict.fromkeys(sorted(part.reads), type(part).__name__)
    if "advantage" in read and advantage is None:
        raise ValueError(f"{read['advantage']} needs advantage, which is None")
    given = {name: logps.required(name, reader).detach() for name, reader in read.items() if name != "advantage"}
    rows, time = logps.mask.shape
    size = BLOCK_TOKENS.get(logps.mask.device.type, BLOCK_TOKENS_ELSEWHERE) // max(1, time)
    size = max(1, rows if logps.sequence_ids is not None else min(size, rows))
    weights, keeps, blocks = [], [], []
    for start in range(0, max(1, rows), size):
        block = slice(start, start + size)
        sequences = Sequences(logps.mask[block], logps.sequence_ids, given["turn"][block] if "turn" in given else None)
        sampled = nan_below_minimum(given["behavior"][block])
        policies = {name: given[name][block] for name in ("proximal", "current") if name in given}
        ratios = {name: Ratios(log_ratio(one, sampled, sequences.mask), sequences) for name, one in policies.items()}
        advantages = None if advantage is None else advantage[block].detach()
        inputs = RuleInputs(sequences, select(sampled, sequences.mask), ratios, advantages)
        histogram = Histogram.of(inputs.mismatch.log, sequences.mask) if measure else None
        keep, statistics = _apply_masks(masks, inputs)
        if weight is not None:
            bounded, passed, of_weight = _apply_weight(weight, inputs, histogram)
            weights.append(bounded)
            keep = keep if passed is None else keep & passed
            statistics |= of_weight
        if statistics:
            kept = sequences.count(keep)
            statistics["reject/tokens"] = Mean.of(sequences.lengths - kept, sequences.lengths)
            statistics["reject/sequences"] = Mean.of(sequences.trained & (kept == 0), sequences.trained)
        if histogram is not None:
            of_mismatch = RatioStatistics.of(inputs.mismatch, policies["proximal"], sampled, histogram)
            statistics = {"": of_mismatch, **statistics}
        keeps.append(keep)
        blocks.append(statistics)
    return BatchCorrection(
        weight=None if weight is None else torch.cat(weights),
        keep=torch.cat(keeps),
        statistics={name: reduce(add, (statistics[name] for statistics in blocks)) for name in blocks[0]},
    )


def _apply_masks(rules: Sequence[Mask], inputs: RuleInputs) -> tuple[Tensor, dict[str, Mergeable]]:
    """Applies every rule to the original mask. Returns the tokens that all rules keep, and rejected shares."""
    keep = inputs.sequences.mask
    statistics: dict[str, Mergeable] = {}
    for place, rule in enumerate(rules):
        passed = rule.keep(inputs)
        if not isinstance(passed, Tensor) or passed.dtype != torch.bool:
            what = passed.dtype if isinstance(passed, Tensor) else type(passed).__name__
            raise TrimtabError(f"{type(rule).__name__}.keep returned {what}, expected bools: True at tokens it keeps")
        if passed.shape not in (keep.shape, (len(keep), 1)):
            raise TrimtabError(
                f"{type(rule).__name__}.keep returned shape {tuple(passed.shape)}, expected {tuple(keep.shape)}: "
                "values of whole sequences are spread to their tokens by inputs.sequences.spread"
            )
        passed = passed.expand_as(keep).contiguous()  # broadcast bools are ten times slower on a CPU
        keep = keep & passed
        alike = sum(other.rule == rule.rule for other in rules[:place])
        statistics |= _rejected(rule.rule + (f"_{alike + 1}" if alike else ""), passed, inputs.sequences)
    return keep, statistics


def _apply_weight(
    weight: Weight, inputs: RuleInputs, histogram: Histogram | None
) -> tuple[Tensor, Tensor | None, dict[str, Mergeable]]:
    """Returns the bounded weight of every token, which tokens it keeps (None: all), and its statistics.

    histogram: of the per-token log-ratios proximal/behavior, if already computed.
    """
    sequences, ratios = inputs.sequences, inputs.over(weight.over)
    units = units_of(sequences, weight.level)
    per_token = weight.level in PER_TOKEN_LEVELS
    trained = sequences.mask if per_token else units.trained
    ratio = ratios.at(weight.level)
    inside = weight.inside(ratio)
    bounded = select(weight.apply(ratio), trained)
    per_position = bounded if per_token else torch.where(sequences.mask, units.spread(bounded), 0.0)
    if histogram is None or (weight.level, weight.over) != ("token", "proximal"):
        histogram = Histogram.of(ratios.log_at(weight.level), trained)
    count, changed = total(histogram.counts), total(trained & ~inside)
    statistics: dict[str, Mergeable] = {
        "weight": WeightStatistics(histogram.counts, total(bounded), count, changed, weight)
    }
    if not weight.rejects:
        return per_position, None, statistics
    passed = inside if per_token else units.spread(inside)
    return per_position, passed, {**statistics, **_rejected(weight.rule, passed, sequences)}


def _rejected(rule: str, passed: Tensor, sequences: Sequences) -> dict[str, Mergeable]:
    """Returns the shares of trained tokens and of whole sequences that a rule rejected."""
    lengths, tokens = sequences.lengths, sequences.count(sequences.mask & ~passed)
    return {
        f"reject/{rule}": Mean.of(tokens, lengths),
        f"reject/{rule}/sequences": Mean.of(sequences.trained & (tokens == lengths), sequences.trained),
    }
