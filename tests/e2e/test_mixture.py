"""A run on a mixture of two tasks: metrics by task, ids in trajectory files, and the same problems after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.run_results import undocumented

from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train
from trimtab.trainer.sft import laboratory_folder

pytestmark = pytest.mark.e2e

RECIPE = """
base = "laboratory"

[task]
name = "mixture"

[[task.part]]
name = "sort"
weight = 3

[[task.part]]
name = "sort"
digits = 4
label = "short"
"""


def test_a_mixture_is_drawn_by_weight_logged_by_task_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    # The mixture would have a warm start of its own.
    model = f"model.path={laboratory_folder()}"
    small = [model, "trainer.prompts=8", "trainer.samples=2", "eval.problems=8", "log.trajectories_every=1"]

    def run(out: Path, steps: int, *, resume: bool = False) -> list[list[str]]:
        config = load_config(tmp_path / "recipe.toml", [*small, f"trainer.steps={steps}"])
        train(config, out=out, resume=resume)
        files = sorted((out / "trajectories").iterdir())
        return [[row.trajectory.prompt.problem.id for row in trajectories.read(path)] for path in files]

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    assert run(tmp_path / "parts", 4, resume=True) == whole
    names = [name.partition("/")[0] for step in whole for name in step]
    assert set(names) == {"sort", "short"}
    assert names.count("sort") > names.count("short")
    for step, row in zip(whole, read_metrics(tmp_path / "whole" / "metrics.jsonl"), strict=True):
        share = sum(name.startswith("short/") for name in step) / len(step)
        assert row.get("mixture/short/share", 0) == pytest.approx(share)
        assert undocumented(row) == []
        parts = [row.get(f"mixture/{name}/reward", 0) * row.get(f"mixture/{name}/share", 0) for name in set(names)]
        assert sum(parts) == pytest.approx(row["reward/mean"])
