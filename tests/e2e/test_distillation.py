"""On-policy distillation in the real loop: a student of the laboratory gets better from its teacher alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.run_results import untimed

from trimtab.errors import TrimtabError
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train
from trimtab.trainer.sft import laboratory_folder

pytestmark = pytest.mark.slow
STUDENT = ("sft.steps=40", "advantage.kind=distillation", "trainer.prompts=8", "optim.warmup=0")


def distill(out: Path, *changes: str, teacher: str | Path | None = None) -> list[dict[str, Any]]:
    reference = laboratory_folder() if teacher is None else teacher  # 80 steps of warm start
    train(load_config("laboratory", [*STUDENT, f"model.reference={reference}", *changes]), out=out)
    return untimed(out)


def kl(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.mean([row["distillation/kl"] for row in rows]))


def test_a_student_comes_near_its_teacher_and_answers_better_without_reading_rewards(tmp_path: Path) -> None:
    """One response to each prompt: no reward could be compared. The rollouts are those of a quantized sampler."""
    rows = distill(
        tmp_path,
        "trainer.steps=60",
        "trainer.samples=1",
        "trainer.prompts=64",
        "engine.quantize=int8",
        "optim.lr=3e-4",
        "optim.warmup=5",
        "eval.every=0",
    )
    reward = [row["reward/mean"] for row in rows]
    assert kl(rows[-15:]) < 0.5 * kl(rows[:15])  # .16 of .44
    assert np.mean(reward[-15:]) > 1.4 * np.mean(reward[:15])  # .15 of .07
    assert rows[-1]["eval/sort/greedy"] > rows[0]["eval/sort/before"] + 0.05  # .34 of .20, the teacher has .46
    assert rows[-1]["groups/no_signal"] == 0


def test_a_student_that_is_its_own_teacher_stays_as_it_is(tmp_path: Path) -> None:
    """The teacher scores with the packing of the proximal pass: every advantage, and so the gradient, is exactly 0."""
    same = load_config("laboratory", [*STUDENT])
    rows = distill(tmp_path, "trainer.steps=2", "eval.problems=8", teacher=laboratory_folder("laboratory", same))
    assert rows[0]["distillation/kl"] == 0
    assert rows[0]["optim/grad_norm"] == 0


def test_a_teacher_with_other_ids_is_refused(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(laboratory_folder(), teacher)
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["3"], ids["4"] = ids["4"], ids["3"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TrimtabError, match=r"model.reference = .* has another id for the token '[34]'"):
        distill(tmp_path / "run", "trainer.steps=1", teacher=teacher)
