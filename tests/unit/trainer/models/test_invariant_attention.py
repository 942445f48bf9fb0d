"""Invariant attention on a CPU: a product has the same bits whatever other rows it has."""

from __future__ import annotations

import pytest
import torch

from trimtab.trainer.models.invariant.invariant_attention import (
    KEY_BLOCK,
    accumulate,
    attention_scores,
    exponentials_,
    largest,
    query_rows,
)


@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
def test_rows_of_queries_do_not_depend_on_how_many_there_are(width: int) -> None:
    """With 4 rows the scores of heads of 128 channels were others than with 64."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(3, 96, width),
        torch.randn(3, 2 * KEY_BLOCK, width),
        torch.randn(3, 2 * KEY_BLOCK, width),
    )
    whole = attention_scores(query, key, 0.5)
    sums, out = accumulate(whole.exp(), value)
    for count in range(query_rows(width), 96, query_rows(width)):
        some = attention_scores(query[:, :count], key, 0.5)
        assert torch.equal(some, whole[:, :count])
        part = accumulate(some.exp(), value)
        assert torch.equal(part[0], sums[:, :count])
        assert torch.equal(part[1], out[:, :count])
        # Keys that come later change nothing of those before.
        assert torch.equal(attention_scores(query[:, :count], key[:, :KEY_BLOCK], 0.5), whole[:, :count, :KEY_BLOCK])


def test_hidden_keys_get_exactly_0_however_large_their_scores_are() -> None:
    scores, shown = torch.tensor([[0.5, 1e4, -1.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    peak = largest(scores, shown)
    assert peak.tolist() == [[0.5]]
    assert torch.equal(exponentials_(scores, peak, shown), torch.tensor([[0.0, -torch.inf, -1.5]]).exp())
