"""What the guard reads from the steps that count after returns, and the checkpoints that a return may need."""

from __future__ import annotations

import math
from typing import Any

from trimtab.monitor.collapse_signs import Sign
from trimtab.trainer.config import load_config
from trimtab.trainer.guard import CONTINUES_FROM, LOST, Guard, KeptSteps


def test_steps_without_a_signal_are_counted_over_a_return() -> None:
    guard = Guard(load_config("laboratory", ('guard.on=["reward"]',)), "sort")
    for step in range(1, 9):
        assert guard.judge({"step": step, "reward/mean": 0.8 if step < 7 else 0.0}) is None
    assert guard.judge({"step": 21, "reward/mean": 0.0, CONTINUES_FROM: 8}) is None
    sign = guard.judge({"step": 22, "reward/mean": 0.0}, idle=4)
    assert sign.healthy == 6, "the last step that had one"


def test_lost_weights_are_a_reason_to_return_if_they_were_published_again_not_long_ago() -> None:
    """20 steps are a window; 7 is the last step before those that were sampled without the newest weights."""
    guard = Guard(load_config("laboratory", ('guard.on=["mismatch"]',)), "sort")
    guard.state.lost = [8, 9, 10]
    sign = Sign("mismatch", LOST, "k3 rose", 40)
    for newest, name, healthy in ((30, "publication", 7), (31, LOST, 40)):
        guard._steps = KeptSteps("sort", [{"step": step, "reward/mean": 0.5} for step in range(1, newest + 1)])
        found = guard._if_lost_again(sign)
        assert (found.name, found.healthy) == (name, healthy)


def row(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "mismatch/k3": 1e-3, "reward/mean": 0.5, **metrics}


def accuracy(value: float) -> dict[str, float]:
    return {"eval/sort/greedy": value, "eval/sort/problems": 128.0}


def test_discarded_steps_do_not_count() -> None:
    kept = KeptSteps("sort", [row(step) for step in range(1, 8)])
    kept.add(row(8, **{CONTINUES_FROM: 3}))
    assert kept.numbers == [1, 2, 3, 8]
    kept.add(row(9))
    kept.add(row(10, **{CONTINUES_FROM: 2}))
    assert kept.numbers == [1, 2, 10]


def test_discarded_evaluations_do_not_count() -> None:
    before = {"eval/sort/before": 0.7, **accuracy(0.7)}
    kept = KeptSteps("sort", [row(1, **before), row(2, **accuracy(0.9)), row(3, **accuracy(0.5))])
    sign = kept.sign(["reward"])
    assert sign.healthy == 2
    kept.add(row(4, **{CONTINUES_FROM: 1}, **accuracy(0.65)))
    assert kept.sign(["reward"]) is None, "0.9 was of a discarded step"
    kept.add(row(5))
    kept.add(row(6, **accuracy(0.4)))
    sign = kept.sign(["reward"])
    assert sign.healthy == 0, "the accuracy before training counts at step 0, not at the step that repeats it"


def test_an_evaluation_is_judged_once() -> None:
    kept = KeptSteps("sort", [row(1, **{"eval/sort/before": 0.9}, **accuracy(0.9)), row(2, **accuracy(0.2))])
    assert kept.sign(["reward"]) is not None
    assert kept.sign(["ess"]) is None
    kept.add(row(3))
    assert kept.sign(["reward"]) is None


def test_needed_checkpoints_are_the_young_ones_and_the_last_trusted_one() -> None:
    kept = KeptSteps("sort", [row(step) for step in range(1, 43)])
    assert kept.needed([0, 10, 20, 30, 40], 10) == {20, 30, 40}
    assert kept.needed(range(43), 10) == {22, 30, 40}, "not those of a smaller checkpoint.every"
    assert kept.needed([25, 30, 35], 10) == {25, 30}, "the oldest one, if the guard was turned on later"
    kept.add(row(43, **accuracy(0.9)))
    kept = KeptSteps("sort", [row(step, **(accuracy(0.9) if step == 12 else {})) for step in range(1, 43)])
    assert kept.needed([0, 10, 20, 30, 40], 10) == {10, 20, 30, 40}, "and the one before the best evaluation"
    assert KeptSteps("sort").needed([0], 10) == {0}


def test_a_resumed_run_reads_the_same_as_a_running_one() -> None:
    """metrics.jsonl has no infinity."""
    before = [row(step) for step in range(1, 25)]
    running, logged = (
        KeptSteps("sort", [*before, *(row(step, **{"mismatch/k3": k3}) for step in range(25, 30))])
        for k3 in (math.inf, None)
    )
    assert running.sign(["mismatch"]) == logged.sign(["mismatch"])


def test_steps_left_out_are_not_read() -> None:
    kept = KeptSteps("sort", [row(step, **{"mismatch/k3": 1.0 if step > 25 else 1e-3}) for step in range(1, 31)])
    assert kept.sign(["mismatch"]) is not None
    kept.leave_out([26, 27, 28, 29, 30])
    assert kept.numbers[-1] == 25
    assert kept.sign(["mismatch"]) is None


def test_reward_is_low_against_the_best_of_as_many_steps() -> None:
    rewards = [0.6] * 10 + [0.2] * 5
    kept = KeptSteps("sort", [row(step, **{"reward/mean": value}) for step, value in enumerate(rewards, start=1)])
    assert kept.reward_is_low(5)
    assert not kept.reward_is_low(10), "(5 * 0.6 + 5 * 0.2) / 10 = 0.4 is more than half of 0.6"
    assert not KeptSteps("sort").reward_is_low(5)
