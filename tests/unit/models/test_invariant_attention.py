"""Invariant attention on a CPU: a product has the same bits whatever other rows it has."""

from __future__ import annotations

import pytest
import torch

from trimtab.models.invariant import invariant_attention
from trimtab.models.invariant.invariant_attention import (
    KEY_BLOCK,
    accumulate,
    attention_dtype,
    attention_scores,
    exponentials_,
    largest,
    query_rows,
)


@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_rows_of_queries_do_not_depend_on_how_many_there_are(width: int, values: torch.dtype) -> None:
    """In float32 with 4 rows the scores of heads of 128 channels were others than with 64."""
    torch.manual_seed(0)
    dtype = attention_dtype(torch.empty(0, dtype=values), width)
    query, key, value = (torch.randn(3, n, width).to(dtype) for n in (96, 2 * KEY_BLOCK, 2 * KEY_BLOCK))
    whole = attention_scores(query, key, 0.5)
    assert whole.dtype == torch.float32
    sums, out = accumulate(whole.exp(), value)
    least = query_rows(width, dtype)
    for count in range(least, 96, least):
        some = attention_scores(query[:, :count], key, 0.5)
        assert torch.equal(some, whole[:, :count])
        part = accumulate(some.exp(), value)
        assert torch.equal(part[0], sums[:, :count])
        assert torch.equal(part[1], out[:, :count])
        # Keys that come later change nothing of those before.
        assert torch.equal(attention_scores(query[:, :count], key[:, :KEY_BLOCK], 0.5), whole[:, :count, :KEY_BLOCK])


def test_products_are_in_bfloat16_only_where_the_number_of_rows_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.empty(0, dtype=torch.bfloat16)
    assert attention_dtype(values.float(), 64) == torch.float32
    assert attention_dtype(values.double(), 64) == torch.float64
    if attention_dtype(values, 64) == torch.float32:
        pytest.skip("this processor has no bfloat16 instructions, or products whose rows depend on each other")
    # A product of one row of 64 channels runs another kernel, which adds in another order.
    monkeypatch.setattr(invariant_attention, "query_rows", lambda width, dtype: 1)  # noqa: ARG005
    invariant_attention._bfloat16_shares_bits.cache_clear()
    try:
        assert attention_dtype(values, 64) == torch.float32
    finally:
        invariant_attention._bfloat16_shares_bits.cache_clear()


def test_hidden_keys_get_exactly_0_however_large_their_scores_are() -> None:
    scores, shown = torch.tensor([[0.5, 1e4, -1.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    peak = largest(scores, shown)
    assert peak.tolist() == [[0.5]]
    assert torch.equal(exponentials_(scores, peak, shown), torch.tensor([[0.0, -torch.inf, -1.5]]).exp())
