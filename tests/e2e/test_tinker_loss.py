"""tinker 0.38 sends the gradient of Trimtab's losses to its service: functions of its SDK, on data of its types."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import forked
from tests.support.bench_environment import needs_bench, result_of

pytestmark = [pytest.mark.slow, needs_bench]


def test_the_weights_of_the_backward_pass_are_the_gradient(bench: forked.Run) -> None:
    results = result_of(bench(Path(__file__).parents[1] / "programs" / "tinker_loss.py"))
    assert set(results) == {"icepop", "seq-tis", "m2po", "token-bypass"}
    for gaps in results.values():
        assert gaps["largest"] > 0.01
        assert gaps["loss"] < 1e-6
        assert gaps["weights"] < 1e-7
