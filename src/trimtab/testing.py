"""For tests of other trainers: asserts that two sides agree on log-probs, and that a loss equals an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.check_loss.check import check
from trimtab.check_loss.signatures import of_function
from trimtab.corrections.policy_logps import check_batch
from trimtab.corrections.reduce import nan_below_minimum
from trimtab.monitor.alarms import LOW_ESS, wrong_mean
from trimtab.monitor.metrics_of_step import MeanRatio
from trimtab.objectives import Objective, mismatch, objective
from trimtab.types import MIN_BEHAVIOR

BOUNDS = {"fp32": 1e-8, "bf16": 1e-2, "int8": 1e-1}
"""Largest k3 in nats per token, by the lower precision of the two sides."""


def assert_parity(
    logp_a: Float[Tensor, "batch time"],
    logp_b: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    bound: float | str = "bf16",
) -> None:
    """Asserts that trainer (a) and sampler (b) agree on the tokens where `mask` is True, which b sampled.

    bound: largest k3 of a/b in nats per token, or a key of `BOUNDS`. Whatever the bound, the mean of a/b must be 1
    within its error (the test of `trimtab.Monitor`), because a shift of all log-probs has a small k3.

    Raises:
        AssertionError: k3 is above the bound, the mean ratio is not 1, a log-prob is not finite, a log-prob of the
            sampler is below -100, or no token is compared.
        ValueError: the bound is unknown, or an argument is not a tensor or has a wrong shape, dtype or device.
    """
    if isinstance(bound, str) and bound not in BOUNDS:
        raise ValueError(f"bound {bound!r}: give a number, or one of {', '.join(BOUNDS)}")
    limit = BOUNDS[bound] if isinstance(bound, str) else bound
    check_batch(mask, logp_a=logp_a, logp_b=logp_b)
    if not mask.any():
        raise AssertionError("no token is compared: the mask is False everywhere")
    finite = torch.isfinite(logp_a) & torch.isfinite(nan_below_minimum(logp_b))
    missing = int((mask & ~finite).sum())
    if missing:
        raise AssertionError(
            f"{missing} of {int(mask.sum())} log-probs are not finite, or below {MIN_BEHAVIOR:g} in the sampler"
        )
    figures: dict[str, Any] = mismatch(logp_a.detach(), logp_b.detach(), mask).finalize()
    worst = (torch.where(mask, logp_a - logp_b, 0.0)).abs().argmax()
    row, time = divmod(int(worst), mask.shape[1])
    if not figures["k3"] <= limit:  # NaN too
        raise AssertionError(
            f"k3 {figures['k3']:.3g} nats per token, above {limit:g}; mean ratio {figures['ratio_mean']:.5g}, largest "
            f"difference {figures['abs_diff_max']:.3g} nats at row {row}, token {time}"
        )
    # The errors of the ratios of sampled tokens are uncorrelated: each token counts as one response.
    log_ratio = (logp_a.detach().double() - logp_b.detach().double())[mask][:, None]
    ratio = MeanRatio.of(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool))
    shift = "" if figures["ess_token"] < LOW_ESS else wrong_mean(ratio)
    if shift:
        raise AssertionError(f"{shift}; k3 {figures['k3']:.3g} nats per token")


def assert_loss(
    function: Callable[..., Any],
    name: str | Objective,
    *,
    arguments: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
    **keywords: Any,
) -> None:
    """Asserts that a loss function equals an objective in gradient and value, on probes and random float64 batches.

    name, keywords: as for `trimtab.objective`; `name` may also be an `Objective`. arguments: meanings of parameters
    whose names do not tell them, as in `trimtab check-loss --arguments`. ignore: kinds of differences that do not
    count, such as "nan" for a loss whose padding never holds NaN.

    Raises:
        AssertionError: the loss differs; the message lists the differences, the most harmful first.
        TrimtabError: the meaning of a parameter is unknown, or the function cannot be called.
    """
    wanted = objective(name, **keywords) if isinstance(name, str) else name
    answer = check(of_function(function, arguments), wanted, spec=wanted.name, ignore=ignore)
    if not answer.equal:
        raise AssertionError(answer.text())
