"""A run in a few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.runs.reader import Run
from trimtab.runs.summary import RunSummary, summarize

K3, CHI2, ESS, LARGEST = "mismatch/k3", "mismatch/chi2_token", "mismatch/ess_token", "mismatch/log_ratio_seq_max"


def rows() -> list[dict[str, Any]]:
    greedy, before = "eval/sort/greedy", "eval/sort/before"
    last = {"step": 3, "updates": 2, "reward/mean": 0.75, K3: 0.2, ESS: 0.6, greedy: 0.6, CHI2: 2.0, LARGEST: 1.5}
    last |= {"clip/low": 0.125, "clip/high": 0.125, "clip/weight": 0.9}
    last |= {"optim/grad_norm": 3.0, "optim/skipped": 1, "reject/tokens": 0.5}
    return [
        {"step": 1, "updates": 1, "reward/mean": 0.25, K3: 0.5, ESS: 0.9, greedy: 0.4, before: 0.4, "clip/low": 0.25},
        {"step": 2, "updates": 2, "reward/mean": 0.5, K3: None, ESS: 0.3, greedy: 0.8, "optim/grad_norm": 7.0},
        last,
    ]


def run(rows: list[dict[str, Any]], every: int) -> Run:
    return Run(Path("run"), {"task": {"name": "sort"}, "trainer": {"steps": 3}, "eval": {"every": every}}, rows)


def test_a_run_in_numbers() -> None:
    expected = {"status": "done", "steps": 3, "updates": 2, "seconds": 9.0, "reward": 0.75}
    expected |= {"accuracy_before": 0.4, "accuracy": 0.6, "accuracy_best": 0.8}
    expected |= {"curve_steps": (0, 2, 3), "curve": (0.4, 0.8, 0.6)}
    expected |= {"k3": 0.2, "k3_worst": 0.5, "chi2": 2.0, "chi2_worst": 2.0, "ess": 0.6, "ess_worst": 0.3}
    expected |= {"log_ratio_seq": 1.5, "log_ratio_seq_worst": 1.5}
    expected |= {"grad_norm_max": 7.0, "clipped": 0.25, "rejected": 0.5, "skipped": 1}
    assert summarize(run(rows(), every=2), "done", 9.0) == RunSummary(**expected)


def test_a_diverged_run_has_no_accuracy_at_its_end() -> None:
    summary = summarize(run(rows()[:2], every=2), "diverged", 1.0, "not finite")
    assert (summary.status, summary.accuracy, summary.accuracy_best, summary.steps) == ("diverged", None, 0.8, 2)
    assert summarize(run([], every=2), "failed", 1.0).k3 is None
