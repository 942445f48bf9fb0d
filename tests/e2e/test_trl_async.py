"""AsyncGRPO of TRL 1.16 trains with Trimtab's losses, whose values do not depend on how samples are packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked
from tests.support.bench_environment import check_equal, needs_bench, result_of

import trimtab

pytestmark = [pytest.mark.slow, needs_bench]

PROGRAM = Path(__file__).parents[1] / "programs" / "trl_async.py"
Part = Callable[[str], Any]


@pytest.fixture
def run(bench: forked.Run, tmp_path: Path) -> Part:
    """Calls a function of `trl_async.py` with this test's folder, in a process of its own."""
    return lambda part: result_of(bench(PROGRAM, part, tmp_path, timeout=900))


def test_token_bypass_is_the_loss_of_trl_and_whole_updates_have_one_denominator(run: Part) -> None:
    cases = run("parity")
    check_equal({name: cases[name] for name in ("one micro-batch", "three, weighted by tokens", "mixture")}, 0.1)
    assert min(cases["auxiliary"]) > 1
    # TRL averages the means of micro-batches, so that its loss depends on the packing.
    assert len(set(cases["tokens"])) == 3
    assert cases["three, as TRL has them"]["gradient"] > 0.05
    assert {"ratio", "kl", "entropy", "trimtab/age", "trimtab/clip/high"} <= set(cases["metrics"])
    assert not any(name.startswith("clip_ratio") for name in cases["metrics"])


def test_every_preset_has_the_loss_and_gradient_of_the_library_however_samples_are_packed(run: Part) -> None:
    """Samples of one and two turns with shared prompts and different ages, in one, two and four rows."""
    cases = run("presets")
    planted = {name: case for name, case in cases.items() if name.startswith("planted")}
    assert len(planted) == 3
    assert {"token-bypass, 4", "seq-mis, 4", "turn-tis, 4", "opsm, 4", "m2po, 4", "a3po, 4", "kept, 4"} <= cases.keys()
    assert len(cases) >= 3 * 30 + 3
    for name, case in cases.items():
        assert case["scale"] > 0.01, name
        if name in planted:  # The denominators of a part of the update.
            assert case["gradient"] > 0.05, name
        else:
            assert case["loss"] <= 2e-6, name
            assert case["gradient"] <= 5e-6, name
    # Masks and ages act in these samples.
    for one, other in (("opsm", "grpo"), ("a3po", "ipo"), ("token-tis", "dapo"), ("turn-tis", "seq-tis")):
        assert abs(cases[f"{one}, 1"]["value"] - cases[f"{other}, 1"]["value"]) > 1e-4, one


def test_without_an_objective_the_loss_is_trl_s_own_bit_for_bit(run: Part) -> None:
    found = run("own")
    plain, watched, alone = found["log"]
    assert plain == watched == alone
    assert {"loss", "grad_norm", "kl", "clip_ratio/high_mean"} <= set(found["names"])
    assert len({row[found["names"].index("loss")] for row in plain}) == 4
    assert found["weights"]
    assert found["random"]
    assert all(key.startswith("trimtab/") for key in found["added"])
    assert found["versions"] == [[1, 0, 0], [2, 0, 1], [3, 0, 2], [4, 0, 3]]
    assert found["observed"] == [0.0, 1.0, 2.0, 3.0]


def test_a_guard_drops_waiting_samples_and_sends_the_weights_that_it_puts_back(run: Part) -> None:
    found = run("guarded")
    assert found["same"]
    assert found["finite"]
    assert found["waited"] > 0
    assert found["refills"] == 2, "at the start, and after the waiting samples were dropped"
    assert found["versions"][1] > found["versions"][0]
    assert found["marks"] == [None, None, 2.0, None, None]
    assert found["rates"] == [0.1, 0.1, 0.1, 0.025, 0.025]


def test_one_process_and_two_train_the_same_weights_with_any_micro_batches(
    bench: forked.Run, run: Part, tmp_path: Path
) -> None:
    cases = run("whole")
    both = bench(PROGRAM, "whole", tmp_path, ranks=2)
    assert both.returncode == 0, both.stderr[-2000:]
    first, second = (
        json.loads(line)["trimtab, 2"] for line in both.stdout.splitlines() if line.startswith('{"trimtab')
    )
    expected = cases["trimtab, 1"]["weights"]
    for found in (cases["trimtab, 4"], first, second):
        assert found["weights"] == pytest.approx(expected, abs=1e-5)
        assert found["age"] == [0.0, 1.0, 2.0]
    plain = zip(cases["trl, 1"]["weights"], cases["trl, 4"]["weights"], strict=True)
    assert max(abs(one - other) for one, other in plain) > 0.05


def test_icepop_trains_and_its_log_probs_are_written_with_their_versions(run: Part, tmp_path: Path) -> None:
    """All samples are of the first version; the first one has a token that the sampler did not score."""
    found = run("train")
    assert (found["rows"], found["wrong"]) == (32, 0)
    assert found["logp"] <= 2e-6
    assert found["versions"] == [[1, 0, 0], [2, 0, 1], [3, 0, 2], [4, 0, 3]]
    assert found["age"] == [0.0, 1.0, 2.0, 3.0]
    assert found["unscored"] == [0.125, 0.0, 0.0, 0.0]  # One of eight responses: a random token is never certain.
    assert found["forwarded"][0] == found["unique"]  # The forward pass that looks for such tokens is not counted.
    assert {"trimtab/reject/tokens", "trimtab/weight/mean", "trimtab/mismatch/k3"} <= set(found["metrics"])
    measured = trimtab.diagnose(tmp_path / "logps").measured
    assert [row["k3"] > 0 for row in measured.size.by_step] == [True] * 4


def test_settings_without_effect_and_objectives_it_cannot_carry_are_refused(run: Part) -> None:
    named = (
        *("cannot train oapl", "cannot train score-centering", "cannot train grpo: it reads reference"),
        *("dr-grpo has advantages without the standard deviation", "epsilon, epsilon_high: only TRL's own loss reads"),
    )
    for reason, words in zip(run("refusals"), named, strict=True):
        assert words in reason
