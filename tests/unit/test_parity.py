"""`trimtab.testing.assert_parity` as a user's test calls it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trimtab.testing import assert_parity

LOGP = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -3.0, -7.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_equal_log_probs_pass_whatever_stands_at_masked_positions() -> None:
    other = LOGP.clone()
    other[1, 2] = float("nan")
    assert_parity(LOGP, other, MASK, bound=0.0)
    assert_parity(LOGP.requires_grad_(), other, MASK, bound="fp32")


def test_the_bound_is_one_on_k3_and_the_worst_token_is_named() -> None:
    other = LOGP.clone()
    other[1, 1] -= 0.1
    k3 = float(torch.tensor(0.1).expm1() - 0.1) / 5
    assert_parity(LOGP, other, MASK, bound=1.01 * k3)
    assert_parity(LOGP, other, MASK)
    with pytest.raises(AssertionError, match=r"above 1e-08; .*0.1 nats at row 1, token 1"):
        assert_parity(LOGP, other, MASK, bound="fp32")
    with pytest.raises(AssertionError, match="k3"):
        assert_parity(LOGP, other, MASK, bound=0.99 * k3)


@pytest.mark.parametrize("bound", ["bf16", "int8", 1.0])
@pytest.mark.parametrize("shift", [0.05, -0.05])
def test_a_shift_of_all_log_probs_fails_whatever_the_bound(bound: float | str, shift: float) -> None:
    """Its k3 is 1.3e-3, within every bound; its mean ratio .951 or 1.051 is not 1. Rounding alone passes."""
    generator = torch.Generator().manual_seed(0)
    sampler = -torch.rand(16, 32, generator=generator) - 0.5
    mask = torch.rand(16, 32, generator=generator) < 0.9
    noise = 0.05 * torch.randn(16, 32, generator=generator)
    rounded = sampler + noise - 0.05**2 / 2  # the mean of exp(noise) is exp(.05^2 / 2)
    assert_parity(rounded, sampler, mask, bound)
    with pytest.raises(AssertionError, match=r"mean of trainer / sampler is (0\.95|1\.05).*; k3 0\.00"):
        assert_parity(rounded + shift, sampler, mask, bound)
    with pytest.raises(AssertionError, match="the mean of trainer / sampler"):
        assert_parity(sampler[:1] + shift, sampler[:1], mask[:1], bound)


def test_it_fails_where_python_skips_assert_statements() -> None:
    """Of NaN and of a difference; `assert_loss` is beside it."""
    code = """
import torch, trimtab.testing as testing
one = torch.full((1, 2), -1.0)
for call in (
    lambda: testing.assert_parity(one, one - 1, one < 0),
    lambda: testing.assert_parity(one, one * torch.nan, one < 0),
    lambda: testing.assert_parity(one, one, one > 0),
    lambda: testing.assert_parity(one, one + 0.2, one < 0, 1.0),
    lambda: testing.assert_loss(lambda logp, advantage, mask: (logp * advantage * mask).sum(), "reinforce"),
):
    try:
        call()
    except AssertionError:
        continue
    raise SystemExit("passed")
"""
    subprocess.run([sys.executable, "-O", "-c", code], check=True)


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(AssertionError, match="no token"):
        assert_parity(LOGP, LOGP, torch.zeros_like(MASK))
    for value in (-torch.inf, -9999.0):
        with pytest.raises(AssertionError, match="1 of 5 log-probs are not finite"):
            assert_parity(LOGP, torch.where(LOGP == -0.5, value, LOGP), MASK)
    with pytest.raises(ValueError, match="bound 'fp8'"):
        assert_parity(LOGP, LOGP, MASK, bound="fp8")
