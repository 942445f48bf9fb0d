"""Assertions for other people's tests: do two sides compute the same log-probs?"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.objectives import mismatch

BOUNDS = {"fp32": 1e-8, "bf16": 1e-2, "int8": 1e-1}
"""Largest k3 in nats per token by the numerics of the coarser side."""


def assert_parity(
    logp_a: Float[Tensor, "batch time"],
    logp_b: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    bound: float | str = "bf16",
) -> None:
    """Asserts that trainer (a) and sampler (b) agree on the tokens where `mask` is True.

    bound: largest k3 of a/b in nats per token, or a key of `BOUNDS`.

    Raises:
        AssertionError: k3 is above the bound, a log-prob is not finite, or no token is compared.
        ValueError: an unknown bound, or shapes that differ.
    """
    if isinstance(bound, str) and bound not in BOUNDS:
        raise ValueError(f"bound {bound!r}: give a number, or one of {', '.join(BOUNDS)}")
    limit = BOUNDS[bound] if isinstance(bound, str) else bound
    if not logp_a.shape == logp_b.shape == mask.shape:
        raise ValueError(f"shapes differ: {tuple(logp_a.shape)}, {tuple(logp_b.shape)}, {tuple(mask.shape)}")
    assert bool(mask.any()), "no token is compared: the mask is False everywhere"
    finite = torch.isfinite(logp_a) & torch.isfinite(logp_b)
    missing = int((mask & ~finite).sum())
    assert not missing, f"{missing} of {int(mask.sum())} log-probs are not finite"
    figures: dict[str, Any] = mismatch(logp_a.detach(), logp_b.detach(), mask).finalize()
    worst = (torch.where(mask, logp_a - logp_b, 0.0)).abs().argmax()
    row, time = divmod(int(worst), mask.shape[1])
    assert figures["k3"] <= limit, (
        f"k3 {figures['k3']:.3g} nats per token, above {limit:g}; mean ratio {figures['ratio_mean']:.5g}, largest "
        f"difference {figures['abs_diff_max']:.3g} nats at row {row}, token {time}"
    )
