"""Sequences: rows, packed rows, and values that must not leak."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from trimtab.corrections import LOG_RATIO_BOUND, Sequences, finite_rows, log_ratio, select
from trimtab.corrections.ratios import at_level, beyond_bound, bounded

MASK = torch.tensor([[True, True, False], [False, True, True]])
VALUES = torch.tensor([[1.0, 2.0, 0.0], [0.0, 4.0, 8.0]])


def test_a_row_is_a_sequence_by_default():
    rows = Sequences(MASK)
    assert rows.sum(VALUES).tolist() == [[3.0], [12.0]]
    assert rows.mean(VALUES).tolist() == [[1.5], [6.0]]
    assert rows.max(VALUES).tolist() == [[2.0], [8.0]]
    assert rows.lengths.tolist() == [[2.0], [2.0]]


def test_ids_join_tokens_across_rows_and_leave_padding_out():
    ids = torch.tensor([[3, 0, -1], [-1, 3, 0]])
    packed = Sequences(MASK, ids)
    assert packed.sum(VALUES)[[0, 3], 0].tolist() == [10.0, 5.0]
    assert packed.lengths[:, 0].tolist() == [2.0, 0, 0, 2.0, 0, 0]
    assert packed.present[:, 0].tolist() == [True, False, False, True, False, False]
    assert packed.spread(packed.sum(VALUES)).tolist() == [[5.0, 10.0, 0.0], [0.0, 5.0, 10.0]]


def test_a_sequence_without_trained_tokens_still_counts():
    ids = torch.tensor([[0, 0, 1], [1, 0, 0]])
    packed = Sequences(MASK, ids)
    assert (packed.present.sum(), packed.trained.sum()) == (2, 1)
    rows = Sequences(torch.tensor([[True], [False]]))
    assert (rows.present.sum(), rows.trained.sum()) == (2, 1)


def test_a_trained_token_without_a_sequence_is_refused():
    with pytest.raises((RuntimeError, IndexError)):
        Sequences(MASK, torch.tensor([[0, -1, -1], [-1, 1, 1]])).sum(VALUES)


def test_selection_keeps_nan_and_inf_out_of_values_and_gradients():
    x = torch.tensor([[1.0, float("nan"), float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    select(x, mask).exp().sum().backward()
    assert_close(x.grad, torch.tensor([[torch.e, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_selection_without_a_gradient_has_the_bits_of_where(dtype: torch.dtype):
    special = torch.tensor([[float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1.5]])
    values = torch.cat([special, special]).to(dtype)
    mask = torch.tensor([[True] * 8, [False] * 8])
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    for chosen, given in ((select(values, mask), values), (select(values.T, mask.T).T, values)):
        wide = given if dtype == torch.float64 else given.float()
        assert torch.equal(chosen.view(bits), torch.where(mask, wide, 0.0).view(bits))


def test_finite_rows_reads_trained_positions_only():
    bad = torch.tensor([[0.0, float("nan"), 0.0], [float("inf"), 0.0, 0.0]])
    assert finite_rows(MASK, bad).tolist() == [[False], [True]]
    assert finite_rows(MASK, VALUES, None, bad).tolist() == [[False], [True]]
    assert finite_rows(MASK, None).tolist() == [[True], [True]]


def test_levels_share_the_value_and_keep_each_tokens_gradient():
    x = torch.tensor([[0.1, 0.3, 9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    token = log_ratio(x, torch.zeros_like(x), mask)
    for level, value in (("token", [0.1, 0.3]), ("sequence", [0.4, 0.4]), ("geometric", [0.2, 0.2])):
        result = select(at_level(token, Sequences(mask), level), mask)
        assert_close(result[0, :2].detach(), torch.tensor(value, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(result @ torch.tensor([1.0, 2.0, 4.0]).double(), x, retain_graph=True)
        assert gradient.tolist() == [[1.0, 2.0, 0.0]]


def test_log_ratios_are_float32_at_least():
    low = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    assert log_ratio(low, low, torch.tensor([[True]])).dtype == torch.float32
    assert log_ratio(low.double(), low, torch.tensor([[True]])).dtype == torch.float64


def test_the_safety_bound_stops_the_gradient_and_is_counted():
    x = torch.tensor([LOG_RATIO_BOUND - 1, LOG_RATIO_BOUND + 1, -1e4], requires_grad=True)
    bounded(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0]
    assert beyond_bound(x).tolist() == [False, True, True]


def test_a_sampler_log_prob_that_no_sampled_token_has_is_not_finite():
    behavior = torch.tensor([[-1.0, -100.0], [-9999.0, -1.0], [-torch.inf, -1.0]])
    mask = torch.ones_like(behavior, dtype=torch.bool)
    assert finite_rows(mask, behavior=behavior).tolist() == [[True], [False], [False]]
    mask[1:, 0] = False
    assert finite_rows(mask, behavior=behavior).all()
