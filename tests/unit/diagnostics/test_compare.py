"""Runs side by side: what belongs together, and the numbers of the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from trimtab.diagnostics.compare import _seeds, find_runs, group_runs, held_out, write_comparison
from trimtab.errors import TrimtabError


@pytest.fixture(scope="module")
def grid(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    for seed in (0, 1):
        make_run(folder / "dapo" / f"seed{seed}", steps=6, seed=seed, objective="dapo", final_reward=0.2 + 0.2 * seed)
        make_run(folder / "token-tis" / f"seed{seed}", steps=6, seed=seed, final_reward=0.8)
    return folder


def test_seeds_of_one_recipe_belong_together(grid: Path) -> None:
    groups = group_runs(find_runs(grid))
    assert {label: [run.name for run in runs] for label, runs in groups.items()} == {
        "dapo": ["seed0", "seed1"],
        "token-tis": ["seed0", "seed1"],
    }


def test_one_objective_with_other_settings_is_another_group(make_run: Callable[..., Path], tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a", steps=2), make_run(tmp_path / "b", steps=3)
    assert list(group_runs([first, second])) == [f"token-tis ({first})", f"token-tis ({second})"]


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="holds no run"):
        find_runs(tmp_path)


def test_page_and_picture(grid: Path, tmp_path: Path) -> None:
    page = write_comparison(group_runs(find_runs(grid)), tmp_path / "report.html").read_text()
    with Image.open(tmp_path / "comparison.png") as picture:
        assert picture.width > 1500
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 50, "something is drawn"
    assert page.count("<svg") == 3
    # dapo ends at 0.95 * 0.2 and 0.95 * 0.4, token-tis at 0.95 * 0.8.
    for cell in ("0.190", "0.380", "0.285", "0.760"):
        assert f">{cell}<" in page
    assert "clip(r_t, 0.8, 1.28)" in page, "every objective's own equation"
    assert "min(ρ_t, 2)" in page


def test_summary_for_the_terminal(grid: Path) -> None:
    assert held_out(group_runs(find_runs(grid))) == {
        "dapo, held-out accuracy after": "0.190  0.380  (mean 0.285)",
        "token-tis, held-out accuracy after": "0.760  0.760  (mean 0.760)",
    }


def test_mean_and_range_cover_the_steps_all_seeds_have() -> None:
    axes = Figure().add_subplot()
    long = (np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.0, 3.0, 4.0]))
    short = (np.array([2.0, 4.0]), np.array([4.0, 0.0]))
    _seeds(axes, [long, short], "black", "-", "label")
    mean = next(line for line in axes.lines if line.get_label() == "label")
    assert np.asarray(mean.get_xdata()).tolist() == [2, 4]
    assert np.asarray(mean.get_ydata()).tolist() == [3, 2]
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == 0
    assert band[:, 1].max() == 4


def test_a_run_that_measured_nothing_shows_a_dash(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    page = write_comparison({"only": [run]}, tmp_path / "report.html").read_text()
    assert page.count(">–<") == 5
    assert held_out({"only": [run]}) == {"only, held-out accuracy after": "not measured"}


def test_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="nothing to compare"):
        write_comparison({"a": []}, tmp_path / "report.html")
