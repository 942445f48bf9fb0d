"""The verdict on a run, by hand: judged over its steps, with the worst part named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.report.health import HealthVerdict, as_data, health, judge_metric
from trimtab.runs.reader import Run

GOOD = {
    "mismatch/k3": 1e-3,
    "mismatch/ess_token": 0.99,
    "mismatch/pearson": 0.999,
    "reward/mean": 0.5,
    "groups/no_signal": 2,
    "groups/sampled": 16,
    "optim/grad_norm": 0.4,
    "optim/grad_clipped": 0.0,
    "optim/skipped": 0,
    "trajectories/dropped": 0,
}


def run(steps: int = 80, planned: int | None = None, **changed: Sequence[float | None] | float | None) -> Run:
    """A healthy run but for `changed`: one value, or one for each step; `a__b` is the metric a/b."""
    values = GOOD | {key.replace("__", "/"): value for key, value in changed.items()}
    rows = [
        {"step": step + 1}
        | {key: value[step] if isinstance(value, list | np.ndarray) else value for key, value in values.items()}
        for step in range(steps)
    ]
    kept = [{key: value for key, value in row.items() if value is not None or key == "mismatch/k3"} for row in rows]
    return Run(Path("run"), {"trainer": {"steps": planned or steps}, "optim": {"grad_clip": 1.0}}, kept)


def phases(*values: float) -> list[float]:
    """80 steps in four parts of one value each."""
    return [value for value in values for _ in range(20)]


def test_a_run_without_a_fault_is_healthy() -> None:
    result = health(run())
    assert (result.state, result.text) == ("healthy", "Healthy over 80 steps.")
    assert health(run(steps=30, planned=80)).text == "Healthy over 30 of 80 steps."
    assert as_data(result)["outside"] == {}


def test_groups_without_signal_are_named_beside_health() -> None:
    """The page showed "lost data: healthy 0" next to 12 of 16 groups without signal."""
    result = health(run(groups__no_signal=12))
    assert (result.state, result.text) == ("healthy, but", "Healthy over 80 steps, but 12 of 16 groups give no signal.")
    late = health(run(groups__no_signal=phases(1, 2, 3, 14)))
    assert late.text == "Healthy over 80 steps, but 14 of 16 groups give no signal in steps 61 to 80."
    assert health(run(groups__no_signal=8)).state == "healthy", "half of them is the end of the range"


def test_equal_rewards_that_a_rising_reward_leaves_are_a_note() -> None:
    """What the prompts can teach was learned: 12 of 16 groups are right as a whole when nine in ten answers are."""
    noise = 0.02 * np.random.default_rng(0).standard_normal(80)
    learned = health(run(groups__no_signal=phases(2, 4, 9, 12), reward__mean=list(phases(0.2, 0.5, 0.8, 0.9) + noise)))
    assert (learned.state, learned.text, learned.note) == (
        "healthy",
        "Healthy over 80 steps.",
        "To note: 12 of 16 groups give no signal in steps 61 to 80.",
    )
    assert health(run(groups__no_signal=12, reward__mean=list(0.5 + noise))).state == "healthy, but"


def test_a_run_that_teaches_nothing_is_not_healthy_and_says_why_first() -> None:
    nothing = {"groups__no_signal": 16, "reward__std": 0.0, "reward__mean": 0.0, "optim__grad_norm": 0.0}
    cut = health(run(steps=6, length__truncated=1.0, **nothing))
    assert (cut.state, cut.text) == (
        "not healthy",
        "Not healthy over 6 steps: nothing was learned in 6 of 6 steps: every response got reward 0, and 100% of the "
        "responses were cut by the length limit.",
    )
    assert health(run(**nothing)).text == (
        "Not healthy over 80 steps: nothing was learned in 80 of 80 steps: every response got reward 0."
    )
    # Groups of equal rewards that differ between groups; and a baseline over the batch, which counts no groups.
    assert "the rewards of every group were equal" in health(run(groups__no_signal=16, reward__std=0.5)).text
    assert health(run(groups__no_signal=0, reward__std=0.0)).state == "not healthy"
    # A policy that solves everything after a quarter of the run has learned it.
    solved = run(
        groups__no_signal=phases(4, 16, 16, 16), reward__mean=phases(0.5, 1, 1, 1), reward__std=phases(0.5, 0, 0, 0)
    )
    assert health(solved).state == "healthy"
    short = run(steps=4, groups__no_signal=[4, 16, 16, 16], reward__mean=[0.7, 1.0, 1.0, 1.0])
    assert health(short).state == "healthy, but", "no part of it is long enough to be called risen"
    # One that answers nothing right any more, within its first part.
    fallen = run(groups__no_signal=[2] * 10 + [16] * 70, reward__mean=[0.4, 0.1] * 5 + [0.0] * 70)
    assert health(fallen).text.startswith("Not healthy over 80 steps: nothing was learned in 70 of 80 steps")
    assert health(run(reward__std=0.0, reward__mean=0.0, expert__traces=16)).state == "healthy", "expert traces teach"


def test_stale_samples_are_a_fault_only_where_nothing_corrects_for_them() -> None:
    """Three cases of one k3: corrected lag, the same lag without a correction, and a correction without lag."""

    def judged(objective: str, lag: int, **changed: Any) -> HealthVerdict:
        stale = run(mismatch__k3=0.2, lag__max=lag, **changed)
        return health(replace(stale, config={**stale.config, "objective": {"name": objective}}))

    corrected = judged("token-tis", 31)
    assert corrected.state == "healthy, but"
    assert corrected.text == (
        "Healthy over 80 steps, but k3 is 0.2, of samples up to 31 updates old, for which token-tis corrects."
    )
    assert judged("dapo", 31).state == "not healthy"
    assert judged("token-tis", 0).state == "not healthy"
    assert judged("my_module:own", 31).state == "not healthy", "code that a run names is not run to learn more"
    fallen = judged("token-bypass", 31, reward__mean=phases(0.4, 0.2, 0.05, 0.05))
    assert fallen.text.startswith("Not healthy over 80 steps: k3 is 0.2: beyond everything published")


def test_a_lower_correlation_alone_is_no_fault() -> None:
    """The quickstart's at steps 17 to 23: k3 of bfloat16 and an effective sample size of .99."""
    dips = [0.999] * 72 + [0.988, 0.985, 0.981, 0.969] * 2
    assert health(run(mismatch__pearson=dips)).text == "Healthy over 80 steps."


