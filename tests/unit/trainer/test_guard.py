"""What the guard reads from the steps that were not discarded."""

from __future__ import annotations

from trimtab.monitor.collapse_signs import Sign
from trimtab.trainer.config import load_config
from trimtab.trainer.guard import CONTINUES_FROM, LOST, Guard, KeptSteps


def test_steps_without_a_signal_are_counted_over_a_return() -> None:
    guard = Guard(load_config("laboratory", ('guard.on=["reward"]',)), "sort")
    for step in range(1, 9):
        assert guard.judge({"step": step, "reward/mean": 0.8 if step < 7 else 0.0}) is None
    assert guard.judge({"step": 21, "reward/mean": 0.0, CONTINUES_FROM: 8}) is None
    sign = guard.judge({"step": 22, "reward/mean": 0.0}, idle=4)
    assert sign is not None
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
