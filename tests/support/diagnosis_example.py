"""A diagnosis made by hand: an int8 sampler whose weights also lag, as numbers a page or a program would get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.diagnosis.against import DiagnosisComparison
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.records import (
    Cause,
    DataSummary,
    DriftSplit,
    Interval,
    Measured,
    MismatchSize,
    PresetOutcome,
    Recommendation,
    View,
)
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import Finding

MISMATCH = {
    "k1": 0.0041,
    "k2": 0.0052,
    "k3": 0.0048,
    "chi2_token": 0.0123,
    "chi2_seq": 1.75,
    "ess_token": 0.9878,
    "ess_seq": 0.3636,
    "ratio_mean": 1.00071,
    "ppl_ratio": 1.00412,
    "pearson": 0.99641,
    "abs_diff_mean": 0.0312,
    "abs_diff_max": 2.27,
    "ratio_q01": 0.71,
    "ratio_q05": 0.9,
    "ratio_q50": 1.0,
    "ratio_q95": 1.09,
    "ratio_q99": 1.31,
    "ratio_bounded": 0.0,
    "log_ratio_seq_max": 3.4,
    "tokens": 91000.0,
    "sequences": 1240.0,
}
INTERVALS = {
    "k3": Interval(0.0048, 0.0043, 0.0054),
    "ratio_mean": Interval(1.00071, 0.9991, 1.0024),
    "ess_token": Interval(0.9878, 0.985, 0.99),
    "pearson": Interval(0.99641, 0.9959, 0.9969),
}


def view(name: str, labels: list[str], count: list[int], k3: list[float], **more: Any) -> View:
    """A view whose other columns follow from k3 as for small Gaussian log-ratios: variance 2 k3."""
    counts, values = np.array(count), np.array(k3)
    spread = np.sqrt(2 * values)
    zero = np.zeros(len(labels))
    result = {
        "ratio_mean": 1 + zero,
        "log_ratio_mean": -values,
        "abs_mean": 0.8 * spread,
        "low": -2 * spread,
        "median": -values,
        "high": 2 * spread,
    }
    return View(name, tuple(labels), counts, k3=values, **{**result, **more})


def views(hostile: str = "1234") -> dict[str, View]:
    edges = np.array([0.0, 1e-3, 1e-2, 1e-1, 0.5, 1.0])
    deciles = [f"{10 * tenth}-{10 * tenth + 10}%" for tenth in range(10)]
    lengths = ["1-16", "17-32", "33-64", "65-128", "129-256"]
    parts = (
        view(
            "probability",
            ["<1e-3", "1e-3 to 1e-2", "1e-2 to 0.1", "0.1 to 0.5", "0.5 to 1"],
            [1000, 4000, 10000, 20000, 56000],
            [0.12, 0.03, 0.009, 0.0045, 0.0005],
            edges=edges,
        ),
        view("position", deciles, [9100] * 10, [0.004, 0.0042, *[0.0045] * 4, 0.005, 0.0052, 0.0056, 0.006]),
        view(
            "length",
            lengths,
            [4000, 12000, 30000, 30000, 15000],
            [0.0047, 0.0048, 0.0048, 0.0049, 0.0047],
            columns={"responses": np.array([400, 500, 600, 300, 100])},
        ),
        view("version", ["0", "1", "2", "5-8"], [23000, 23000, 22500, 22500], [0.0011, 0.003, 0.0052, 0.0101]),
        view("token", ["220", hostile, "17", "13"], [30000, 800, 9000, 51200], [0.002, 0.2, 0.004, 0.0032]),
        view(
            "entropy",
            ["0 to 0.5", "0.5 to 1", "1 to 2", "2 to 4"],
            [50000, 20000, 15000, 6000],
            [0.0005, 0.004, 0.011, 0.03],
            edges=np.array([0.0, 0.5, 1.0, 2.0, 4.0]),
        ),
    )
    return {part.name: part for part in parts}


def steps(count: int = 20) -> tuple[dict[str, float], ...]:
    rows = []
    for step in range(1, count + 1):
        grown = 1 + 0.15 * (step - 1)
        rows.append(
            {
                "step": float(step),
                "k3": 0.002 * grown,
                "ess_token": 1 - 0.004 * grown,
                "ess_seq": 0.9 / grown,
                "tokens": 4550.0,
                "ratio_mean": 1.0,
                "ratio_q01": 1 - 0.1 * grown**0.5,
                "ratio_q05": 1 - 0.05 * grown**0.5,
                "ratio_q50": 1.0,
                "ratio_q95": 1 + 0.05 * grown**0.5,
                "ratio_q99": 1 + 0.12 * grown**0.5,
            }
        )
    return tuple(rows)


def scatter(bins: int = 50) -> np.ndarray:
    """A ridge along the diagonal that holds most tokens near 1."""
    row, column = np.indices((bins, bins))
    height = np.exp(-((row - column) ** 2) / 2) * np.exp(6 * (row + column) / (2 * bins))
    return np.round(20 * height).astype(np.int64)


CAUSES = (
    Cause(
        "quantized",
        0.94,
        "k3 at age 0 is 1.1e-3, with log-ratios spread alike at all steps.",
        "sample in bf16",
        is_stated=True,
    ),
    Cause(
        "stale",
        0.88,
        "k3 grows from 1.1e-3 at age 0 to 1.0e-2 at ages 4 to 7.",
        "lower trainer.sync_every",
        is_stated=True,
    ),
)
OUTCOMES = (
    PresetOutcome("grpo", 1.0, 0.0, 1.0, 0.031),
    PresetOutcome("token-tis", 1.0, 0.004, 0.9902, 0.0021, {"weight_max": 2.0}),
    PresetOutcome("token-tis", 1.0, 0.01, 0.9931, 0.0043, {"weight_max": 1.31}, calibrated=True),
    PresetOutcome(
        "seq-mis", 0.61, 0.39, 0.44, 0.41, {"weight_min": 0.5, "weight_max": 3.0}, note="rejects long responses"
    ),
)
LINES = {
    "trimtab": '[objective]\nname = "token-tis"\nweight_max = 1.31',
    "verl": "algorithm.rollout_correction.rollout_is=token\nalgorithm.rollout_correction.rollout_is_threshold=1.31",
    "trl": "vllm_importance_sampling_correction=True\nvllm_importance_sampling_cap=1.31",
    "miles": "--use-tis --tis-clip 1.31",
}


def example(
    *,
    causes: tuple[Cause, ...] = CAUSES,
    origin: dict[str, Any] | None = None,
    size: dict[str, Any] | None = None,
    split: DriftSplit | None = None,
    only: dict[str, View] | None = None,
) -> Diagnosis:
    """The diagnosis, with fields of its parts replaced."""
    read = DataSummary(
        framework="trimtab",
        files=20,
        responses=1240,
        tokens=91200,
        trained=91000,
        anchor="proximal",
        dropped={"lists of different lengths": 2, "no trained token": 1},
        missing={"turn starts": "the view by turn"},
        findings=(Finding("note", "lengths", "3 responses have a length of 1"),),
    )
    large = MismatchSize(MISMATCH, INTERVALS, 3.1e-13, "both are stored in float32", "small-dense", steps())
    measured = Measured(
        origin=replace(read, **(origin or {})),
        size=replace(large, **(size or {})),
        views=views() if only is None else only,
        split=split
        or DriftSplit(
            True, "25% of the tokens are of age 0", 0.0011, 0.0037, {"staleness": Interval(0.0037, 0.003, 0.0045)}
        ),
        scatter=scatter(),
        sample=TokenTable(np.array([0, 1]), np.array([True]), np.array([-0.1]), proximal=np.array([-0.1])),
    )
    recommendation = Recommendation(
        "token-tis", {"weight_max": 1.31}, "Tails are heavy per response, light per token.", LINES
    )
    return Diagnosis(measured, causes, OUTCOMES, recommendation)


def compared(first: Diagnosis, names: tuple[str, str]) -> DiagnosisComparison:
    """A diagnosis against one without a cause: twice its k3, by 12 prompts."""
    return DiagnosisComparison(
        first=first,
        second=replace(first, causes=()),
        k3=Interval(2.0, 1.5, 2.5),
        ratio_mean=Interval(1.0, 0.99, 1.01),
        tail=Interval(0.2, 0.1, 0.3),
        tails=(0.4, 0.2),
        paired="prompt",
        pairs=12,
        names=names,
    )
