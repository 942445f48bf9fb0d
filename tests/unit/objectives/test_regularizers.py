"""KL estimates on a tabular softmax, by enumerating the vocabulary."""

from __future__ import annotations

import pytest
import torch
from tests.support.named_cases import in_one_test
from torch import Tensor
from torch.testing import assert_close

from trimtab.errors import TrimtabError
from trimtab.objectives import KL, PolicyLogps, objective, objectives

LOGITS, REFERENCE, OLD, SAMPLER = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def expected_gradient(kind: str, sampler: Tensor, name: str = "grpo", proximal: Tensor = OLD) -> Tensor:
    """Gradient of E_sampler[KL term] with respect to the logits, every token of the vocabulary weighed by its chance.

    Each token is a row of one that is the whole update. What the loss has beside its KL term is taken away.
    """
    gradient = torch.zeros_like(LOGITS)
    row = {} if name == "oapl" else {"aggregation": "token-mean"}
    for coefficient in (1.0, 0.0):
        obj = objective(name, kl=kind, kl_coef=coefficient, **row)
        for token in range(7):
            logits = LOGITS.clone().requires_grad_()
            current, behavior, before, reference = (
                policy.log_softmax(0)[token].view(1, 1) for policy in (logits, sampler, proximal, REFERENCE)
            )
            mask = torch.ones(1, 1, dtype=torch.bool)
            one = mask.long()
            logps = PolicyLogps(
                current,
                behavior,
                mask,
                before,
                reference,
                off_policy=~mask,
                turn=one,
                age=one,
                head_current=current[..., None],
                head_behavior=behavior[..., None],
            )
            obj(logps, torch.zeros(1, 1)).loss.backward()
            assert logits.grad is not None
            gradient += (2 * coefficient - 1) * behavior.exp().item() * logits.grad
    return gradient


def kl_gradient(first: str) -> Tensor:
    """Gradient of KL(pi||ref) or KL(ref||pi) with respect to pi's logits."""
    logits = LOGITS.clone().requires_grad_()
    policy, reference = logits.log_softmax(0), REFERENCE.log_softmax(0)
    left, right = (policy, reference) if first == "policy" else (reference, policy)
    (left.exp() * (left - right)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.usefixtures("shapes_unchecked")
@in_one_test("name", objectives())
def test_unbiased_kl_has_the_gradient_of_kl_from_samples_of_a_third_policy(name):
    """Sampler, proximal and current policy all differ: the weight must be current over the sampler."""
    result, expected = expected_gradient("unbiased", SAMPLER, name), kl_gradient("policy")
    assert_close(result, expected, rtol=1e-12, atol=1e-14)


def test_the_third_policy_differs_enough_to_detect_a_wrong_weight():
    unweighted, expected = expected_gradient("k3", SAMPLER), kl_gradient("policy")
    assert (unweighted - expected).norm() > 0.3 * expected.norm()


def test_the_weight_must_carry_gradient():
    """Detached, the same estimate would follow KL(ref||pi): the two gradients are far apart here."""
    assert (kl_gradient("policy") - kl_gradient("reference")).norm() > 0.3 * kl_gradient("policy").norm()
    assert_close(expected_gradient("k3", LOGITS), kl_gradient("reference"))


def test_k2_follows_kl_on_policy_and_k1_nothing():
    assert_close(expected_gradient("k2", LOGITS), kl_gradient("policy"))
    assert_close(expected_gradient("k1", LOGITS), torch.zeros_like(LOGITS))


def test_coefficients_that_reward_the_wrong_thing_are_refused():
    with pytest.raises(TrimtabError, match="coef = -0"):
        KL("k3", -0.1)
    with pytest.raises(TrimtabError, match="did you mean 'unbiased'"):
        KL("unbiasd", 0.1)
    with pytest.raises(TrimtabError, match="entropy_coef = -1"):
        objective("grpo", entropy_coef=-1.0)


def test_unbiased_kl_of_a_trained_token_that_the_sampler_did_not_score_is_nan() -> None:
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    logps = PolicyLogps(one, one + float("nan"), mask, one, one)
    assert objective("grpo", kl="unbiased", kl_coef=1.0)(logps, one).loss.isnan()
    assert objective("grpo", kl_coef=1.0)(logps, one).loss.isfinite()
