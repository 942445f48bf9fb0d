"""The length surge: when it is found, what the rate does then, and that a resumed run knows what it saw."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trimtab.trainer.config import OptimConfig, SurgeConfig
from trimtab.trainer.features.length_surge import LengthSurge
from trimtab.trainer.optim import first_halving, learning_rate, surge_share

LEARNER: Any = None  # the state of this feature does not touch it


def watch(surge: LengthSurge, lengths: list[float | None]) -> dict[int, str]:
    """Messages by the step that gave them."""
    lines = ((step, surge.observe(step, length)) for step, length in enumerate(lengths, start=1))
    return {step: line for step, line in lines if line}


def test_the_published_example() -> None:
    """A surge at step 110 halves every 1.8 x 110 = 198 steps; 2^-4 is below the floor of 0.1."""
    shares = {1: 1.0, 110: 1.0, 307: 1.0, 308: 0.5, 505: 0.5, 506: 0.25, 704: 0.125, 901: 0.125, 902: 0.1, 9999: 0.1}
    assert {step: surge_share(SurgeConfig(), step, 110) for step in shares} == shares
    assert first_halving(SurgeConfig(), 110) == 308
    assert surge_share(SurgeConfig(), 9999, None) == 1.0


def test_a_period_of_part_of_a_step_halves_several_times_at_once() -> None:
    config = SurgeConfig(period=0.25, floor=0.0)
    assert [surge_share(config, step, 2) for step in (2, 3, 4)] == [1.0, 0.25, 0.0625]
    assert first_halving(config, 2) == 3


@given(
    surge=st.integers(1, 5000),
    period=st.floats(0.01, 10),
    floor=st.floats(0, 1),
    warmup=st.integers(0, 50),
    updates=st.integers(1, 4),
)
def test_the_rate_never_rises_after_warm_up_and_never_falls_below_its_floor(
    surge: int, period: float, floor: float, warmup: int, updates: int
) -> None:
    config = OptimConfig(
        lr=1.0, warmup=warmup, schedule="surge", surge=SurgeConfig(period=period, floor=floor, at=surge)
    )
    share = [surge_share(config.surge, step, surge) for step in range(1, 400)]
    rates = [
        share[step - 1] * learning_rate(config, (step - 1) * updates + index, 400 * updates)
        for step in range(1, 400)
        for index in range(updates)
    ]
    after = rates[warmup:]
    assert all(later <= earlier for earlier, later in pairwise(after))
    assert min(after, default=1.0) >= floor
    assert all(rate == 1.0 for rate in after[: max(0, surge * updates - warmup)])


@given(surge=st.integers(1, 100_000), period=st.integers(1, 400))
def test_the_first_halving_is_where_the_rate_first_falls(surge: int, period: int) -> None:
    config = SurgeConfig(period=period / 10, floor=0.0)
    first = first_halving(config, surge)
    assert surge_share(config, first - 1, surge) == 1.0
    assert surge_share(config, first, surge) <= 0.5
    assert first == surge + max(1, math.ceil(surge * period / 10 - 1e-9))


def test_a_surge_is_found_by_the_moving_average() -> None:
    """Baseline 100; the mean of the last two passes 300 when 310 follows 295: (295 + 310) / 2 = 302.5."""
    surge = LengthSurge(SurgeConfig(baseline=3, window=2, factor=3.0), print)
    lines = watch(surge, [90, 110, 100, 200, 295, 310, 400])
    assert surge.step == 6
    assert list(lines) == [6], "one message"
    assert lines[6] == (
        "length surge at step 6 (302.5 tokens a response over the last 2 steps, above 3 times the 100 of the first 3): "
        "the learning rate halves every 10.8 steps, first at step 17, down to 0.1 of it"
    )


def test_one_long_step_is_no_surge() -> None:
    """Ten times the baseline once: (4 x 100 + 1000) / 5 = 280, below 300. The same for a whole window is one."""
    normal: list[float | None] = [100.0] * 60
    spike = LengthSurge(SurgeConfig(), print)
    assert not watch(spike, [*normal, 1000.0, *normal])
    assert LengthSurge(SurgeConfig(), print).step is None
    growth = LengthSurge(SurgeConfig(), print)
    assert list(watch(growth, [*normal, *[320.0] * 5])) == [65]


def test_nothing_fires_inside_the_baseline_or_exactly_at_the_factor() -> None:
    surge = LengthSurge(SurgeConfig(baseline=4, window=1, factor=2.0), print)
    assert not watch(surge, [1, 100, 1000, 899, 1000])  # mean 500, and 1000 is not above 1000
    assert surge.observe(6, 1000.5)


def test_a_window_longer_than_the_baseline_is_filled_first() -> None:
    surge = LengthSurge(SurgeConfig(baseline=1, window=4, factor=1.5), print)
    assert list(watch(surge, [10, 40, 40, 40, 40])) == [4]


def test_steps_without_a_length_do_not_count() -> None:
    surge = LengthSurge(SurgeConfig(baseline=2, window=1, factor=2.0), print)
    assert list(watch(surge, [None, 10, None, 10, None, 21])) == [6]


def test_a_fixed_step_needs_no_lengths() -> None:
    surge = LengthSurge(SurgeConfig(at=3), print)
    lines = watch(surge, [None, 1e9, None, None])
    assert surge.step == 3
    assert list(lines) == [3]
    assert "every 5.4 steps, first at step 9" in lines[3]  # 3 + 5.4 rounded up


@given(
    lengths=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    baseline=st.integers(1, 6),
    window=st.integers(1, 6),
)
def test_a_restored_watch_goes_on_as_if_never_stopped(
    lengths: list[float], cut: int, baseline: int, window: int
) -> None:
    config = SurgeConfig(baseline=baseline, window=window, factor=1.1)
    whole, first, second = LengthSurge(config, print), LengthSurge(config, print), LengthSurge(config, print)
    watch(whole, list(lengths))
    watch(first, list(lengths[:cut]))
    second.load_state(LEARNER, json.loads(json.dumps(first.state())))
    for step, length in enumerate(lengths[cut:], start=min(cut, len(lengths)) + 1):
        second.observe(step, length)
    assert second == whole
