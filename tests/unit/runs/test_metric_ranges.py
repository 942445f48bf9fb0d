"""One table of ranges: report.html and `diagnose` judge the same figure of the same run alike."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_run import fake_run, relog

import trimtab
from trimtab.diagnosis.output.as_text import terminal_text
from trimtab.diagnosis.output.html_page import page
from trimtab.report.run_report import write_report
from trimtab.runs.metric_catalog import band_text, bounds, judge, k3_range, k3_ranges, metric, sections
from trimtab.runs.reader import read_run
from trimtab.text import beside, number


def test_both_ends_of_a_band_are_healthy() -> None:
    rows = [row for part in sections() for row in part.metrics if "<" not in row.key]
    low = [(row.key, row.low) for row in rows if row.low is not None]
    high = [(row.key, row.high) for row in rows if row.high is not None]
    assert min(len(low), len(high)) > 3
    assert {judge(key, bound) for key, bound in low + high} == {"healthy"}
    assert {judge(key, math.nextafter(bound, -math.inf)) for key, bound in low} == {"outside"}
    assert {judge(key, math.nextafter(bound, math.inf)) for key, bound in high} == {"outside"}


def test_what_is_not_judged_and_the_bands_in_words() -> None:
    """No number, no band, no row; a row for several keys judges each of them."""
    assert (judge("mismatch/k3", math.inf), judge("mismatch/ratio_q01", 0.7)) == ("outside", "outside")
    assert [judge("mismatch/k3", value) for value in (None, "proximal", math.nan, True)] == [""] * 4
    assert judge("reward/mean", 0.5) == judge("nobody/knows", 0.5) == ""
    assert band_text("mismatch/pearson") == "0.95 to 1"
    assert band_text("mismatch/k3") == "at most 0.01"
    assert band_text("reward/std") == "at least 1e-06"


def test_the_ranges_of_k3_cover_the_scale_and_end_where_it_stops_being_healthy() -> None:
    ranges = list(k3_ranges().values())
    ends = [part.high for part in ranges]
    assert ends == sorted(ends)
    assert ends[-1] == math.inf
    row = metric("mismatch/k3")
    # No range is half healthy: the words of each say one thing.
    assert row.high in ends
    names = {1e-11: "exact", 1e-8: "exact", 2e-4: "dense", 1.5e-3: "small-dense", 1e-2: "small-dense", 0.02: "moe"}
    assert {k3: k3_range(k3).name for k3 in names} == names
    assert k3_range(0.2).name == k3_range(math.nan).name == "beyond"


@pytest.mark.e2e
# k3 is about noise² / 2: 7e-3 and .2.
@pytest.mark.parametrize(("noise", "healthy"), [(0.12, True), (0.6, False)])
def test_report_and_diagnose_agree_on_one_run(tmp_path: Path, noise: float, healthy: bool) -> None:
    run = fake_run(tmp_path / "run", steps=10, noise=noise, keys=["step"])
    diagnosis = trimtab.diagnose(run)
    figures = diagnosis.measured.size.mismatch
    # Every step logs exactly what the files say, so that both judge the same numbers.
    relog(run, lambda row: row | {f"mismatch/{key}": value for key, value in figures.items()})
    # What the table of metrics of report.html says of each figure of the mismatch.
    row = r'<td class="mono"><bdi>mismatch/(\w+)</bdi></td>(.*?)</tr>'
    found = re.findall(row, write_report(read_run(run)).read_text(), re.DOTALL)
    marks = {key: next(iter(re.findall(r">(healthy|outside)<", rest)), "") for key, rest in found}
    assert marks["k3"] == ("healthy" if healthy else "outside")
    assert {key for key, mark in marks.items() if mark == "outside"} == set(diagnosis.answer.outside)
    words = terminal_text(diagnosis)
    size = next(line for line in words.splitlines() if line.startswith("size"))
    assert ("too much" in size or "beyond" in size) != healthy
    assert ('spaced verdict good"' in page(diagnosis)) <= healthy


@given(st.sampled_from([row.key for part in sections() for row in part.metrics]), st.floats(1e-6, 1e3), st.booleans())
def test_a_figure_beside_its_bounds_is_on_the_same_side_of_them_as_the_value(
    key: str, near: float, above: bool
) -> None:
    for bound in bounds(key):
        value = bound * (1 + 1e-3 * (1 if above else -1)) if math.isfinite(bound) and bound else near
        shown = float(beside(value, bounds(key)))
        assert [shown > end for end in bounds(key)] == [value > end for end in bounds(key)]
        assert [shown < end for end in bounds(key)] == [value < end for end in bounds(key)]


def test_digits_are_added_only_where_two_would_mislead() -> None:
    assert [beside(value, [0.95, 1.0]) for value in (0.97, 0.9697, 0.9499, 0.999, 1.0, 0.9999999)] == [
        *("0.97", "0.97", "0.9499", "0.999", "1", "0.9999999")
    ]
    assert beside(0.01004, [0.01]) == "0.01004"
    assert beside(1.2e-5, [0.01]) == "1.2e-5"
    assert beside(math.nan, [0.01], number) == "–"
