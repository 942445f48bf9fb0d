"""The verdict on a run, by hand: judged over its steps, with the worst part named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from markupsafe import escape
from tests.support.fake_run import relog

from trimtab.report.health import HealthVerdict, as_data, health, judge_metric
from trimtab.report.run_report import write_report
from trimtab.runs.reader import Run, read_run

GOOD = {"mismatch/k3": 1e-3, "mismatch/ess_token": 0.99, "mismatch/pearson": 0.999}
GOOD |= {"reward/mean": 0.5, "groups/no_signal": 2, "groups/sampled": 16}
GOOD |= {"optim/grad_norm": 0.4, "optim/grad_clipped": 0.0, "optim/skipped": 0, "trajectories/dropped": 0}
SAME = "The reward did not clearly change: 0.500 → 0.500. "
HEALTHY, BUT, FAULTY = "Healthy over 80 steps.", "Healthy over 80 steps, but ", "Not healthy over 80 steps: "


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


NOISE = 0.02 * np.random.default_rng(0).standard_normal(80)
# Every group has equal rewards, and all rewards are 0.
IDLE = {"groups__no_signal": 16, "reward__std": 0.0, "reward__mean": 0.0, "optim__grad_norm": 0.0}
SOLVED = {"groups__no_signal": phases(4, 16, 16, 16), "reward__mean": phases(0.5, 1, 1, 1)}
SOLVED |= {"reward__std": phases(0.5, 0, 0, 0)}
FELL = "the gradient norm fell from 0.07 to 0.02, medians of 20 steps each"
NO_OP = f"{FAULTY}the noise of the perturbation is in effect a no-op: "
EVERY_REWARD = "nothing was learned in 80 of 80 steps: every response got reward 0"


def test_steps_that_a_guard_discarded_are_not_judged() -> None:
    fallen = run(
        steps=110,
        planned=80,
        reward__mean=[0.5] * 50 + [0.0] * 30 + [0.5] * 30,
        mismatch__k3=[1e-3] * 50 + [5.0] * 30 + [1e-3] * 30,
    )
    assert health(fallen).state == "not healthy"
    fallen.rows[80] |= {"guard/continues_from": 50, "guard/returns": 1}
    text = "it returned once to an earlier policy and discarded 30 steps."
    assert health(fallen).text == f"{SAME}{BUT}{text}"
    fallen.rows[90] |= {"guard/continues_from": 50, "guard/returns": 2}
    assert "over 70 of 80 steps, but it returned 2 times to an earlier policy and discarded 40" in health(fallen).text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, HEALTHY),
        ({"groups__no_signal": 12}, f"{BUT}the share of groups without signal is 0.75 (healthy: at most 0.5)."),
        ({"groups__no_signal": phases(1, 2, 3, 14)}, f"{BUT}the share of groups without signal is 0.88 in steps 61"),
        ({"groups__no_signal": 8}, HEALTHY),  # half of them is the end of the range
        # The quickstart's at steps 17 to 23: k3 of bfloat16 and an effective sample size of .99.
        ({"mismatch__pearson": [0.999] * 72 + [0.988, 0.985, 0.981, 0.969] * 2}, HEALTHY),
        # Figures beside a range have the digits that tell them apart.
        ({"mismatch__k3": 0.01004}, f"{FAULTY}k3 is 0.01004: too much for a dense model"),
        ({"mismatch__ess_token": 0.9496}, f"{FAULTY}the effective sample size is 0.9496: healthy: 0.95 to 1."),
        ({"length__truncated": 0.1018}, f"{BUT}the share of responses cut by the length limit is 0.102 (healthy"),
        # A trainer shifted by .05 nats: k3 of 1.3e-3, and every weight is wrong.
        ({"mismatch__ratio_mean": 0.951}, f"{FAULTY}the mean ratio of trainer and sampler is 0.95: healthy: 0.99"),
        # The last step alone does not decide, and neither do single steps.
        ({"mismatch__k3": [0.3] * 79 + [1e-3]}, f"{FAULTY}k3 is 0.3: "),
        ({"mismatch__k3": [1e-3] * 79 + [0.3]}, HEALTHY),
        # Of parts that are all outside, the furthest is named.
        ({"mismatch__k3": phases(0.02, 0.08, 0.05, 0.03)}, f"{FAULTY}k3 is 0.04 over the run, 0.08 in steps 21 to 40"),
        ({"reward__mean": phases(0.4, 0.38, 0.05, 0.05)}, f"{FAULTY}the reward fell from 0.4 (steps 1 to 20) to 0.05"),
        # Rewards near 0 that chance halves: .02 with a spread of .03 a step is .007 of a mean over 20.
        ({"reward__mean": list(np.array(phases(0.02, 0.02, 0.02, 0.009)) + 1.5 * NOISE)}, HEALTHY),
        ({"reward__mean": phases(0.1, 0.2, 0.5, 0.4)}, HEALTHY),
        # Before the reward shows anything; said until the norm is back, and not where prompts were learned.
        ({"optim__grad_norm": phases(0.07, 0.07, 0.07, 0.02)}, f"{BUT}{FELL} (first at step 71)."),
        ({"optim__grad_norm": phases(0.07, 0.07, 7, 7)}, f"{BUT}the gradient norm rose from 0.07 to 3.5, "),
        ({"optim__grad_norm": phases(0.07, 0.02, 0.07, 0.07)}, HEALTHY),
        (
            {"optim__skipped": [1.0] + [0.0] * 79, "trajectories__dropped": [0.0] * 60 + [3.0] + [0.0] * 19},
            f"{BUT}responses dropped: 3; updates skipped as not finite: 1.",
        ),
        (dict.fromkeys(("mismatch__k3", "mismatch__ess_token", "mismatch__pearson")), "Not judged over 80 steps: no "),
        (IDLE, f"{FAULTY}{EVERY_REWARD}."),
        # Groups of equal rewards that differ between groups; and a baseline over the batch, which counts no groups.
        ({"groups__no_signal": 16, "reward__std": 0.5}, f"{FAULTY}nothing was learned in 80 of 80 steps: the rewards"),
        ({"groups__no_signal": 0, "reward__std": 0.0}, f"{FAULTY}nothing was learned"),
        # A policy that solves everything after a quarter of the run has learned it; expert traces teach.
        (SOLVED, HEALTHY),
        ({"reward__std": 0.0, "reward__mean": 0.0, "expert__traces": 16}, HEALTHY),
        # One that answers nothing right any more, within its first part.
        (
            {"groups__no_signal": [2] * 10 + [16] * 70, "reward__mean": [0.4, 0.1] * 5 + [0.0] * 70},
            f"{FAULTY}the reward fell from 0.12 (steps 1 to 20) to 0 (steps 61 to 80); nothing was learned in 70",
        ),
        # ALP: no change of log-probs; entries that rounding undoes, whatever the log-probs say, on probe steps.
        ({"perturbation__dlogp": [*[None, 0.0] * 40]}, f"{NO_OP}the change of log-probs is 0."),
        (
            {"perturbation__dlogp": 0.09, "perturbation__changed": 8e-4},
            f"{NO_OP}the share of changed entries is 8.0e-4.",
        ),
        ({"perturbation__dlogp": 0.07, "perturbation__changed": 0.11}, HEALTHY),
        ({"perturbation__dlogp": 1e-4}, HEALTHY),  # noise on the logits is judged by the log-probs alone
    ],
)
def test_verdict_by_hand(changed: dict[str, Any], text: str) -> None:
    result = health(run(**changed))
    verdict = result.text.removeprefix(f"{result.learned}. ")
    assert verdict.startswith(text)
    states = {HEALTHY: "healthy", BUT: "healthy, but", FAULTY: "not healthy", "Not judged": "not judged"}
    assert result.state == next(state for start, state in states.items() if text.startswith(start))
    if text.endswith("."):
        assert verdict == text
    assert "\n" not in result.text


FALLEN = np.array(phases(0.5, 0.5, 0.4, 0.4))


def held_out(*values: float, problems: float | None = 128) -> dict[str, Any]:
    """Accuracy before training and after equal parts of 80 steps."""
    before, *after = values
    every = 80 // len(after)
    series = [after[(step + 1) // every - 1] if (step + 1) % every == 0 else None for step in range(80)]
    return {
        "eval__sort__before": [before] + [None] * 79,
        "eval__sort__greedy": series,
        "eval__sort__problems": None if problems is None else [problems] + [None] * 79,
    }


@pytest.mark.parametrize(
    ("changed", "learned", "fault"),
    [
        # Wilson's interval of 59 of 128 is .377 to .547.
        (held_out(0.461, 0.352), "Worse than before: 0.461 → 0.352", "on sort fell from 0.461 [0.377, 0.547] to 0.352"),
        (held_out(0.461, 0.383), "No better than before: 0.461 → 0.383", ""),
        (held_out(0.461, 0.461), "No better than before: 0.461 → 0.461", ""),
        (held_out(0.461, 0.539), "Not clearly better than before: 0.461 → 0.539", ""),
        (held_out(0.461, 0.555), "Better than before: 0.461 → 0.555", ""),
        (held_out(0.461, 0.383, problems=2000), "Worse than before: 0.461 → 0.383", "fell from 0.461 [0.439, 0.483]"),
        (held_out(0.461, 0.3, problems=None), "No better than before: 0.461 → 0.300", ""),
        # It rose and fell again: the interval of .8 is .722 to .860, that of .62 ends at .699.
        (held_out(0.3, 0.8, 0.62), "Better than before: 0.300 → 0.620", "fell from 0.800 after step 40 to 0.620"),
        (held_out(0.3, 0.8, 0.7), "Better than before: 0.300 → 0.700", ""),
        # A sampler 23 updates old, reward and accuracy down.
        (
            held_out(0.461, 0.352) | {"mismatch__k3": 0.4, "lag__max": 23, "reward__mean": phases(0.5, 0.4, 0.4, 0.3)},
            "Worse than before: 0.461 → 0.352",
            "beyond everything published",
        ),
        # Without held-out accuracy the reward says it.
        ({"reward__mean": phases(0.3, 0.4, 0.4, 0.5)}, "The reward rose: 0.300 → 0.500", ""),
        ({"reward__mean": FALLEN + NOISE}, "The reward fell: 0.496 → 0.405", "fell from 0.5 (steps 1 to 20) to 0.4 ("),
        (held_out(0.461, 0.555) | {"reward__mean": FALLEN}, "Better than before: 0.461 → 0.555", ""),
    ],
)
def test_the_first_words_say_what_was_learned_and_no_run_that_got_worse_is_healthy(
    changed: dict[str, Any], learned: str, fault: str
) -> None:
    result = health(run(**changed))
    assert result.learned == learned
    assert result.text.startswith(f"{learned}. {'Not healthy' if fault else 'Healthy'} over 80 steps")
    assert fault in result.text
    assert as_data(result)["learned"] == learned


def test_several_tasks_are_named_the_one_that_got_worse_first() -> None:
    both = held_out(0.3, 0.6) | {key.replace("sort", "sum"): value for key, value in held_out(0.6, 0.3).items()}
    result = health(run(**both))
    assert result.learned == "Worse than before on sum: 0.600 → 0.300; Better than before on sort: 0.300 → 0.600"
    assert result.state == "not healthy"


def test_last_steps_without_finite_numbers_are_said_first_and_not_healthy() -> None:
    diverged = run(steps=24)
    for row in diverged.rows[-5:]:
        row |= {"reward/mean": None, "mismatch/k3": None, "optim/grad_norm": None}
    verdict = health(diverged)
    assert verdict.state == "not healthy"
    assert verdict.headline.endswith("Not healthy over 24 steps, the last 5 without finite numbers")
    diverged.rows[-1]["reward/mean"] = 0.5  # a step without an update
    assert health(diverged).state == "healthy"


def test_verdict_of_a_short_run() -> None:
    assert health(run(steps=30, planned=80)).text == f"{SAME}Healthy over 30 of 80 steps."
    assert health(run(steps=6, length__truncated=1.0, **IDLE)).text == (
        "Not healthy over 6 steps: nothing was learned in 6 of 6 steps: every response got reward 0, and 100% of the "
        "responses were cut by the length limit."
    )
    short = run(steps=4, groups__no_signal=[4, 16, 16, 16], reward__mean=[0.7, 1.0, 1.0, 1.0])
    assert health(short).state == "healthy, but", "no part of it is long enough to be called risen"


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({}, ""),
        # What the prompts can teach was learned: 12 of 16 groups are right as a whole.
        (
            {"groups__no_signal": phases(2, 4, 9, 12), "reward__mean": list(phases(0.2, 0.5, 0.8, 0.9) + NOISE)},
            "To note: the share of groups without signal is 0.75 in steps 61 to 80 (healthy: at most 0.5).",
        ),
    ],
)
def test_what_is_worth_knowing_leaves_a_run_healthy(changed: dict[str, Any], note: str) -> None:
    result = health(run(**changed))
    assert (result.state, result.text) == ("healthy", f"{result.learned}. {HEALTHY}")
    assert result.note.startswith(note)
    assert bool(result.note) == bool(note)


def test_stale_samples_are_a_fault_only_where_nothing_corrects_for_them() -> None:
    """Three cases of one k3: corrected lag, the same lag without a correction, and a correction without lag."""

    def judged(objective: str, lag: int, k3: float = 0.08, **changed: Any) -> HealthVerdict:
        stale = run(mismatch__k3=k3, lag__max=lag, **changed)
        return health(replace(stale, config={**stale.config, "objective": {"name": objective}}))

    corrected = judged("token-tis", 31)
    assert corrected.state == "healthy, but"
    assert corrected.text == f"{SAME}{BUT}k3 is 0.08, of samples up to 31 updates old, for which token-tis corrects."
    assert judged("dapo", 31).state == "not healthy"
    assert judged("token-tis", 0).state == "not healthy"
    assert judged("my_module:own", 31).state == "not healthy", "code that a run names is not run to learn more"
    fallen = judged("token-bypass", 31, reward__mean=phases(0.4, 0.2, 0.05, 0.05))
    assert "k3 is 0.08, of samples up to 31 updates old, for which token-bypass corrects: too much" in fallen.text
    beyond = judged("token-tis", 31, k3=0.2)
    assert beyond.state == "not healthy", "whatever corrects for it"
    assert "for which token-tis corrects: beyond everything published" in beyond.text


def test_a_bad_quarter_is_named_with_its_median() -> None:
    """15 of 80 steps outside are few, but 15 of the last 20 are most of them; their median, of 20 values, is .5."""
    result = health(run(mismatch__k3=[1e-3] * 65 + [0.5] * 15))
    assert result.text.startswith(f"{SAME}{FAULTY}k3 is 0.5 in steps 61 to 80: beyond everything published")
    one = result.metrics["mismatch/k3"]
    assert (one.outside, one.measured, one.median, one.worst.outside) == (15, 80, 1e-3, 15)
    assert one.steps == "15 of 80 steps, mostly 61 to 80"
    assert as_data(result)["outside"]["mismatch/k3"]["worst"]["first"] == 61
    assert as_data(health(run()))["outside"] == {}


def test_a_short_run_is_one_part_and_parts_have_five_steps() -> None:
    for steps, measured in ((9, 9), (10, 5)):
        found = judge_metric(run(steps=steps), "mismatch/k3")
        assert found.worst.measured == measured
    assert judge_metric(run(), "reward/mean") is None, "it has no range"
    assert judge_metric(run(), "kl/bounded") is None, "it was not measured"


@pytest.mark.parametrize(
    ("outcome", "steps", "error", "text", "note"),
    [
        ("failed", 3, "not finite: lower it; more", "it ended with an error (not finite: lower it).", ""),
        # An error after the last step (a disk that is full while the model is saved) is one too.
        ("failed", 80, "disk full", "it ended with an error (disk full).", ""),
        (None, 3, None, "Healthy over 3 of 80 steps.", "it has not ended: it is still running, or was killed."),
        ("stopped", 3, None, "Healthy over 3 of 80 steps.", "it was stopped before its end."),
        (None, 80, None, HEALTHY, ""),
        ("finished", 3, None, "Healthy over 3 of 80 steps.", ""),
    ],
)
def test_how_a_run_ended(outcome: str | None, steps: int, error: str | None, text: str, note: str) -> None:
    starts = [{"outcome": "finished"}, {"outcome": outcome, "error": error}]
    result = health(replace(run(steps=steps, planned=80), starts=starts))
    assert result.text.endswith(text)
    assert (result.state == "not healthy") == (outcome == "failed")
    assert result.note.endswith(note)
    assert bool(result.note) == bool(note)


def test_verdicts_on_stored_runs_of_the_laboratory() -> None:
    """Samplers of four bits, and 32 updates old; training halved the accuracy of some."""
    table = Path(__file__).parents[3] / "docs" / "results" / "data" / "fair-map.parquet"
    columns = ["regime", "seed", "status", "accuracy", "accuracy_before", "metrics"]
    rows = pq.read_table(table, columns=columns, filters=[("seed", "<", 2), ("regime", "!=", "reuse-16")]).to_pylist()
    states: dict[bool, list[str]] = {True: [], False: []}
    for row in rows:
        logged = row["metrics"]
        steps = [dict(zip(logged, values, strict=True)) for values in zip(*logged.values(), strict=True)]
        kept = [{key: value for key, value in step.items() if value is not None} for step in steps]
        found = health(Run(Path("run"), {}, [{"step": index + 1} | step for index, step in enumerate(kept)]))
        states[row["accuracy"] < row["accuracy_before"] / 2].append(found.state)
    assert set(states[True]) == {"not healthy"}
    assert len(states[True]) >= 2
    assert states[False].count("healthy") > 0.9 * len(states[False])


@pytest.mark.e2e
def test_the_page_has_the_checks_that_the_terminal_joins(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from trimtab.cli.main import app

    folder = make_run(tmp_path / "run", steps=6, every=9, noise=0.03, keys=["step", *GOOD])
    relog(folder, lambda row: row | {"groups/no_signal": 12})
    result = health(read_run(folder))
    done = CliRunner().invoke(app, ["report", str(folder)], obj=[])
    assert done.stdout.splitlines() == [result.text, f"report: {folder / 'report.html'}"]
    page = (folder / "report.html").read_text()
    assert f'verdict mixed"><dt></dt><dd>{result.headline}.</dd>' in page
    assert [finding.status for finding in result.findings] == ["note"]
    assert all(escape(finding.detail) in page for finding in result.findings)
    machine = json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"], obj=[]).stdout)
    assert machine["verdict"]["text"] == result.text


@pytest.mark.e2e
def test_the_page_shows_the_noise_of_every_layer(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, every=9, objective="token-alp", keys=["step"])
    layers = {f"perturbation/changed/{layer}": 0.0 for layer in range(12)}
    sigmas = {f"perturbation/sigma/{layer}": 1e-4 + 1e-6 * layer for layer in range(12)}
    row = {"step": 1, "perturbation/sigma_mean": 1e-4, "perturbation/changed": 0.0, "perturbation/dlogp": 0.01}
    (folder / "metrics.jsonl").write_text(json.dumps(row | layers | sigmas) + "\n")
    page = write_report(read_run(folder)).read_text()
    assert "is in effect a no-op" in page
    for label in ("all layers", "layer 0", "layer 11"):
        assert f">{label}</text>" in page
