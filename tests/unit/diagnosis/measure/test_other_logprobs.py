"""The findings of files with `logp_prefill` (which part differs) and `logp_teacher` (in place, shifted, other ids)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trimtab
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.measure.other_logprobs import rescored_sides
from trimtab.diagnosis.output.as_text import terminal_text
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import Finding

UP = float(np.log(1.5))
K3 = 0.5 - UP  # of a token whose probability grows by half


def found(path: Path, prefill: list[float | None] | None) -> list[Finding]:
    """From three tokens, of which the last is not trained; the trainer's probability is 1.5 times the sampler's."""
    row = {"logp_behavior": [-2.0, -2.0, -1.0], "logp_proximal": [UP - 2, UP - 2, -9.0], "loss_mask": [1, 1, 0]}
    more = {} if prefill is None else {"logp_prefill": prefill}
    path.write_text("".join(json.dumps(row | more | {"prompt_id": str(i)}) + "\n" for i in range(4)))
    return [one for one in trimtab.diagnose([path]).measured.origin.findings if one.name == "prefill"]


@pytest.mark.parametrize(
    ("prefill", "sizes", "part"),
    [
        ([UP - 2, UP - 2, 5.0], (K3, 0.0), "decode (cache or decode kernels)"),
        ([-2.0, -2.0, 5.0], (0.0, K3), "the engine (weights or numerics)"),
        (
            [UP - 2, -2.0, 5.0],
            (K3 / 2, K3 / 2),
            "decode (cache or decode kernels) and the engine (weights or numerics)",
        ),
    ],
)
def test_the_part_is_named(tmp_path: Path, prefill: list[float], sizes: tuple[float, float], part: str) -> None:
    [one] = found(tmp_path / "a.jsonl", prefill)
    assert one.status == "note"
    words = one.detail.split()
    assert [float(words[1]), float(words[6])] == pytest.approx(sizes, rel=0.05)  # two digits
    assert one.detail.endswith(f"; the mismatch comes from {part}")


def test_without_the_column_nothing_is_said(tmp_path: Path) -> None:
    assert found(tmp_path / "a.jsonl", None) == []


RESPONSES, TIME = 24, 30


def teacher_findings(
    path: Path, change: Callable[[np.ndarray], np.ndarray] | None, responses: int = RESPONSES
) -> list[Finding]:
    findings = diagnosed(path, change, responses).measured.origin.findings
    return [one for one in findings if one.name == "teacher"]


def diagnosed(
    path: Path, change: Callable[[np.ndarray], np.ndarray] | None, responses: int = RESPONSES, noise: float = 0.0
) -> Diagnosis:
    """From a teacher with 1.3 times the student's surprise, and noise; every eleventh token is an observation."""
    draw = np.random.default_rng(0)
    student = -draw.exponential(1.0, (responses, TIME))
    teacher = 1.3 * student - 0.2 * draw.exponential(1.0, student.shape)
    mask = np.arange(TIME) % 11 != 10
    rows = []
    for index in range(responses):
        trainer = np.minimum(student[index] + noise * draw.normal(size=TIME), 0)
        row = {"logp_behavior": student[index].tolist(), "logp_proximal": trainer.tolist()}
        row |= {} if change is None else {"logp_teacher": change(teacher)[index].tolist()}
        rows.append(json.dumps(row | {"loss_mask": mask.astype(int).tolist(), "prompt_id": str(index)}))
    path.write_text("\n".join(rows))
    return trimtab.diagnose([path])


def test_a_teacher_out_of_place_is_what_the_verdict_says_to_repair(tmp_path: Path) -> None:
    right = diagnosed(tmp_path / "a.jsonl", lambda teacher: teacher, noise=0.01)
    assert right.recommendation.preset
    assert right.answer.severity == "good"
    wrong = diagnosed(tmp_path / "b.jsonl", lambda teacher: np.roll(teacher, 1, axis=1), noise=0.01)
    assert wrong.answer.verdict[-1] == ("First", "cut the teacher's list where the response begins")
    assert wrong.answer.severity == "warn"
    assert wrong.recommendation.preset == ""
    assert wrong.recommendation.why.startswith("Fix teacher first")
    assert "repair teacher: cut the teacher's list" in terminal_text(wrong)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        # .3 times the mean surprise of 1 and .2 times that of the noise.
        (lambda teacher: teacher, "note", "reverse KL to the teacher 0.5"),
        # Of the other sign, every other offset correlates better: that is no shift.
        (lambda teacher: -teacher, "fail", "have nothing to do with the sampler's: correlation -"),
        (lambda teacher: np.roll(teacher, 1, axis=1), "fail", "when moved by +1: correlation 0.9"),
        (lambda teacher: np.roll(teacher, -2, axis=1), "fail", "when moved by -2: correlation 0.9"),
        (lambda teacher: teacher[::-1], "fail", "nothing to do with the sampler's: correlation "),
        (np.zeros_like, "fail", "nothing to do with the sampler's: correlation 0.00"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], status: str, words: str
) -> None:
    [one] = teacher_findings(tmp_path / "a.jsonl", change)
    assert one.status == status
    assert words in one.detail


def test_nothing_is_said_without_the_column_or_of_few_tokens(tmp_path: Path) -> None:
    assert teacher_findings(tmp_path / "a.jsonl", None) == []
    assert teacher_findings(tmp_path / "b.jsonl", lambda teacher: teacher, responses=4) == []


@pytest.mark.parametrize(
    ("sampler", "trainer", "shared", "side"),
    [
        (0.5, 0.03, 0.0, "sampler"),
        (0.03, 0.5, 0.0, "trainer"),
        (0.5, 0.5, 0.0, "both"),
        (0.03, 0.04, 0.0, "neither"),
        (0.05, 0.001, 0.0, "sampler"),  # beyond 16 bits, and on one side only
        (0.03, 0.001, 0.0, "neither"),  # within them, if on one side only
        (0.1, 0.1, 1.0, "other"),
    ],
)
def test_the_side_that_differs_from_the_rescored_column(
    sampler: float, trainer: float, shared: float, side: str
) -> None:
    """Gaussian differences, of which k3 is about half the square, from a column that both may be far from."""
    rng = np.random.default_rng(0)
    rescored = (-3 - rng.random(3000)).astype(np.float32)
    away = shared * rng.normal(size=3000)
    behavior, proximal = (rescored + away + spread * rng.normal(size=3000) for spread in (sampler, trainer))
    table = TokenTable(
        starts=np.arange(0, 3001, 30),
        mask=np.ones(3000, dtype=np.bool_),
        behavior=behavior.astype(np.float32),
        proximal=proximal.astype(np.float32),
        rescored=rescored,
    )
    found = rescored_sides(table)
    assert found is not None
    assert ("other" if found.is_other_model else found.side) == side
    if not shared:
        assert found.sampler.value == pytest.approx(sampler**2 / 2, rel=0.3)
        assert found.trainer.low < found.trainer.value < found.trainer.high
    assert rescored_sides(replace(table, rescored=None)) is None
