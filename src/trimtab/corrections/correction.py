"""Computes weights, masks and statistics of a batch in one pass over blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.masks import Mask, RuleInputs
from trimtab.corrections.ratios import PER_TOKEN_LEVELS, Ratios, log_ratio, units_of
from trimtab.corrections.reduce import Sequences, nan_below_minimum, select
from trimtab.corrections.statistics import Histogram, Mean, Mergeable, RatioStatistics, total
from trimtab.corrections.weights import Weight, WeightStatistics
from trimtab.errors import TrimtabError

BLOCK_TOKENS = {"cpu": 1 << 18}
BLOCK_TOKENS_ELSEWHERE = 1 << 19
"""Tokens per block: as many as fit a CPU core's cache, or occupy an accelerator while the memory of intermediate
tensors stays bounded."""


@dataclass(frozen=True, eq=False)
class BatchCorrection:
    """The result of `compute_correction` over one batch.

    weight: (batch, time), bounded and not yet normalized; 0 where untrained or rejected by it; None without a `Weight`.
    keep: (batch, time) bool, tokens of the mask that no rule rejected, nor the weight's own mask.
    statistics: mergeable, by metric key.
    mismatch: statistics of proximal/behavior over the original mask; None without `measure`.
    """

    weight: Float[Tensor, "batch time"] | None
    keep: Bool[Tensor, "batch time"]
    statistics: dict[str, Mergeable]
    mismatch: RatioStatistics | None

    @property
    def weight_statistics(self) -> WeightStatistics | None:
        statistics = self.statistics.get("weight")
        return statistics if isinstance(statistics, WeightStatistics) else None


def compute_correction(
    proximal: Float[Tensor, "batch time"] | None,
    behavior: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    weight: Weight | None = None,
    masks: Sequence[Mask] = (),
    current: Float[Tensor, "batch time"] | None = None,
    advantage: Float[Tensor, "batch #time"] | None = None,
    sequence_ids: Int[Tensor, "batch time"] | None = None,
    turn: Int[Tensor, "batch time"] | None = None,
    measure: bool = False,
) -> BatchCorrection:
    """Computes weight, keep and their statistics. No gradient, no synchronization with the device.

    All tensors are (batch, time); `advantage` may be (batch, 1). `current`, `advantage` and `proximal` may be None
    where nothing reads them; `measure` reads `proximal`. `turn` is the number of the model turn of each token, which
    levels of turns read. Raises `ValueError` naming a missing tensor.
    `measure` adds the mismatch statistics. Cost is linear in tokens. A batch with `sequence_ids` is one block, as its
    sequences may span all rows.
    """
    tensors = {"current": current, "proximal": proximal, "behavior": behavior, "advantage": advantage, "turn": turn}
    for rule in (*masks, *([] if weight is None else [weight])):
        missing = [name for name in sorted(rule.reads - {"turn"}) if tensors[name] is None]
        if missing:
            raise ValueError(f"{type(rule).__name__} needs {missing[0]}, which is None")
    rows, time = mask.shape
    size = (
        rows if sequence_ids is not None else BLOCK_TOKENS.get(mask.device.type, BLOCK_TOKENS_ELSEWHERE) // max(1, time)
    )
    size = min(max(1, size), rows)
    weights, keeps, blocks, mismatches = [], [], [], []
    for start in range(0, max(1, rows), max(1, size)):
        part = slice(start, start + size)
        block = _Block(
            proximal=None if proximal is None else proximal[part].detach(),
            behavior=nan_below_minimum(behavior[part].detach()),
            sequences=Sequences(mask[part], sequence_ids, None if turn is None else turn[part]),
            current=None if current is None else current[part].detach(),
            advantage=None if advantage is None else advantage[part],
        )
        keep, statistics = block.apply_masks(masks)
        if weight is not None:
            bounded, passed, of_weight = block.apply_weight(weight)
            weights.append(bounded)
            keep = keep if passed is None else keep & passed
            statistics |= of_weight
        if statistics:
            statistics |= block.rejected_shares(keep)
        if measure:
            mismatches.append(block.measure())
        keeps.append(keep)
        blocks.append(statistics)
    return BatchCorrection(
        weight=None if weight is None else torch.cat(weights),
        keep=torch.cat(keeps),
        statistics={name: reduce(add, (statistics[name] for statistics in blocks)) for name in blocks[0]},
        mismatch=reduce(add, mismatches) if measure else None,
    )


class _Block:
    """A few rows of the batch, whose tensors fit the cache."""

    def __init__(
        self,
        proximal: Tensor | None,
        behavior: Tensor,
        sequences: Sequences,
        current: Tensor | None,
        advantage: Tensor | None,
    ) -> None:
        self.proximal, self.behavior, self.sequences = proximal, behavior, sequences
        mismatch, policy = (
            None if numerator is None else Ratios(log_ratio(numerator, behavior, sequences.mask), sequences)
            for numerator in (proximal, current)
        )
        self.inputs = RuleInputs(sequences, behavior, mismatch=mismatch, policy=policy, advantage=advantage)

    def apply_masks(self, rules: Sequence[Mask]) -> tuple[Tensor, dict[str, Mergeable]]:
        """Applies every rule to the original mask, and returns what all of them keep and the rejected shares."""
        keep = self.sequences.mask
        statistics: dict[str, Mergeable] = {}
        for place, rule in enumerate(rules):
            passed = rule.keep(self.inputs)
            if not isinstance(passed, Tensor) or passed.dtype != torch.bool:
                what = passed.dtype if isinstance(passed, Tensor) else type(passed).__name__
                raise TrimtabError(
                    f"{type(rule).__name__}.keep returned {what}, expected bools: True at tokens it keeps"
                )
            if passed.shape not in (keep.shape, (len(keep), 1)):
                raise TrimtabError(
                    f"{type(rule).__name__}.keep returned shape {tuple(passed.shape)}, expected {tuple(keep.shape)}: "
                    "values of whole sequences are spread to their tokens by inputs.sequences.spread"
                )
            passed = passed.expand_as(keep).contiguous()  # broadcasting bools takes a CPU ten times as long
            keep = keep & passed
            alike = sum(other.rule == rule.rule for other in rules[:place])
            statistics |= self._rejection(f"reject/{rule.rule}" + (f"_{alike + 1}" if alike else ""), passed)
        return keep, statistics

    def apply_weight(self, weight: Weight) -> tuple[Tensor, Tensor | None, dict[str, Mergeable]]:
        """Returns the bounded weight of every token, which tokens it keeps (None: all), and its statistics."""
        sequences, ratios = self.sequences, self.inputs.over(weight.over)
        units = units_of(sequences, weight.level)
        per_token = weight.level in PER_TOKEN_LEVELS
        trained = sequences.mask if per_token else units.trained
        ratio = ratios.at(weight.level)
        inside = weight.inside(ratio)
        bounded = select(weight.apply(ratio), trained)
        per_position = bounded if per_token else torch.where(sequences.mask, units.spread(bounded), 0.0)
        shared = (weight.level, weight.over) == ("token", "proximal")  # with the statistics of the mismatch
        raw = self.histogram if shared else Histogram.of(ratios.log_at(weight.level), trained)
        statistics: dict[str, Mergeable] = {
            "weight": WeightStatistics(
                raw=raw.counts,
                total=total(bounded),
                count=total(raw.counts),
                changed=total(trained & ~inside),
                weight=weight,
            )
        }
        passed = None
        if weight.rejects:
            passed = inside if per_token else units.spread(inside)
            statistics |= self._rejection(f"reject/{weight.rule}", passed)
        return per_position, passed, statistics

    def rejected_shares(self, keep: Tensor) -> dict[str, Mergeable]:
        """Returns the share of tokens, and of sequences, that all rules together rejected."""
        lengths, trained = self.sequences.lengths, self.sequences.trained
        kept = self.sequences.count(keep)
        return {
            "reject/tokens": Mean.of(lengths - kept, lengths),
            "reject/sequences": Mean.of(trained & (kept == 0), trained),
        }

    @cached_property
    def histogram(self) -> Histogram:
        return Histogram.of(self.inputs.mismatch.log, self.sequences.mask)

    def measure(self) -> RatioStatistics:
        assert self.proximal is not None
        return RatioStatistics.of(self.inputs.mismatch, self.proximal, self.behavior, self.histogram)

    def _rejection(self, name: str, passed: Tensor) -> dict[str, Mergeable]:
        """Returns the shares of trained tokens and of whole sequences that a rule rejected."""
        sequences, lengths = self.sequences, self.sequences.lengths
        tokens = sequences.count(sequences.mask & ~passed)
        return {
            name: Mean.of(tokens, lengths),
            f"{name}/sequences": Mean.of(sequences.trained & (tokens == lengths), sequences.trained),
        }
