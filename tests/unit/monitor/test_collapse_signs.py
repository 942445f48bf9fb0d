"""The first sign of a collapse, and how far back a policy is trusted."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from trimtab.intervals import least_fall, wilson
from trimtab.monitor.alarms import WINDOW, Step
from trimtab.monitor.collapse_signs import Evaluation, accuracy_falls, first_sign


def steps(ess: list[float], k3: float = 1e-4) -> list[Step]:
    return [Step(number, {"mismatch/ess_token": one, "mismatch/k3": k3}, None) for number, one in enumerate(ess, 1)]


def test_an_alarm_that_holds_from_the_start_is_of_the_setup() -> None:
    assert first_sign(steps([0.2] * 10), ["ess"]) is None
    assert first_sign(steps([0.2] * (WINDOW + 1)), ["ess"]) is not None, "a rule that never was silent is judged later"


def test_what_is_not_watched_or_not_measured_is_not_judged() -> None:
    low = [0.9] * 27 + [0.2] * 3
    assert first_sign(steps(low), ["reward", "mismatch"]) is None
    assert first_sign(steps([math.nan] * 30), ["ess", "mismatch", "length", "reward"]) is None


def test_accuracy_falls_beyond_its_interval() -> None:
    # Wilson at 99%: 0.77 of 128 reaches down to 0.6623, 0.55 of 128 up to 0.6580. Newcombe's lower end is
    # 0.22 - sqrt(0.1077^2 + 0.1080^2) = 0.0675.
    assert math.isclose(least_fall(0.77, 0.55, 128, 2.576), 0.0675, abs_tol=1e-4)
    before, after = Evaluation(0, 0.77, 128), Evaluation(8, 0.55, 128)
    sign = accuracy_falls([before, Evaluation(4, 0.7, 128), after])
    assert sign.healthy == 0
    assert accuracy_falls([before, after._replace(accuracy=0.64)]) is None
    assert accuracy_falls([before, after._replace(problems=16)]) is None
    assert accuracy_falls([before]) is None


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 5000))
def test_a_fall_is_never_seen_in_a_rise(before: float, after: float, count: int) -> None:
    low, high = wilson(before, count, 2.576)
    assert low <= before <= high
    assert least_fall(before, max(before, after), count, 2.576) <= 0