def test_figures_beside_a_range_have_the_digits_that_tell_them_apart() -> None:
    assert "k3 is 0.01004: too much for a dense model" in health(run(mismatch__k3=0.01004)).text
    assert "the effective sample size is 0.9496: healthy: 0.95 to 1" in health(run(mismatch__ess_token=0.9496)).text
    assert "is 0.102 (healthy: 0 to 0.1)" in health(run(length__truncated=0.1018)).text


def test_clipping_of_every_update_is_reported_with_its_norms() -> None:
    norms = list(np.linspace(1.9, 6.5, 80))
    result = health(run(optim__grad_norm=norms, optim__grad_clipped=1.0))
    assert (result.state, result.text, result.note) == (
        "healthy",  # AdamW divides by the size of the gradient
        "Healthy over 80 steps.",
        "To note: every update was clipped (gradient norm 1.9 to 6.5, optim.grad_clip 1).",
    )
    most = health(run(optim__grad_norm=norms, optim__grad_clipped=phases(1, 1, 1, 0)))
    assert "75% of the updates were clipped" in most.note
    assert health(run(optim__grad_clipped=phases(1, 1, 0, 0))).note == ""


def test_the_last_step_alone_does_not_decide() -> None:
    """Bad throughout and good at the end, and the other way round."""
    bad = health(run(mismatch__k3=[0.3] * 79 + [1e-3]))
    assert bad.state == "not healthy"
    assert "k3 is 0.3" in bad.text
    odd = health(run(mismatch__k3=[1e-3] * 79 + [0.3]))
    assert odd.state == "healthy"
    assert odd.findings["mismatch/k3"].state == "at times"
    assert odd.findings["mismatch/k3"].steps == "1 of 80 steps, mostly 61 to 80"


def test_a_bad_quarter_is_named_with_its_median() -> None:
    """15 of 80 steps outside are few, but 15 of the last 20 are most of them; their median, of 20 values, is .5."""
    k3 = [1e-3] * 65 + [0.5] * 15
    result = health(run(mismatch__k3=k3))
    assert result.text.startswith("Not healthy over 80 steps: k3 is 0.5 in steps 61 to 80: beyond everything published")
    one = result.findings["mismatch/k3"]
    assert (one.outside, one.measured, one.median, one.worst.outside) == (15, 80, 1e-3, 15)
    assert as_data(result)["outside"]["mismatch/k3"]["worst_steps"] == [61, 80]


def test_of_parts_that_are_all_outside_the_furthest_is_named() -> None:
    result = health(run(mismatch__k3=phases(0.02, 0.08, 0.05, 0.03)))
    assert "k3 is 0.04, 0.08 in steps 21 to 40: too much for a dense model" in result.text
    ess = health(run(mismatch__ess_token=phases(0.5, 0.9, 0.3, 0.9)))
    assert "the effective sample size is 0.7, 0.3 in steps 41 to 60: healthy: 0.95 to 1" in ess.text


def test_a_short_run_is_one_part_and_parts_have_five_steps() -> None:
    assert judge_metric(run(steps=9), "mismatch/k3").worst.measured == 9  # pyright: ignore[reportOptionalMemberAccess]
    assert judge_metric(run(steps=10), "mismatch/k3").worst.measured == 5  # pyright: ignore[reportOptionalMemberAccess]
    assert judge_metric(run(), "reward/mean") is None, "it has no range"
    assert judge_metric(run(), "kl/bounded") is None, "it was not measured"


