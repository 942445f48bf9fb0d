"""The page of several runs and its data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fake_run import relog

from trimtab.report.comparison import as_data, compare, list_accuracies, write_page
from trimtab.report.groups import find_runs
from trimtab.report.step_curves import draw_panels

pytestmark = pytest.mark.e2e

FEW = ("step", "reward/mean", "eval/arithmetic/greedy", "eval/arithmetic/before")


@pytest.fixture(scope="module")
def grid(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    for seed in (0, 1, 2):
        make_run(folder / "dapo" / f"seed{seed}", steps=6, seed=seed, objective="dapo", final_reward=0.2 + 0.2 * seed)
        make_run(folder / "token-tis" / f"seed{seed}", steps=6, seed=seed, final_reward=0.8)
    return folder


@pytest.fixture(scope="module")
def page(grid: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(compare(find_runs(grid)), tmp_path_factory.mktemp("page") / "report.html").read_text()


def test_the_table_has_means_intervals_and_the_best(page: str) -> None:
    # dapo ends at 0.95 * 0.2, 0.95 * 0.4, 0.95 * 0.6; token-tis at 0.95 * 0.8 with every seed.
    cells = re.findall(r'<td class="num">(.*?)</td>', page, re.DOTALL)
    assert any(re.fullmatch(r"<bdi>0.380</bdi>\s*<br><span [^>]*>\[0.190, 0.570\]</span>", cell) for cell in cells)
    assert "<strong>0.760</strong>" in cells
    assert "or the range of fewer than 5 seeds." in page


def test_curves_equations_and_differences_are_there(page: str) -> None:
    for title in ("Training reward", "Held-out greedy accuracy", "Mismatch k3", "1st percentile", "Learning rate"):
        assert title in page
    assert page.count('role="img"') == 10, "twelve panels; nothing was clipped and no rejection logged"
    assert "0 in all runs: clipped tokens, share." in page
    assert "Logged by no run: rejected tokens, share." in page
    assert page.count('<pre class="copy">') == 2, "an equation for each objective"
    assert '<td class="mono"><bdi>objective.name</bdi></td>' in page
    assert "Before comparing" not in page, "these runs are alike"
    assert "optim.lr" not in page, "equal in all runs"
    assert "trainer.steps" not in page


def test_the_data_for_programs(grid: Path) -> None:
    comparison = compare(find_runs(grid))
    assert list_accuracies(comparison.groups) == {
        "dapo, held-out accuracy after": "0.190  0.380  0.570  (mean 0.380)",
        "token-tis, held-out accuracy after": "0.760  0.760  0.760  (mean 0.760)",
    }
    data = as_data(comparison)
    data = json.loads(json.dumps(data, allow_nan=False, default=str))
    assert [group["name"] for group in data["groups"]] == ["dapo", "token-tis"]
    after = data["groups"][0]["results"]["accuracy"]
    assert after == {"mean": pytest.approx(0.38), "low": 0.19, "high": 0.57, "seeds": 3, "interval": "range of 3 seeds"}
    assert [run["accuracy"] for run in data["groups"][0]["runs"]] == [0.19, 0.38, 0.57]
    assert [run["steps"] for run in data["groups"][0]["runs"]] == [6, 6, 6]
    assert "accuracy" in data["groups"][1]["best"]
    assert data["differences"] == {"objective.name": {"dapo": "dapo", "token-tis": "token-tis"}}
    assert data["warnings"] == []
    assert "min(ρ_t, 2)" in data["groups"][1]["equation"]


def test_twenty_groups_fit_on_a_page(make_run: Callable[..., Path], tmp_path: Path) -> None:
    keys = ("step", "reward/mean", "mismatch/k3")
    paths = [make_run(tmp_path / f"r{index}", steps=index + 1, every=99, keys=keys) for index in range(20)]
    comparison = compare(paths)
    page = write_page(comparison, tmp_path / "report.html").read_text()
    assert "<h1>20 groups of runs</h1>" in page
    assert "only the means are drawn" in page
    assert len({group.name for group in comparison.groups}) == 20
    assert page.count('class="swatch"') == 20 * 3
    assert len(page) < 2_000_000


def test_unfinished_runs_and_missing_metrics(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """One run stopped half way, one logged rewards alone, one has not begun."""
    whole = make_run(tmp_path / "whole", steps=8, objective="dapo", every=99, keys=FEW)
    half = make_run(tmp_path / "half", steps=8, seed=1, objective="dapo", every=99, keys=FEW)
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:30])
    poor = make_run(tmp_path / "poor", steps=8, every=99, keys=("step", "reward/mean"))
    begun = make_run(tmp_path / "begun", steps=8, seed=2, every=99)
    (begun / "metrics.jsonl").write_text("")
    comparison = compare([whole, half, poor, begun])
    page = write_page(comparison, tmp_path / "report.html").read_text()
    assert f"{begun} has no finished step yet" in "\n".join(comparison.cautions)
    assert "Before comparing" in page
    assert "1 of 2" in page, "a mean over part of the seeds says so"
    assert "Not logged by token-tis." in page
    [reward] = [chart for chart in draw_panels(comparison.groups)[0] if chart.title == "Training reward"]
    assert "<svg" in reward.svg


def test_a_run_that_measured_nothing_but_its_steps(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=2, every=99, keys=("step",))
    comparison = compare([run])
    page = write_page(comparison, tmp_path / "report.html").read_text()
    assert 'role="img"' not in page
    assert list_accuracies(comparison.groups) == {"token-tis, held-out accuracy after": "not measured"}


def test_hostile_names_are_text(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Folders, descriptions and reports' links come from outside."""
    folder = tmp_path / 'javascript:alert(1)#"><script>x' / "seed0"
    run = make_run(folder, steps=2, every=99, keys=("step", "reward/mean"))
    (run / "report.html").write_text("the run's own")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("Two-digit addition", r"<img src=x onerror=alert(2)>"))
    second = make_run(tmp_path / "_b$x^2$", steps=2, objective="dapo", every=99, keys=("step", "reward/mean"))
    page = write_page(compare([run, second]), tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    links = re.findall(r'href="([^"#]*)"', page)
    assert "./javascript%3Aalert%281%29%23%22%3E%3Cscript%3Ex/seed0/report.html" in links
    assert all(link.startswith("./") for link in links)


def test_calibrated_bounds_of_each_seed_are_mentioned(make_run: Callable[..., Path], tmp_path: Path) -> None:
    for seed in (0, 1):
        run = make_run(tmp_path / f"seed{seed}", steps=2, seed=seed, every=99, keys=("step", "reward/mean"))
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace("calibrate = false", "calibrate = true"))
        relog(run, lambda row, seed=seed: row | {"calibrate/weight_max": 1.25 + seed})
    comparison = compare(find_runs(tmp_path))
    assert "min(ρ_t, 1.25)" in comparison.equations["token-tis"]
    assert comparison.cautions == [
        "token-tis: every seed calibrated its own bounds; the equation is that of the first seed."
    ]
