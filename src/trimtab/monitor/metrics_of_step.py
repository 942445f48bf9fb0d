"""The statistics of one training step that the monitor keeps, mergeable over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections.ratios import ratio_excess
from trimtab.corrections.reduce import nan_below_minimum
from trimtab.corrections.statistics import Count, Mean, Mergeable, total
from trimtab.objectives import Metrics, mismatch


@dataclass(frozen=True, eq=False)
class MeanRatio(Mergeable):
    """The mean of the ratio trainer/sampler with its standard error over responses.

    E_sampler[trainer / sampler] = 1 if the sampler reports log-probs of the distribution it samples from, whatever its
    rounding. The fields are sums over responses; e is the sum of ratio - 1 over a response's n trained tokens.
    """

    excess: Tensor  # e
    tokens: Tensor  # n
    excess_square: Tensor  # e^2
    excess_tokens: Tensor  # e n
    tokens_square: Tensor  # n^2
    responses: Tensor  # 1 if n > 0

    @classmethod
    def of(cls, log_ratio: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> MeanRatio:
        """Returns the sums. log_ratio: must be 0 where the mask is False."""
        e = ratio_excess(log_ratio.double()).sum(1)
        n = mask.sum(1).double()
        return cls(total(e), total(n), total(e * e), total(e * n), total(n * n), total(n > 0))

    def summary(self) -> dict[str, Tensor]:
        mean = self.excess / self.tokens
        variance = self.excess_square - 2 * mean * self.excess_tokens + mean.square() * self.tokens_square
        error = (variance.clamp(min=0) * self.responses / (self.responses - 1)).sqrt() / self.tokens
        return {"": 1 + mean, "/error": error}


def step_metrics(
    logp_train: Float[Tensor, "batch time"],
    logp_rollout: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    **means: Tensor | None,
) -> Metrics:
    """Returns the statistics of a batch.

    means: name -> values to average, (batch,), or (batch, time) over trained tokens; None is left out. A trained token
    is left out and counted if a log-prob is not finite, or if the sampler's is below -100, which stands for a missing
    one. Raises `ValueError` if a value is not a tensor, or has another shape, kind of number or device.
    """
    finite = mask & torch.isfinite(logp_train) & torch.isfinite(nan_below_minimum(logp_rollout))
    train, rollout = (torch.where(finite, logp.detach(), 0.0) for logp in (logp_train, logp_rollout))
    trained = mask.any(1)
    parts: dict[str, Mergeable] = {
        "mismatch/": mismatch(train, rollout, finite).parts[""],
        "mean_ratio": MeanRatio.of(train - rollout, finite),
        "nonfinite": Count(total(mask & ~finite)),
        "response/length": Mean(total(mask), total(trained)),
    }
    for name, values in means.items():
        if values is not None:
            where = mask if values.shape == mask.shape else torch.isfinite(values)
            parts[name] = Mean.of(torch.where(where, values, 0).double(), where)
    return Metrics(parts)


def over_ranks(metrics: Metrics, group: dist.ProcessGroup | None = None) -> Metrics:
    """Returns the metrics merged over all ranks, in one collective. Every rank must pass the same names."""
    tensors = {
        (name, field.name): value
        for name, part in sorted(metrics.parts.items())
        for field in fields(part)
        if isinstance(value := getattr(part, field.name), Tensor)
    }
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()])
    gathered = flat.new_empty(dist.get_world_size(group) * flat.numel())
    dist.all_gather_into_tensor(gathered, flat, group=group)

    def unpacked(row: Tensor) -> Metrics:
        values: dict[str, dict[str, Tensor]] = {name: {} for name in metrics.parts}
        pieces = row.split([tensor.numel() for tensor in tensors.values()])
        for ((name, field), tensor), piece in zip(tensors.items(), pieces, strict=True):
            values[name][field] = piece.view(tensor.shape).to(tensor.dtype)
        return Metrics({name: replace(part, **values[name]) for name, part in metrics.parts.items()})

    return reduce(add, map(unpacked, gathered.view(-1, flat.numel())))
