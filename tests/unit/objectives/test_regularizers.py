"""KL estimates and score centering, by hand and on a tabular softmax, by enumerating the vocabulary."""

from __future__ import annotations

import pytest
import torch
from tests.support.named_cases import in_one_test
from torch import Tensor
from torch.testing import assert_close

from trimtab.corrections import Band, Weight
from trimtab.errors import TrimtabError
from trimtab.objectives import (
    KL,
    Clipped,
    LogProb,
    Objective,
    PolicyLogps,
    Ratio,
    Reinforce,
    Unclipped,
    objective,
    objectives,
)
from trimtab.objectives.regularizers import Centering

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
            gradient += (2 * coefficient - 1) * behavior.exp().item() * logits.grad
    return gradient


def kl_gradient(first: str) -> Tensor:
    """Gradient of KL(pi||ref) or KL(ref||pi) with respect to pi's logits."""
    logits = LOGITS.clone().requires_grad_()
    policy, reference = logits.log_softmax(0), REFERENCE.log_softmax(0)
    left, right = (policy, reference) if first == "policy" else (reference, policy)
    (left.exp() * (left - right)).sum().backward()
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


P, Q = torch.tensor([[0.40, 0.40, 0.15, 0.05], [0.50, 0.30, 0.15, 0.05]], dtype=torch.float64)
ON_SAMPLER = Ratio("token", "behavior")


def of(ceiling: float | None) -> Objective:
    """Score centering with the weight min(r, ceiling), or without a ratio."""
    if ceiling is None:
        return Objective("mine", Ratio(), LogProb(), centering=True)
    return Objective("mine", ON_SAMPLER, Reinforce(ceiling), centering=True)


def gradient(obj: Objective, logits: Tensor, sampler: Tensor, token: int, head: int, advantage: float = 1.0) -> Tensor:
    """Loss and gradient by the logits of one sampled token, with the sampler's `head` most probable ids."""
    leaf = logits.clone().requires_grad_()
    policy, ids = leaf.log_softmax(0), sampler.topk(head).indices
    shape = (1, 1)
    logps = PolicyLogps(
        policy[token].view(shape),
        sampler[token].view(shape),
        torch.ones(shape, dtype=torch.bool),
        policy[token].detach().view(shape),
        head_current=policy[ids].view(1, 1, head),
        head_behavior=sampler[ids].view(1, 1, head),
    )
    out = obj(logps, torch.full(shape, advantage, dtype=torch.float64))
    out.loss.backward()
    return torch.cat([out.loss.detach().view(1), leaf.grad])


@pytest.mark.parametrize("head", [2, 4])
@pytest.mark.parametrize(
    ("ceiling", "expected"),
    [(None, (0.91629073, -0.50, 0.30, 0.15, 0.05)), (2.0, (0.73303259, -0.48, 0.32, 0.12, 0.04))],
)
def test_one_position_by_hand(ceiling, expected, head):
    result = gradient(of(ceiling), P.log(), Q.log(), token=0, head=head)
    assert result.tolist() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("ceiling", [None, 1.0, 1.2, 2.0])
def test_the_expected_gradient_of_a_constant_advantage_is_zero(ceiling):
    """Over 96 tokens and with the whole vocabulary as the head: the drift that importance weights leave is gone."""
    make = torch.Generator().manual_seed(0)
    logits = torch.randn(96, generator=make, dtype=torch.float64) * 2
    sampler = (logits + torch.randn(96, generator=make, dtype=torch.float64)).log_softmax(0)
    obj = of(ceiling)
    plain = Objective("mine", obj.ratio, obj.surrogate)
    total, uncentered = (
        sum(sampler[token].exp() * gradient(each, logits, sampler, token, 96)[1:] for token in range(96))
        for each in (obj, plain)
    )
    assert total.abs().max() < 1e-12
    assert uncentered.abs().max() > 1e-2


def test_three_positions_by_hand():
    p = torch.tensor([[[0.40, 0.40], [0.10, 0.60], [0.84, 0.10]]], dtype=torch.float64).log()
    q = torch.tensor([[[0.50, 0.30], [0.20, 0.45], [0.80, 0.12]]], dtype=torch.float64).log()
    heads = {
        None: [(0.1, -0.1), (0.08333333, -0.25), (-0.32, -0.01333333)],
        1.2: [(0, -0.04), (0, -0.06), (0, 0)],
        2.0: [(0, 0)] * 3,
    }
    for ceiling, expected in heads.items():
        leaf = p.clone().requires_grad_()
        Centering(ceiling).per_token(leaf, q).sum().backward()
        assert leaf.grad[0].tolist() == [pytest.approx(row, abs=1e-8) for row in expected]


def test_equal_policies_and_an_untruncated_head_add_nothing():
    obj, plain = of(2.0), Objective("mine", ON_SAMPLER, Reinforce(2.0))
    for p, q in ((Q, Q), (P, Q)):  # no ratio of P and Q exceeds 2
        left, right = (gradient(each, p.log(), q.log(), 0, 4) for each in (obj, plain))
        assert torch.equal(left, right)


def test_an_absent_id_and_an_untrained_position_change_nothing():
    head = torch.tensor([[[0.4, 0.4], [float("nan")] * 2]], dtype=torch.float64).log()
    mask = torch.tensor([[True, False]])
    current = torch.tensor([[-1.0, float("nan")]], dtype=torch.float64, requires_grad=True)
    logps = PolicyLogps(current, current.detach(), mask, head_current=head, head_behavior=head)
    out = objective("score-centering")(logps, torch.ones(1, 1))
    out.loss.backward()
    assert out.loss.isfinite()
    assert out.metrics.finalize()["centering/head_mass"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"ratio": Ratio(), "surrogate": Clipped()}, "weight 1 or min"),
        ({"ratio": ON_SAMPLER, "surrogate": Unclipped()}, "weight 1 or min"),
        ({"ratio": Ratio("sequence", "behavior"), "surrogate": Reinforce(2.0)}, "weight 1 or min"),
        ({"ratio": Ratio(), "surrogate": Reinforce(2.0)}, "weight 1 or min"),
        (
            {"ratio": ON_SAMPLER, "surrogate": Reinforce(2.0), "masks": (Band("token", 0.5, 2.0),)},
            "without a weight or a",
        ),
        ({"ratio": Ratio(), "surrogate": LogProb(), "weight": Weight()}, "without a weight or a mask"),
        ({"ratio": ON_SAMPLER, "surrogate": Reinforce(float("inf"))}, "no effect on exact weights"),
    ],
)
def test_a_score_of_another_weight_is_refused(parts, line):
    with pytest.raises(TrimtabError, match=line):
        Objective("mine", **parts, centering=True)


def test_a_recipe_centers_both_kinds_of_scores():
    assert objective("reinforce", centering=True).equation().count("C = Σ_v sg[μ(v) − α π(v)]") == 1
    assert objective("score-centering", ceiling=3.0).equation().count("C = Σ_v sg[min(π(v), 3 μ(v))") == 1
    ratio = {"level": "token", "over": "behavior"}
    with pytest.raises(TrimtabError, match="ceiling has no effect beside"):
        objective("score-centering", ceiling=3.0, surrogate={"kind": "reinforce"}, ratio=ratio)


@pytest.mark.usefixtures("shapes_unchecked")
def test_heads_of_different_ids_are_refused():
    one, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="both must hold the same ids"):
        PolicyLogps(one, one, mask, head_current=torch.zeros(1, 1, 3), head_behavior=torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match="score-centering needs head_behavior"):
        objective("score-centering")(PolicyLogps(one, one, mask, head_current=torch.zeros(1, 1, 3)), one)
