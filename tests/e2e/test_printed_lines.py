"""What `diagnose` and `explain --for` print for verl and TRL is accepted by them, and is the loss that it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support import bench_environment, forked
from tests.support.bench_environment import needs_bench, result_of

pytestmark = [pytest.mark.slow, needs_bench]


def cases_of(bench: forked.Run, trainer: str) -> Any:
    path = os.pathsep.join([bench_environment.PATH, os.environ.get("PYTHONPATH", "")])
    ended = bench(Path(__file__).parents[1] / "programs" / "printed_lines.py", trainer, timeout=900, PYTHONPATH=path)
    if "No module named 'hydra'" in ended.stderr:
        pytest.skip("no hydra here: make bench-install installs it")
    return result_of(ended)


def check_equal(case: dict[str, Any], name: str) -> None:
    assert case["scale"] > 0, name
    assert case["loss"] <= 1e-6, name
    assert case["gradient"] <= 1e-6, name


def test_overrides_for_verl_are_its_own_loss_or_say_what_differs(bench: forked.Run) -> None:
    cases = cases_of(bench, "verl")
    equal = {name for name, case in cases.items() if "loss" in case}
    own = {name for name in equal if "loss_mode=trimtab-" not in cases[name]["text"]}
    for name, case in cases.items():
        if name in equal:
            check_equal(case, name)
        else:
            assert "# differs: " in case["text"] or "# verl cannot train" in case["text"], name
    assert {"grpo", "dapo", "dr-grpo", "gspo", "cispo", "reinforce", "token-bypass", "token-alp-bypass"} <= own
    assert {"token-tis", "seq-tis", "seq-mis", "icepop", "dppo", "dppo-kl", "sapo", "geo-mask kept"} <= own
    assert {"m2po", "geo-mask", "gmpo", "oapl", "luffy", "soup", "token-alp"} <= cases.keys() - equal


def test_calls_for_trl_are_its_own_loss_or_name_the_adapter(bench: forked.Run) -> None:
    cases = cases_of(bench, "trl")
    for name, case in cases.items():
        if "loss" in case:
            check_equal(case, name)
        elif case.get("calls", "").startswith("trimtab.adapters.trl."):
            assert case["same"] or "# differs: " in case["text"], name
        else:
            assert "# differs: " in case["text"] or "# TRL cannot train" in case["text"], name
    own = {name for name, case in cases.items() if "loss" in case}
    assert {"grpo", "dapo", "dr-grpo", "gspo", "cispo", "token-tis", "seq-tis", "seq-mis", "icepop"} <= own
    assert {"opsm", "sapo", "vespo", "gmpo"} <= own
    assert cases["token-bypass"]["same"]
