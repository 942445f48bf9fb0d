"""Trajectories as tensors, and which rank computes which micro-batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trajectories import multi_turn, trajectory

from trimtab.corrections.statistics import Count, Mean, Mergeable
from trimtab.objectives import PolicyLogps, objective, objectives
from trimtab.objectives.state import Metrics
from trimtab.trainer.features.sampler_data import SamplingMask
from trimtab.trainer.packing import (
    assign_micro_batches,
    empty_micro_batch,
    micro_batches,
    split_minibatches,
    to_tensors,
)
from trimtab.trainer.step_statistics import without_counts
from trimtab.types import EXTERNAL_VERSION

CPU = torch.device("cpu")


def test_prompts_are_padded_left_and_appear_once() -> None:
    rows = [
        trajectory(7, [5, 6], prompt=[1, 2, 3]),
        trajectory(7, [5], prompt=[1, 2, 3]),
        trajectory(9, [8, 8, 8], prompt=[4]),
    ]
    micro = to_tensors(rows, (0, 1, 2), pad_id=0, device=CPU)
    assert micro.tokens.prompt_ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert micro.tokens.prompt_index.tolist() == [0, 0, 1]
    assert micro.tokens.response_ids.tolist() == [[5, 6, 0], [5, 0, 0], [8, 8, 8]]
    assert micro.mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert micro.behavior.tolist() == [[-1, -1, 0], [-1, 0, 0], [-1, -1, -1]]
    assert not SamplingMask().pack(micro, rows).extras


def test_ages_count_steps_and_round_up() -> None:
    """Four updates a step, now at version 12: tokens of 12, 11, 8, 7, of a policy to come, and of no policy."""
    row = trajectory(0, [5] * 6)
    versions = np.array([12, 11, 8, 7, 13, EXTERNAL_VERSION])
    row = replace(row, completion=replace(row.completion, policy_version=versions))
    micro = to_tensors([row, trajectory(0, [5])], (0, 1), 0, CPU, version=12, updates_per_step=4)
    assert micro.age[0].tolist() == [1, 2, 2, 3, 1, 5]
    assert micro.age[1].tolist() == [4, 1, 1, 1, 1, 1]


def test_a_prompt_may_be_computed_for_each_response() -> None:
    rows = [trajectory(7, [5, 6]), trajectory(7, [5]), trajectory(9, [8], prompt=[4])]
    micro = to_tensors(rows, (2, 0, 1), 0, CPU, share_prompts=False)
    assert micro.tokens.prompt_ids.tolist() == [[0, 4], [1, 2], [1, 2]]
    assert micro.tokens.prompt_index.tolist() == [0, 1, 2]


def test_keep_sets_travel_with_their_tokens() -> None:
    rows = [trajectory(0, [5, 6], kept=[[5, 4], [6]]), trajectory(0, [5], kept=[[5, 3]])]
    micro = SamplingMask().pack(to_tensors(rows, (0, 1), pad_id=0, device=CPU), rows)
    assert micro.extras["kept"].tolist() == [[[5, 4], [6, -1]], [[5, 3], [-1, -1]]]


def test_external_traces_are_marked_token_by_token_and_keep_their_nan() -> None:
    sampled, trace = trajectory(0, [5, 6, 7]), trajectory(0, [5, 6], logp=float("nan"))
    cut = replace(trace, off_policy=True, loss_mask=np.array([True, False]))
    micro = to_tensors([sampled, trace, cut], (2, 0), pad_id=0, device=CPU)
    assert micro.off_policy.tolist() == [[True, True, False], [False, False, False]]
    assert micro.on_policy.tolist() == [[False, False, False], [True, True, True]]
    assert micro.mask.tolist() == [[True, False, False], [True, True, True]]
    assert micro.behavior.isnan().tolist() == [[True, True, False], [False, False, False]]
    plain = to_tensors([sampled, trace, cut], (0,), pad_id=0, device=CPU)
    assert not plain.off_policy.any()
    assert torch.equal(plain.on_policy, plain.mask)


def test_observations_become_masked_zeros_with_the_number_of_their_turn() -> None:
    void = replace(multi_turn(0, "a.bc"), loss_mask=np.zeros(4, dtype=np.bool_))
    micro = to_tensors([multi_turn(0, "ab..cd.e"), void], (0, 1), pad_id=0, device=CPU)
    assert micro.mask.int().tolist() == [[1, 1, 0, 0, 1, 1, 0, 1], [0] * 8]
    assert micro.behavior.tolist() == [[-1, -1, 0, 0, -1, -1, 0, -1], [-1, 0, -1, -1, 0, 0, 0, 0]]
    assert micro.turn.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2], [0, 0, 1, 1, -1, -1, -1, -1]]


def test_micro_batches_count_shared_prompts_once_and_padding_fully() -> None:
    rows = [trajectory(g, [1] * length) for g, length in ((0, 4), (0, 4), (1, 4), (1, 4), (2, 8), (2, 1))]
    groups = [[0, 1], [2, 3], [4, 5]]
    # Groups 0 and 1 together: 2 prompts x 2 + 4 rows x 4 = 20 tokens. Group 2 would pad all six rows to 8.
    assert list(micro_batches(rows, groups, 20)) == [(0, 1, 2, 3), (4, 5)]
    assert list(micro_batches(rows, groups, 19)) == [(0, 1), (2, 3), (4, 5)]
    assert list(micro_batches(rows, groups, 6 + 48)) == [(0, 1, 2, 3, 4, 5)]


def test_a_group_above_the_budget_is_cut_into_samples() -> None:
    rows = [trajectory(0, [1] * 10) for _ in range(3)]
    assert list(micro_batches(rows, [[0, 1, 2]], 22)) == [(0, 1), (2,)]
    assert list(micro_batches(rows, [[0, 1, 2]], 1)) == [(0,), (1,), (2,)]


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=8), st.integers(1, 200))
def test_micro_batches_keep_every_row_once_and_in_order(lengths: list[list[int]], budget: int) -> None:
    rows, groups = [], []
    for group, members in enumerate(lengths):
        groups.append(list(range(len(rows), len(rows) + len(members))))
        rows += [trajectory(group, [1] * length) for length in members]
    packed = list(micro_batches(rows, groups, budget))
    assert [row for chosen in packed for row in chosen] == list(range(len(rows)))
    for chosen in packed:
        prompts = len({rows[row].group for row in chosen})
        tokens = 2 * prompts + len(chosen) * max(len(rows[row]) for row in chosen)
        assert tokens <= budget or len(chosen) == 1


def test_minibatches_deal_whole_groups() -> None:
    groups = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert split_minibatches(groups, 2) == [[[0, 1], [2, 3]], [[4, 5], [6, 7], [8, 9]]]
    assert split_minibatches(groups[:1], 3) == [[[0, 1]]]


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 9))
def test_every_micro_batch_is_dealt_once_and_all_ranks_do_as_many_rounds(sizes: list[int], ranks: int) -> None:
    """No rank has more tokens than another by more than those of the largest one; a single rank keeps the order."""
    shares = assign_micro_batches(sizes, ranks)
    assert len(shares) == ranks
    assert {len(share) for share in shares} == {-(-len(sizes) // ranks)}
    dealt = [[position for position in share if position is not None] for share in shares]
    assert sorted(position for share in dealt for position in share) == list(range(len(sizes)))
    totals = [sum(sizes[position] for position in share) for share in dealt]
    assert max(totals) - min(totals) <= max(sizes, default=0)
    assert ranks > 1 or shares == [list(range(len(sizes)))]


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
        marked = micro.off_policy if "off_policy" in built.needs else None
        shared = {"turn": micro.turn, "age": micro.age, "head_current": head, "head_behavior": head}
        return PolicyLogps(current, micro.behavior, micro.mask, current, off_policy=marked, **shared)

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
