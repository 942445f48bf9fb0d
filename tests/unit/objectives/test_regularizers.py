"""KL estimates on a tabular softmax: expectations by enumerating the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trimtab.errors import TrimtabError
from trimtab.objectives import KL, PolicyLogps, objective

torch.manual_seed(0)
LOGITS, REFERENCE, OLD = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def expected_gradient(kind: str, sampler: Tensor, *, bypass: bool = False) -> Tensor:
    """Gradient of E_sampler[KL term] with respect to the logits, every token of the vocabulary weighed by its chance.

    Each token is a row of one; its advantage is 0, so that the loss is the KL term alone.
    """
    gradient = torch.zeros_like(LOGITS)
    old = sampler.log_softmax(0)
    for token in range(7):
        logits = LOGITS.clone().requires_grad_()
        row = lambda logp: logp.log_softmax(0)[token].view(1, 1)  # noqa: B023, E731
        policies = {"behavior" if bypass else "proximal": row(sampler), "reference": row(REFERENCE)}
        logps = PolicyLogps(**{"behavior": None, **policies}, current=row(logits), mask=torch.ones(1, 1).bool())
        obj = objective("token-bypass" if bypass else "grpo", kl=kind, kl_coef=1.0)
        obj(logps, torch.zeros(1, 1)).loss.backward()
        assert logits.grad is not None
        gradient += old[token].exp() * logits.grad
    return gradient


def kl_gradient(first: str) -> Tensor:
    """Gradient of KL(pi||ref) or KL(ref||pi) with respect to pi's logits."""
    logits = LOGITS.clone().requires_grad_()
    policy, reference = logits.log_softmax(0), REFERENCE.log_softmax(0)
    left, right = (policy, reference) if first == "policy" else (reference, policy)
    (left.exp() * (left - right)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("bypass", [False, True])
def test_unbiased_kl_has_the_gradient_of_kl_from_off_policy_samples(bypass):
    assert_close(expected_gradient("unbiased", OLD, bypass=bypass), kl_gradient("policy"))


def test_the_weight_must_carry_gradient():
    """Detached, the same estimate would follow KL(ref||pi): the two gradients are far apart here."""
    assert (kl_gradient("policy") - kl_gradient("reference")).norm() > 0.3 * kl_gradient("policy").norm()
    assert_close(expected_gradient("k3", LOGITS), kl_gradient("reference"))


def test_k2_follows_kl_on_policy_and_k1_nothing():
    assert_close(expected_gradient("k2", LOGITS), kl_gradient("policy"))
    assert_close(expected_gradient("k1", LOGITS), torch.zeros_like(LOGITS))


@pytest.mark.parametrize(
    ("kind", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065306597), ("unbiased", 0.2130613194)]
)
def test_values_of_one_token(kind, value):
    current, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    proximal = current - torch.log(torch.tensor(2.0))  # ratio 2
    logps = PolicyLogps(current, None, mask, proximal, reference=current - 0.5)
    obj = objective("grpo", kl=kind, kl_coef=0.25)
    out = obj(logps, torch.zeros(1, 1))
    assert out.loss.item() == pytest.approx(0.25 * value)
    assert out.metrics.finalize()["kl/mean"] == pytest.approx(value)


def test_entropy_bonus_is_subtracted():
    current = torch.tensor([[-1.0, -1.0]])
    entropy = torch.tensor([[2.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    obj = objective("grpo", entropy_coef=0.1)
    out = obj(PolicyLogps(current, None, mask, current, entropy=entropy), torch.zeros(1, 1))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.2)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [[pytest.approx(-0.1), 0.0]]


def test_coefficients_that_reward_the_wrong_thing_are_refused():
    with pytest.raises(TrimtabError, match="leaving the reference"):
        KL("k3", -0.1)
    with pytest.raises(TrimtabError, match="did you mean 'unbiased'"):
        KL("unbiasd", 0.1)
    with pytest.raises(TrimtabError, match="reward certainty"):
        objective("grpo", entropy_coef=-1.0)
