"""Seconds of sampling and training against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.trainer.planning.estimates import PlannedEngine, Workload, generation_seconds, training_seconds
from trimtab.trainer.planning.inputs import SHAPES, Assumptions, Device, Shape

ROUND = Device("round", memory=1e9, flops=1e12, bandwidth=1e9, source="")
FREE = Device("free", memory=1e9, flops=1e40, bandwidth=1e40, source="")  # leaves nothing but the overhead
PLAIN = Assumptions(train_flops=0.5, decode_bandwidth=0.5, decode_flops=0.5, decode_overhead=0.25, engine_memory=0.5)
#                   layers, hidden, heads, kv, size, intermediate, vocabulary
TINY = Shape("tiny", 2, 4, 2, 1, 2, 8, 10, tied=True)
WORK = Workload(prompts=3, samples=2, prompt=5, response=4, longest=8)


def assuming(**changes: float) -> Assumptions:
    return PLAIN.model_copy(update=changes)


def steady() -> PlannedEngine:
    """An engine that takes a second for every token."""
    return PlannedEngine(TINY, FREE, 1, assuming(decode_overhead=1.0))


def test_sizes_by_hand() -> None:
    # attention 2*4*4 + 2*4*2 = 48, network 3*4*8 = 96, norms 8; embedding 40, last norm 4.
    assert (TINY.expert, TINY.layer, TINY.parameters) == (96, 152, 348)
    assert TINY.kv_values == 2 * 2 * 2


def test_a_decode_step_is_bound_by_what_it_reads() -> None:
    # Weights of two layers and the head (tied: the embedding) and 100 tokens of 8 numbers, in two bytes each.
    read = 2 * (2 * 152 + 40 + 100 * 8)
    assert PlannedEngine(TINY, ROUND, 1, PLAIN).decode(3, 100) == pytest.approx(read / 0.5e9 + 0.25)


def test_a_decode_step_is_bound_by_products_on_a_slow_device() -> None:
    slow = replace(ROUND, flops=1.0, bandwidth=1e30)
    # Every token meets 304 + 40 weights, and two products with each of 100 tokens of context: 2 layers of 4 channels.
    work = 2 * 344 * 3 + 2 * 2 * 2 * 4 * 100
    assert PlannedEngine(TINY, slow, 1, PLAIN).decode(3, 100) == pytest.approx(work / 0.5 + 0.25)


def test_two_gpus_are_not_twice_as_fast() -> None:
    one, two = (PlannedEngine(TINY, ROUND, gpus, assuming(decode_overhead=1e-12)) for gpus in (1, 2))
    assert one.decode(3, 100) / two.decode(3, 100) == pytest.approx(2 * 0.9)


def test_slots_are_what_the_cache_holds() -> None:
    # Half of 1e9 less a workspace and 696 bytes of weights; 16 bytes a token. In progress: 5 + mean of L^2 / 2 mean.
    engine = PlannedEngine(TINY, ROUND, 1, assuming(engine_workspace=0.5e9 - 696 - 16 * 1000, sequences=1000))
    assert engine.cache == pytest.approx(1000)
    assert WORK.square == pytest.approx(64 / 3)
    assert engine.slots(WORK) == int(1000 / (5 + 64 / 3 / 8))
    assert PlannedEngine(TINY, ROUND, 1, assuming(engine_workspace=0.5e9)).slots(WORK) == 0


def test_a_mixture_reads_the_experts_it_uses() -> None:
    mixture = replace(TINY, experts=4, active=1)
    one = PlannedEngine(mixture, ROUND, 1, PLAIN)
    read = 2 * (2 * (152 - 96 + 4 * 4 + 96) + 40)
    assert one.decode(1, 0) == pytest.approx(read / 0.5e9 + 0.25)


def test_writing_by_hand() -> None:
    # Two slots; a second for every token of both. 0-3: lengths 3 and 5; 3-5: 5 and 2; 5-6: 1.
    assert generation_seconds(steady(), prompt=7, lengths=[3, 5, 2, 1], slots=2) == pytest.approx(6)


def test_the_longest_response_is_waited_for() -> None:
    assert generation_seconds(steady(), prompt=7, lengths=[1] * 10 + [50], slots=16) == pytest.approx(50)


def test_the_context_of_a_response_counts_until_its_end() -> None:
    # Bytes only: at each step 344 weights and 8 numbers for each token of context, read at 0.5e9 bytes per second.
    engine = PlannedEngine(TINY, replace(ROUND, flops=1e40), 1, assuming(decode_overhead=1e-30))
    contexts = [5 + 5 + 1 + step * 2 for step in range(2)] + [5 + 2 + 0.5 + step for step in range(3)]
    expected = sum(2 * (344 + 8 * context) / 0.5e9 for context in contexts)
    assert generation_seconds(engine, prompt=5, lengths=[2, 5], slots=2) == pytest.approx(expected)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), slots=st.integers(1, 10))
def test_writing_is_between_its_bounds(lengths: list[int], slots: int) -> None:
    result = generation_seconds(steady(), prompt=3, lengths=lengths, slots=slots)
    least = max(*lengths, math.ceil(sum(lengths) / slots))
    assert least - 1e-9 <= result <= sum(lengths) / slots + max(lengths) + 1e-9


@given(longest=st.integers(8, 4096), share=st.floats(0.1, 1.0))
def test_lengths_have_the_mean_and_the_square_they_promise(longest: int, share: float) -> None:
    work = Workload(64, 16, 8, longest * share, longest)
    lengths = work.lengths(work.responses)
    assert max(lengths) <= longest
    # Every response has a token, which matters where the average is hardly more.
    assert sum(lengths) / len(lengths) == pytest.approx(work.response, rel=0.02, abs=1.0)
    mean_square = sum(length**2 for length in lengths) / len(lengths)
    assert mean_square == pytest.approx(work.square, rel=0.03, abs=longest)


def test_training_by_hand() -> None:
    # 6 responses of 4 tokens and 3 prompts of 5: 39 tokens meet 304 weights, 24 the head's 40.
    # Attention of 2 layers x 4 channels: E[L^2] + 5 * 4 for each response, 25 for each prompt.
    forward = 2 * (304 * 39 + 40 * 24) + 4 * 2 * 4 * (6 * (64 / 3 + 20) + 3 * 25)
    assert training_seconds(TINY, ROUND, 2, WORK, 3, False, PLAIN) == pytest.approx(3 * forward / (2 * 0.5e12))
    assert training_seconds(TINY, ROUND, 2, WORK, 3, True, PLAIN) == pytest.approx(4 * forward / (2 * 0.5e12))
    # Two updates: the proximal forward comes in. Two epochs: everything twice.
    twice = replace(WORK, updates=2, epochs=2)
    assert training_seconds(TINY, ROUND, 2, twice, 3, False, PLAIN) == pytest.approx(7 * forward / (2 * 0.5e12))


def test_more_gpus_are_faster_and_larger_models_slower() -> None:
    small, large = SHAPES["qwen2.5-7b"], SHAPES["qwen2.5-32b"]
    seconds = [
        training_seconds(shape, ROUND, n, WORK, 3, True, PLAIN) for shape, n in ((small, 4), (small, 8), (large, 8))
    ]
    assert seconds[1] == pytest.approx(seconds[0] / 2)
    assert seconds[2] > 4 * seconds[1]
