"""Which rank computes which micro-batch, and sums over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trajectories import trajectory

from trimtab.corrections.statistics import Count, Mean, Mergeable
from trimtab.objectives import PolicyLogps, objective, objectives
from trimtab.objectives.state import Metrics
from trimtab.trainer.batching import assign_micro_batches, empty_micro_batch, to_tensors
from trimtab.trainer.step_statistics import without_counts

SIZES = st.lists(st.integers(1, 5000), max_size=40)


@given(SIZES, st.integers(1, 9))
def test_every_micro_batch_is_dealt_once_and_all_ranks_do_as_many_rounds(sizes: list[int], ranks: int) -> None:
    shares = assign_micro_batches(sizes, ranks)
    assert len(shares) == ranks
    assert {len(share) for share in shares} == {-(-len(sizes) // ranks)}
    dealt = [position for share in shares for position in share if position is not None]
    assert sorted(dealt) == list(range(len(sizes)))


@given(SIZES, st.integers(2, 9))
def test_no_rank_has_more_than_another_by_more_than_the_largest_micro_batch(sizes: list[int], ranks: int) -> None:
    totals = [
        sum(sizes[position] for position in share if position is not None)
        for share in assign_micro_batches(sizes, ranks)
    ]
    assert max(totals) - min(totals) <= max(sizes, default=0)


def test_one_rank_keeps_the_order() -> None:
    assert assign_micro_batches([5, 1, 9], 1) == [[0, 1, 2]]


def test_rounds_hold_micro_batches_of_similar_size() -> None:
    # 90 and 80 wait for each other, then 20 and 10; the rank with 90 gets 10. In the last round one rank is idle.
    assert assign_micro_batches([10, 90, 20, 80, 5], 2) == [[1, 0, 4], [3, 2, None]]


@pytest.mark.parametrize("name", objectives())
def test_an_empty_micro_batch_adds_nothing(name: str) -> None:
    """Its state, its loss and its statistics change nothing about those of a real one."""
    built = objective(name)
    rows = [trajectory(0, [1, 2, 3], logp=-0.5), trajectory(0, [2, 1], logp=-1.5)]
    real = to_tensors(rows, [0, 1], 0, torch.device("cpu"))
    real = real.with_scores(advantage=torch.tensor([[1.0], [-1.0]]))
    empty = empty_micro_batch(real)

    def logps(micro):
        current = micro.behavior * 0.9
        head = current[..., None] if built.centering else None
        return PolicyLogps(
            current=current,
            behavior=micro.behavior,
            mask=micro.mask,
            proximal=current,
            reference=None,
            entropy=None,
            off_policy=micro.off_policy if "off_policy" in built.needs else None,
            turn=micro.turn,
            age=micro.age,
            head_current=head,
            head_behavior=head,
        )

    alone = built.prepare(logps(real), real.advantage)
    state = alone + built.prepare(logps(empty), empty.advantage)
    for key, value in alone.tensors().items():
        torch.testing.assert_close(state.tensors()[key], value)
    one = built(logps(real), real.advantage, state=state)
    other = built(logps(empty), empty.advantage, state=state)
    assert float(other.loss) == 0.0
    both = (one.metrics + without_counts(other.metrics)).finalize()
    assert both.keys() == one.metrics.finalize().keys()
    for key, value in one.metrics.finalize().items():
        assert both[key] == pytest.approx(value, nan_ok=True), key


def test_neutral_keeps_no_count() -> None:
    one = torch.ones((), dtype=torch.float64)
    parts: dict[str, Mergeable] = {"a": Count(one), "b": Mean(3 * one, 2 * one)}
    assert Metrics(parts).finalize() == {"a": 1.0, "b": 1.5}
    whole = Metrics(parts) + without_counts(Metrics({"a": Count(one), "b": Mean(9 * one, one)}))
    assert whole.finalize() == {"a": 1.0, "b": 1.5}
