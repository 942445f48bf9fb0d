"""Weights and rejection rules against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trimtab.corrections import OPSM, Band, Divergence, PrefixBudget, Veto, Weight, compute_correction
from trimtab.corrections.correction import BatchCorrection
from trimtab.objectives import PolicyLogps


def row(*ratios: float) -> tuple[Tensor, Tensor, Tensor]:
    """proximal, behavior and mask of one sequence with these token ratios."""
    log = torch.tensor([ratios], dtype=torch.float64).log()
    behavior = torch.full_like(log, -2.0)
    return behavior + log, behavior, torch.ones_like(log, dtype=torch.bool)


def corrected(
    proximal: Tensor | None, behavior: Tensor, mask: Tensor, *, current=None, sequence_ids=None, advantage=None, **parts
) -> BatchCorrection:
    logps = PolicyLogps(current, behavior, mask, proximal=proximal, sequence_ids=sequence_ids)
    return compute_correction(logps, advantage, **parts)


def weights(weight: Weight, *ratios: float) -> list[float]:
    results = corrected(*row(*ratios), weight=weight).weight
    return [round(value, 12) for value in results[0].tolist()]


def kept(rule, *ratios: float, **fields) -> list[bool]:
    return corrected(*row(*ratios), masks=[rule], **fields).keep[0].tolist()


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (Weight("token", "truncate", max=2.0), [0.1, 0.6, 1.5, 2.0]),
        (Weight("token", "clip", 0.5, 2.0), [0.5, 0.6, 1.5, 2.0]),
        (Weight("token", "mask", 0.5, 2.0), [0.0, 0.6, 1.5, 0.0]),
    ],
)
def test_bounds_of_token_weights(weight: Weight, expected: list[float]):
    assert weights(weight, 0.1, 0.6, 1.5, 3.0) == expected
    kept = corrected(*row(0.1, 0.6, 1.5, 3.0), weight=weight).keep
    assert kept.tolist() == [[value > 0 for value in expected]], "what a mask makes 0 counts as rejected"


def test_sequence_weight_is_the_product_and_geometric_its_root():
    assert weights(Weight("sequence", "truncate", max=10.0), 2.0, 1.5, 0.5) == [1.5] * 3
    assert weights(Weight("geometric", "truncate", max=10.0), 4.0, 1.0) == [2.0] * 2
    assert weights(Weight("sequence", "mask", 0.0, 1.4), 2.0, 1.5, 0.5) == [0.0] * 3


def test_a_weight_over_the_current_policy_reads_no_proximal_one_and_has_no_gradient():
    current, behavior, mask = row(0.5, 1.5, 3.0)
    weight = Weight("token", "truncate", max=2.0, over="current")
    found = corrected(None, behavior, mask, weight=weight, current=current.requires_grad_()).weight
    assert found[0].tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert not found.requires_grad
    assert (weight.equation(), weight.definition()) == ("sg[min(w_t, 2)]", "w_t = π(y_t)/μ(y_t)")
    with pytest.raises(ValueError, match="Weight needs current, which is None"):
        corrected(behavior, behavior, mask, weight=weight)
    with pytest.raises(ValueError, match="Weight needs proximal, which is None"):
        corrected(None, behavior, mask, weight=Weight(), current=current)


def test_bounds_are_on_the_ratio_and_not_on_its_inverse():
    for ratio, expected in ((0.9995, True), (1.0005, True), (0.995, True), (1.005, False), (0.985, False)):
        for level in ("token", "sequence", "geometric"):
            assert kept(Band(level, 0.99, 1.001), ratio) == [expected], (ratio, level)
        weight = weights(Weight("token", "mask", 0.99, 1.001), ratio)
        assert (weight[0] > 0) == expected


def test_a_token_band_drops_tokens_and_a_sequence_band_everything():
    assert kept(Band("token", 0.5, 2.0), 1.0, 3.0, 0.4) == [True, False, False]
    assert kept(Band("token", 1.0, 2.0), 1.0) == kept(Band("token", 0.5, 1.0), 1.0) == [True]  # bounds are inside
    assert kept(Band("sequence", 0.5, 2.0), 1.0, 3.0, 0.4) == [True] * 3  # product 1.2
    assert kept(Band("sequence", 0.5, 2.0), 3.0, 1.0) == [False] * 2
    assert kept(Band("geometric", 0.5, 2.0), 3.0, 1.0) == [True] * 2  # sqrt 3


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("k1", [-math.log(2), math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2] * 2),
        ("k3", [1 - math.log(2), math.log(2) - 0.5]),
        ("tv", [1.0, 0.5]),
    ],
)
def test_divergence_rules_at_their_threshold(kind, value):
    ratios, above, below = (2.0, 0.5), 1 + 1e-9, 1 - 1e-9
    for reduce, total in (("mean", sum(value) / 2), ("sum", sum(value)), ("max", max(value))):
        if total <= 1e-12:
            assert kept(Divergence(kind, reduce, 1e-9), *ratios) == [True] * 2
            continue
        assert kept(Divergence(kind, reduce, total * above), *ratios) == [True] * 2, reduce
        assert kept(Divergence(kind, reduce, total * below), *ratios) == [False] * 2, reduce
    threshold = max(value) * below
    assert kept(Divergence(kind, "token", threshold), *ratios) == [v <= threshold for v in value]


def test_veto_drops_the_sequence_of_one_impossible_token_unless_it_is_masked():
    proximal, behavior, mask = (torch.cat([tensor, tensor]) for tensor in row(1.0, 1e-5, 1.0))
    assert corrected(proximal, behavior, mask, masks=[Veto(1e-4)]).keep.tolist() == [[False] * 3] * 2
    mask[0, 1] = False
    assert corrected(proximal, behavior, mask, masks=[Veto(1e-4)]).keep.tolist() == [
        [True, False, True],
        [False] * 3,
    ]
    assert kept(Veto(1e-6), 1.0, 1e-5, 1.0) == [True] * 3


def test_opsm_needs_both_a_bad_advantage_and_distance_from_the_sampler():
    log = torch.tensor([[-0.08, -0.04]]).expand(4, 2)  # mean(log mu - log pi) = 0.06
    behavior = torch.full((4, 2), -1.0)
    mask = torch.ones(4, 2, dtype=torch.bool)
    advantage = torch.tensor([[-1.0], [0.0], [1.0], [-1e-9]])
    for delta, expected in ((0.05, [False, True, True, False]), (0.07, [True] * 4)):
        # The proximal policy plays no part: here it equals the sampler.
        results = corrected(behavior, behavior, mask, masks=[OPSM(delta)], current=behavior + log, advantage=advantage)
        assert results.keep[:, 0].tolist() == expected
        assert results.keep[:, 1].tolist() == expected
    upward = corrected(behavior, behavior, mask, masks=[OPSM(0.05)], current=behavior - log, advantage=advantage)
    assert upward.keep.all(), "a sequence that became more likely is kept"


@pytest.mark.parametrize(
    ("sign", "kept_rows", "condition"),
    [
        ("negative", [False, True, True], "not (A < 0 and"),
        ("positive", [True, True, False], "not (A > 0 and"),
        ("both", [False, True, False], "not (A ≠ 0 and"),
    ],
)
def test_opsm_of_the_other_sign_is_its_control(sign: str, kept_rows: list[bool], condition: str):
    """Rows that drifted by 0.06 nats with advantages -1, 0 and 1; the same three without drift are kept."""
    behavior, drift = torch.full((6, 2), -1.0), torch.tensor([[0.06]] * 3 + [[0.0]] * 3)
    mask, advantage = torch.ones(6, 2, dtype=torch.bool), torch.tensor([[-1.0], [0.0], [1.0]] * 2)
    rule = OPSM(0.05, sign)
    result = corrected(behavior, behavior, mask, masks=[rule], current=behavior - drift, advantage=advantage)
    assert result.keep[:, 0].tolist() == kept_rows + [True] * 3
    assert condition in rule.equation()


def test_opsm_refuses_per_token_advantages():
    with pytest.raises(ValueError, match=r"\(batch, 1\)"):
        kept(OPSM(0.1), 1.0, 1.0, current=torch.zeros(1, 2), advantage=torch.zeros(1, 2))
    for arguments, missing in (({}, "advantage"), ({"advantage": torch.zeros(1, 1)}, "current")):
        with pytest.raises(ValueError, match=f"OPSM needs {missing}, which is None"):
            kept(OPSM(0.1), 1.0, 1.0, **arguments)


def test_rules_are_anded_and_each_counts_from_the_original_mask():
    rules = [Band("token", 0.5, 2.0), Divergence("k2", "token", 0.1), Band("token", 0.9, 1.1)]
    results = corrected(*row(1.0, 3.0, 0.4, 1.2), masks=rules)
    assert results.keep.tolist() == [[True, False, False, False]]
    shares = {name: float(part.summary()[""]) for name, part in results.statistics.items()}
    assert shares == {
        "reject/band_token": 0.5,
        "reject/band_token/sequences": 0.0,
        "reject/k2_token": 0.5,
        "reject/k2_token/sequences": 0.0,
        "reject/band_token_2": 0.75,
        "reject/band_token_2/sequences": 0.0,
        "reject/tokens": 0.75,
        "reject/sequences": 0.0,
    }


def test_a_veto_bounds_the_ratio_or_the_probability():
    """A token that both policies find improbable: the ratio is 1/2, its probability under the trainer 5e-5."""
    behavior = torch.tensor([[1e-4, 0.9]]).log()
    proximal = torch.tensor([[5e-5, 0.9]]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for veto, expected in (
        (Veto(1e-4), True),
        (Veto(1e-4, of="probability"), False),
        (Veto(4e-5, of="probability"), True),
    ):
        assert corrected(proximal, behavior, mask, masks=[veto]).keep.all() == expected
    current = corrected(None, behavior, mask, masks=[Veto(1e-4, "probability", "current")], current=proximal)
    assert not current.keep.any()


def test_beyond_the_mean_total_variation_only_tokens_that_lead_back_are_kept():
    """VACO (arXiv 2603.01365): the mean of |ρ - 1| decides for the sequence, A · (π_old - μ) for a token of it."""
    rule = Divergence("tv", "mean", 2.0, outward=True)

    def decided(advantage: float, *ratios: float) -> list[bool]:
        return kept(rule, *ratios, advantage=torch.tensor([[advantage]], dtype=torch.float64))

    assert decided(1.0, 0.25, 1.0, 4.0) == [True] * 3  # mean 1.25
    assert decided(1.0, 4.0, 4.0, 4.0) == [False] * 3  # mean 3
    assert decided(1.0, 0.1, 8.0, 1.0, 8.0) == [True, False, True, False]  # mean 3.7
    assert decided(-1.0, 0.1, 8.0, 1.0, 8.0) == [False, True, True, True]
    assert decided(0.0, 4.0, 4.0) == [True] * 2
    assert rule.equation() == "mean_t tv(π_old/μ) ≤ 2 or A·(π_old − μ) ≤ 0"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Weight("token", "truncate", max=0.2),
        lambda: Weight("token", "clip", min=1.2, max=2.0),
        lambda: Weight("token", "truncate", min=0.5),
        lambda: Weight("word"),
        lambda: Weight("token", "cut"),
        lambda: Weight(over="reference"),
        lambda: Band("geometric", -0.01, 0.01),
        lambda: Band("row", 0.5, 2.0),
        lambda: Band("token", float("nan"), 2.0),
        lambda: Divergence("k4", "mean", 0.1),
        lambda: Divergence("k3", "median", 0.1),
        lambda: Veto(2.0),
        lambda: Veto(1e-4, of="odds"),
        lambda: Band("token", 0.5, 2.0, "reference"),
        lambda: PrefixBudget(quantile=1.5),
    ],
)
def test_invalid_bounds_are_refused(wrong):
    with pytest.raises(ValueError, match=r".+"):
        wrong()


def test_self_normalisation_divides_by_the_mean_over_the_original_mask():
    weight = Weight("token", "mask", 0.5, 2.0, normalize=True)
    bounded = torch.tensor([0.0, 1.0, 2.0])
    expected = bounded / 0.75  # masked zeros count: (0 + 1 + 2) / 4
    assert_close(weight.normalized(bounded, torch.tensor(3.0), torch.tensor(4.0)), expected)
    assert_close(weight.normalized(bounded, torch.tensor(0.0), torch.tensor(4.0)), bounded)


def budget_by_hand(rule: PrefixBudget, log_pi: list[float], log_mu: list[float], advantage: float) -> list[bool]:
    """The rule for the trained tokens of one sequence, token after token, with numpy's quantile."""
    gaps = np.abs(np.exp(log_pi) - np.exp(log_mu))
    rate = float(np.clip(np.quantile(gaps, rule.quantile), rule.budget, 2 * rule.budget))
    earned = spent = 0.0
    kept = []
    for place, gap in enumerate(gaps):
        weight = 1 - (1 - rule.weight_min) * place / max(len(gaps) - 1, 1)
        away = advantage * (log_pi[place] - log_mu[place]) > 0
        kept.append(not away or weight * gap <= min(rule.max, rule.max + rate * earned - spent))
        earned, spent = earned + weight, spent + weight * gap
    return kept


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("quantile", [0.0, 0.37, 0.9, 1.0])
def test_prefix_budget_of_ragged_rows_and_of_packed_sequences(seed: int, quantile: float) -> None:
    """Rows with holes, an empty one and one of a single token; packed, they are mixed in order and share rows."""
    rule = PrefixBudget(max=0.1, budget=0.03, quantile=quantile)
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 20, generator=random) < 0.7
    mask[3], mask[4] = False, torch.arange(20) == 7
    behavior = -torch.rand(6, 20, generator=random, dtype=torch.float64) * 2 - 0.05
    current = behavior + 0.3 * torch.randn(6, 20, generator=random, dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 0.5, 1.0, 1.0, -0.5], dtype=torch.float64)[:, None]
    expected = torch.zeros_like(mask)
    for row in range(6):
        where = mask[row]
        if where.any():
            values = (current[row][where].tolist(), behavior[row][where].tolist(), advantage[row].item())
            expected[row, where] = torch.tensor(budget_by_hand(rule, *values))
    given = {"weight": None, "masks": [rule]}
    rows = corrected(None, behavior, mask, current=current, advantage=advantage, **given)
    assert torch.equal(rows.keep, expected)
    assert 0 < int(expected.sum()) < int(mask.sum())
    # Column by column the tokens of all sequences alternate; every sequence keeps its own order.
    ids = torch.arange(6)[:, None].expand(6, 20)
    mixed = [value.expand(6, 20).T.reshape(4, 30) for value in (behavior, mask, current, advantage, ids)]
    packed = corrected(
        None, *mixed[:2], current=mixed[2], advantage=mixed[3], sequence_ids=mixed[4].contiguous(), **given
    )
    assert torch.equal(packed.keep.reshape(20, 6).T, expected)
