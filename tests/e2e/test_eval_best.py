"""The best checkpoint by any task, by avg@n, and by the mean of several metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.runs.layout import best_checkpoint
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

ROWS = [{"question": f"sort {text}", "answer": "".join(sorted(text))} for text in ("31", "20", "54", "76")]
HELD = [{"question": f"sort {text}", "answer": "".join(sorted(text))} for text in ("97", "83", "61")]


@pytest.fixture
def other(tmp_path: Path) -> str:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELD))
    return f'{{name = "file", path = "{tmp_path}/pairs.jsonl", test_path = "{tmp_path}/held.jsonl", samples = 4}}'


def recipe(other: str, *overrides: str):
    sets = ["trainer.steps=4", "trainer.prompts=4", "eval.every=1", "eval.problems=8", "eval.samples=3"]
    return load_config("laboratory", [*sets, f"eval.task=[{other}]", *overrides])


def test_the_mean_of_two_metrics_selects_the_checkpoint(tmp_path: Path, other: str) -> None:
    names = ["eval/sort/avg@3", "eval/held/avg@4"]
    config = recipe(other, f"eval.best={json.dumps(names)}", "checkpoint.keep=9", "optim.lr=1e-3")
    train(config, out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for name in (*names, "eval/sort/greedy", "eval/held/greedy"):
            assert 0.0 <= row[name] <= 1.0
        assert (row["eval/sort/problems"], row["eval/held/problems"]) == (8, 3)
    means = [sum(row[name] for name in names) / 2 for row in rows]
    best = best_checkpoint(tmp_path / "run" / "checkpoints")
    assert best is not None
    assert best.value == pytest.approx(max(means))
    assert best.step == 1 + means.index(max(means))
    assert best.metric == "mean of eval/sort/avg@3, eval/held/avg@4"
    assert "eval/held/before" in rows[0]


def test_another_metric_starts_anew_after_a_resume(tmp_path: Path, other: str) -> None:
    first = ["checkpoint.every=1", "optim.lr=1e-3", "trainer.steps=2", "eval.best=eval/sort/greedy"]
    train(recipe(other, *first), out=tmp_path / "run")
    marked = best_checkpoint(tmp_path / "run" / "checkpoints")
    assert marked is not None
    assert marked.metric == "eval/sort/greedy"
    # The checkpoint has no value of the new metric.
    second = ["trainer.prompts=4", "eval.every=1", "eval.problems=8", "eval.samples=5", "checkpoint.every=1"]
    second += ["optim.lr=1e-3", "trainer.steps=3", "eval.best=eval/sort/avg@5"]
    train(load_config("laboratory", second), out=tmp_path / "run", resume=True)
    marked = best_checkpoint(tmp_path / "run" / "checkpoints")
    assert marked is not None
    assert (marked.step, marked.metric) == (3, "eval/sort/avg@5")
