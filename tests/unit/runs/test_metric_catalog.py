"""The table of metrics: complete against what the code logs, and usable by pages and charts."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests.contract.conftest import Batch
from tests.support.run_results import undocumented

from trimtab.objectives import mismatch, objective, objectives
from trimtab.runs.metric_catalog import Metric, metric, sections

SCRIPT = Path(__file__).parents[3] / "docs" / "metrics.py"


def test_the_page_has_a_row_for_each_metric_and_none_breaks_its_table() -> None:
    page = runpy.run_path(str(SCRIPT))["markdown"]()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == [one.key for section in sections() for one in section.metrics]
    assert {len(re.split(r"(?<!\\)\|", line)) for line in rows} == {8}


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/my_module:score", "reward/<name>"),
        ("eval/gsm8k.main/greedy", "eval/<task>/greedy"),
        ("mismatch/ratio_q05", "mismatch/ratio_<quantile>"),
        ("mismatch/ratio_mean", "mismatch/ratio_mean"),
        ("reject/veto", "reject/<rule>"),
        ("reject/band_token_2/sequences", "reject/<rule>/sequences"),
        ("time/collect", "time/<phase>"),
    ],
)
def test_a_key_finds_its_row(key: str, row: str) -> None:
    result = metric(key)
    assert result.key == row


@pytest.mark.parametrize(
    "key", ["reward/a/b", "eval/x/sampled", "mismatch/ratio_q5", "ratio/typo", "weight/qq50", "new", "xstep", "reward/"]
)
def test_an_undocumented_key_is_reported(key: str) -> None:
    assert undocumented(["step", key, "reward/mean"]) == [key]


@pytest.mark.parametrize("name", objectives())
def test_every_key_of_every_preset_is_documented(name: str) -> None:
    batch = Batch.random(0)
    out = objective(name, kl_coef=0.1, entropy_coef=0.01)(batch.logps(), batch.advantage)
    measured = mismatch(batch.proximal, batch.behavior, batch.mask).finalize()
    keys = [*out.metrics.finalize(), *(f"mismatch/{key}" for key in measured)]
    assert len(keys) > 20
    assert undocumented(keys) == []


def test_rows_are_unique_and_their_bands_are_not_upside_down() -> None:
    rows = [row for part in sections() for row in part.metrics]
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert row.what.endswith("."), row.key
        assert not row.healthy.endswith("."), row.key
        if row.low is not None and row.high is not None:
            assert row.low <= row.high, row.key


def test_curves_of_one_chart_are_of_one_section_and_have_names_and_one_axis() -> None:
    charts: dict[str, list[Metric]] = {}
    for part in sections():
        titles = {row.chart for row in part.metrics if row.chart}
        assert not titles & charts.keys()
        for row in part.metrics:
            assert row.chart or not (row.curve or row.log or row.bound), row.key
            charts.setdefault(row.chart, []).append(row)
    del charts[""]
    for title, rows in charts.items():
        assert len({row.curve for row in rows}) == len(rows), title
        assert len({row.log for row in rows}) == 1, title
