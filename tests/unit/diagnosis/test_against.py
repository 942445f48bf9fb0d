"""Two diagnoses compared: planted factors, pairs of the same responses and prompts, chance, and tails by hand."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.diagnosis_example import example
from tests.support.token_tables import table

from trimtab.diagnosis.against import DiagnosisComparison, compare_samples, figure_rows, terminal_rows, verdict_lines
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.output.as_json import against_dict
from trimtab.diagnosis.pipeline import compare

RESPONSES, LENGTH = 60, 40


def stream(seed: int, noise: float, *, per_prompt: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of sampler and trainer (responses, tokens); log-ratios of standard deviation `noise`, mean ratio 1."""
    random = np.random.default_rng(seed)
    behavior = -0.5 - random.exponential(1.0, (RESPONSES, LENGTH))
    scale = noise * (np.ones((RESPONSES, 1)) if per_prompt is None else per_prompt[:, None])
    return behavior, behavior + scale * random.standard_normal(behavior.shape) - scale**2 / 2


def k3(behavior: np.ndarray, trainer: np.ndarray) -> float:
    log = trainer.astype(np.float32).astype(np.float64) - behavior.astype(np.float32)
    return float((np.expm1(log) - log).mean())


def write(path: Path, behavior: np.ndarray, trainer: np.ndarray, **columns: list) -> Path:
    """Rows in the names of TRL."""
    rows = [
        {"sampling_per_token_logps": b.tolist(), "old_per_token_logps": p.tolist(), "completion_mask": [1] * len(b)}
        | {name: values[index] for name, values in columns.items()}
        for index, (b, p) in enumerate(zip(behavior, trainer, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 50_000, (RESPONSES, LENGTH)).tolist()


@pytest.mark.slow
def test_intervals_of_paired_responses_are_the_same_in_every_process(tmp_path: Path) -> None:
    behavior, trainer = stream(0, 0.1)
    sides = {"one": trainer, "two": behavior + 0.98 * (trainer - behavior)}
    files = [str(write(tmp_path / f"{name}.jsonl", behavior, of, completion_ids=ids(0))) for name, of in sides.items()]
    code = f"from trimtab.diagnosis.pipeline import compare; print(compare(*([one] for one in {files}))[1].k3)"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    assert len(printed) == 1


def test_a_planted_factor_is_found_and_one_of_1_is_not(tmp_path: Path) -> None:
    base = write(tmp_path / "base.jsonl", *stream(0, 0.05))
    same = write(tmp_path / "same.jsonl", *stream(1, 0.05))
    more = write(tmp_path / "more.jsonl", *stream(2, 0.1))
    _, equal = compare([same], [base])
    _, larger = compare([more], [base])
    assert equal.differs is False
    assert larger.differs is True
    # k3 of Gaussian log-ratios is half their variance: a factor of 4.
    assert larger.k3.low < 4 < larger.k3.high
    assert larger.k3.high - larger.k3.low < 1.2
    assert larger.k3.value == pytest.approx(k3(*stream(2, 0.1)) / k3(*stream(0, 0.05)), rel=1e-6)
    assert larger.ratio_mean.low < 1 < larger.ratio_mean.high
    assert (larger.paired, larger.pairs) == ("", 0)
    assert re.fullmatch(
        r"k3 in A relative to B: (3\.9|4|4\.1) times \(3\.\d to 4\.\d\), more than chance\.",
        verdict_lines(larger)[0],
    )
    assert verdict_lines(equal)[0].endswith(", within chance.")


def test_the_same_responses_in_another_order_are_compared_with_themselves(tmp_path: Path) -> None:
    behavior, trainer = stream(0, 0.1)
    closer, order = behavior + 0.98 * (trainer - behavior), np.random.default_rng(1).permutation(RESPONSES)
    tokens = ids(0)
    one = write(tmp_path / "one.jsonl", behavior, trainer, completion_ids=tokens)
    two = write(
        tmp_path / "two.jsonl", behavior[order], closer[order], completion_ids=[tokens[index] for index in order]
    )
    unknown = write(tmp_path / "unknown.jsonl", behavior[order], closer[order])
    _, paired = compare([one], [two])
    _, independent = compare([one], [unknown])
    assert (paired.paired, paired.pairs) == ("response", RESPONSES)
    assert independent.paired == ""
    # By hand 1 / .98^2 = 1.041, which independent samples of 2,400 tokens cannot tell from 1.
    assert paired.k3.value == pytest.approx(k3(behavior, trainer) / k3(behavior, closer), rel=1e-6)
    assert paired.differs is True
    assert independent.differs is False
    assert paired.k3.high - paired.k3.low < 0.05 * (independent.k3.high - independent.k3.low)


def test_the_same_prompts_are_paired_and_others_are_not(tmp_path: Path) -> None:
    """Prompts differ by factors of up to 20 in k3, so that what they share matters more than what is drawn."""
    hard = np.repeat(np.exp(np.random.default_rng(3).normal(0, 0.75, RESPONSES // 2)), 2)
    prompts = [f"prompt {index // 2}" for index in range(RESPONSES)]
    others = [f"other {index // 2}" for index in range(RESPONSES)]
    reverse = slice(None, None, -1)
    one = stream(0, 0.05, per_prompt=hard)
    two = tuple(side[reverse] for side in stream(1, 0.06, per_prompt=hard))
    first = write(tmp_path / "one.jsonl", *one, prompt=prompts)
    second = write(tmp_path / "two.jsonl", *two, prompt=prompts[reverse])
    third = write(tmp_path / "three.jsonl", *two, prompt=others[reverse])
    _, paired = compare([first], [second])
    _, independent = compare([first], [third])
    assert (paired.paired, paired.pairs) == ("prompt", RESPONSES // 2)
    assert (independent.paired, independent.pairs) == ("", 0)
    assert paired.differs is True
    assert independent.differs is False
    assert paired.k3.high / paired.k3.low < 0.5 * independent.k3.high / independent.k3.low


def of(behavior: np.ndarray, trainer: np.ndarray) -> Diagnosis:
    """A diagnosis whose sample is the whole data; its own figures are not compared."""
    whole = example(causes=())
    return replace(whole, measured=replace(whole.measured, sample=table(trainer - behavior, behavior=behavior)))


def test_equal_streams_differ_in_one_of_twenty_comparisons() -> None:
    """The interval misses 1 in 5% of the cases, here at most as often as 7% would but once in 10,000 runs."""
    runs = 200
    streams = [stream(100 + index, 0.1) for index in range(2 * runs)]
    pairs = zip(streams[::2], streams[1::2], strict=True)
    misses = sum(bool(compare_samples(of(*one), of(*two)).differs) for one, two in pairs)
    assert misses <= 29  # binomial, 200 cases of 7%: 30 or more in 7e-5 of the runs


def test_tails_by_hand() -> None:
    behavior = np.full((10, 100), -1.0)
    one, two = np.full_like(behavior, 0.1), np.full_like(behavior, 0.1)
    one[:, -10:] = 0.3
    two[5:] = -0.2
    comparison = compare_samples(of(behavior, behavior + one), of(behavior, behavior + two))

    def part(log: float) -> float:
        return math.expm1(log) - log

    close = 1e-5  # log-probs are float32
    # The 1% of the tokens with the largest log-ratios: all 100 of 0.3, and of the other side all 500 of -0.2.
    whole = 900 * part(0.1) + 100 * part(0.3)
    assert comparison.tails[0] == pytest.approx(100 * part(0.3) / whole, rel=close)
    assert comparison.tails[1] == pytest.approx(part(-0.2) / (part(0.1) + part(-0.2)), rel=close)


def test_a_side_without_mismatch_and_sides_with_few_responses_have_words() -> None:
    exact = np.full((30, 10), -1.0)
    noisy = stream(0, 0.1)
    nothing, some = with_k3(of(exact, exact), 0.0, "exact"), with_k3(of(*noisy), 0.005)
    assert math.isnan(compare_samples(nothing, nothing).k3.value)
    sentences = [verdict_lines(compare_samples(a, b))[0] for a, b in ((nothing, nothing), (some, nothing))]
    assert sentences == [
        "Trainer and sampler agree up to rounding in A and in B (k3 0 in A, 0 in B).",
        "Trainer and sampler agree up to rounding in B (k3 5.0e-3 in A, 0 in B).",
    ]
    few = compare_samples(some, with_k3(of(noisy[0][:3], noisy[1][:3]), 0.005))
    assert few.differs is None
    assert verdict_lines(few)[0].endswith("too few responses for an interval.")
    assert "too few responses for an interval" in dict(terminal_rows(few))["k3"]


def with_k3(diagnosis: Diagnosis, value: float, verdict: str = "small-dense") -> Diagnosis:
    size = diagnosis.measured.size
    size = replace(size, mismatch={**size.mismatch, "k3": value}, verdict=verdict)
    return replace(diagnosis, measured=replace(diagnosis.measured, size=size))


def test_the_table_says_what_changed_and_json_holds_both_diagnoses() -> None:
    first, second = with_k3(of(*stream(0, 0.2)), 0.02), with_k3(of(*stream(1, 0.1)), 0.005)
    comparison: DiagnosisComparison = compare_samples(first, second, ("new", "old"))
    shown = {name: row for name, *row in figure_rows(comparison)}
    assert shown["k3"][2].endswith("more than chance")
    assert shown["mean ratio"][2].endswith("within chance")
    values = against_dict(comparison)
    assert values["changes"]["k3"]["beyond_chance"] is True
    assert values["changes"]["k3"]["low"] < 4 < values["changes"]["k3"]["high"]
    assert values["diagnosis"]["mismatch"]["k3"] == 0.005
    assert values["paired"] == {"by": "", "count": 0}
    json.dumps(values, allow_nan=False)
