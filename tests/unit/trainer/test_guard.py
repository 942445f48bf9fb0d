"""What the guard reads from the steps that were not discarded."""

from __future__ import annotations

from trimtab.trainer.config import load_config
from trimtab.trainer.guard import CONTINUES_FROM, Guard


def test_steps_without_a_signal_are_counted_over_a_return() -> None:
    guard = Guard(load_config("laboratory", ('guard.on=["reward"]',)), "sort")
    for step in range(1, 9):
        assert guard.judge({"step": step, "reward/mean": 0.8 if step < 7 else 0.0}) is None
    assert guard.judge({"step": 21, "reward/mean": 0.0, CONTINUES_FROM: 8}) is None
    sign = guard.judge({"step": 22, "reward/mean": 0.0}, idle=4)
    assert sign is not None
    assert sign.healthy == 6, "the last step that had one"