def test_a_reward_that_falls_to_less_than_half_is_not_healthy() -> None:
    fallen = health(run(reward__mean=phases(0.4, 0.38, 0.05, 0.05)))
    assert fallen.text == (
        "Not healthy over 80 steps: the reward fell from 0.4 (steps 1 to 20) to 0.05 (steps 61 to 80)."
    )
    # Rewards near 0 that chance halves: .02 with a spread of .03 a step is .007 of a mean over 20.
    noisy = np.array(phases(0.02, 0.02, 0.02, 0.009)) + np.random.default_rng(0).normal(0, 0.03, 80)
    assert health(run(reward__mean=list(noisy))).state == "healthy"
    assert health(run(reward__mean=phases(0.1, 0.2, 0.5, 0.4))).state == "healthy"


def test_what_was_lost_is_counted_over_the_run() -> None:
    skipped = health(run(optim__skipped=[1.0] + [0.0] * 79, trajectories__dropped=[0.0] * 60 + [3.0] + [0.0] * 19))
    assert skipped.text == "Healthy over 80 steps, but 1 update skipped as not finite; 3 responses dropped."


def test_a_run_without_mismatch_is_not_called_healthy() -> None:
    blind = run(mismatch__k3=None, mismatch__ess_token=None, mismatch__pearson=None)
    result = health(blind)
    assert result.state == "not judged"
    assert result.text == "Not judged over 80 steps: no mismatch between trainer and sampler was measured."


def test_noise_that_does_nothing_is_a_fault() -> None:
    result = health(run(perturbation__dlogp=0.0, perturbation__sigma_mean=0.0))
    assert result.text == "Not healthy over 80 steps: the noise of the perturbation is in effect a no-op."


def ended(outcome: str | None, steps: int = 3, error: str | None = None) -> Run:
    whole = run(steps=steps, planned=80)
    return replace(whole, origins=[{"outcome": "finished"}, {"outcome": outcome, "error": error}])


def test_a_run_that_ended_with_an_error_is_not_healthy() -> None:
    failed = health(ended("failed", error="the weights are not finite: lower optim.lr"))
    assert (failed.state, failed.text) == (
        "not healthy",
        "Not healthy over 3 of 80 steps: it ended with an error (the weights are not finite: lower optim.lr).",
    )
    # An error after the last step (a disk that is full while the model is saved) is one too.
    assert health(ended("failed", steps=80, error="disk full")).state == "not healthy"


def test_a_run_that_did_not_reach_its_last_step_says_why() -> None:
    killed, stopped, whole = (health(ended(*case)) for case in ((None,), ("stopped",), (None, 80)))
    unfinished = "Healthy over 3 of 80 steps."
    assert killed.text == f"{unfinished} It has not ended: it is still running, or was killed."
    assert stopped.text == f"{unfinished} It was stopped before its end."
    assert whole.text == "Healthy over 80 steps."
    assert health(ended("finished")).text == unfinished


def test_a_long_list_ends_with_how_many_more() -> None:
    result = health(
        run(mismatch__k3=0.5, groups__no_signal=14, trajectories__dropped=1, optim__skipped=1, length__truncated=0.9)
    )
    assert result.text.endswith("; 1 more below.")
    assert "\n" not in result.text


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=60))
def test_counts_and_states_agree(k3: list[float]) -> None:
    result = judge_metric(run(steps=len(k3), mismatch__k3=k3), "mismatch/k3")
    assert result is not None
    assert result.outside == sum(value > 0.01 for value in k3)
    assert (result.state == "healthy") == (result.outside == 0)
    if result.outside > len(k3) / 2:
        assert result.state == "outside", "more than half of all is more than half of some part"
    assert 0 <= result.worst.outside <= result.worst.measured <= result.measured


def rewritten(folder: Path, change: Mapping[str, Any]) -> Path:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | change) + "\n" for row in rows))
    return folder


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("change", "tone"),
    [({}, "good"), ({"groups/no_signal": 12}, "mixed"), ({"mismatch/k3": 0.5}, "warn")],
)
def test_the_page_and_the_terminal_show_the_same_line(
    make_run: Callable[..., Path], tmp_path: Path, change: dict[str, float], tone: str
) -> None:
    from typer.testing import CliRunner

    from trimtab.cli.main import app
    from trimtab.runs.reader import read_run

    folder = rewritten(make_run(tmp_path / "run", steps=6, every=9, noise=0.03, keys=["step", *GOOD]), change)
    text = health(read_run(folder)).text
    done = CliRunner().invoke(app, ["report", str(folder)], obj=[])
    assert done.stdout.splitlines() == [text, f"report: {folder / 'report.html'}"]
    page = (folder / "report.html").read_text()
    assert f'class="card verdict {tone}"' in page
    assert f"<strong>{text}</strong>" in page
    if tone == "mixed":
        machine = json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"], obj=[]).stdout)
        assert machine["verdict"]["text"] == text
