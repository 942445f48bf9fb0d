"""Means, intervals and ranks of a grid, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markdown_it import MarkdownIt

from trimtab.errors import TrimtabError
from trimtab.report.experiment_page import (
    describe_marks,
    draw_accuracy,
    format_cell,
    format_markdown,
    rank_methods,
    write_accuracy_figure,
    write_experiment_page,
)
from trimtab.runs.summary import read_table


def row(method: str, regime: str, seed: int, accuracy: float | None) -> dict[str, Any]:
    plain = {"method": method, "regime": regime, "regime_description": f"what {regime} is", "seed": seed, "error": ""}
    plain |= {"status": "diverged" if accuracy is None else "done", "accuracy_before": 0.5, "accuracy": accuracy}
    return plain | {"curve_steps": [0, 4], "curve": [0.5, 0.6 if accuracy is None else accuracy], "seconds": 6.0}


ROWS = [
    *(row("good", "hard", seed, value) for seed, value in enumerate((0.8, 0.9))),
    *(row("even", "hard", seed, value) for seed, value in enumerate((0.85, 0.8))),
    *(row("bad", "hard", seed, value) for seed, value in enumerate((0.1, 0.3))),
    *(row("gone", "hard", seed, value) for seed, value in enumerate((0.2, None))),
    row("good", "easy", 0, 0.7),
    row("bad", "easy", 0, 0.6) | {"status": "failed", "error": "out of memory"},
    row("even", "easy", 0, None) | {"status": "refused", "seed": None, "error": "no room"},
]


def test_means_ranks_and_collapses_by_hand() -> None:
    grid = rank_methods(ROWS)
    good, even, bad, gone = (grid.scores[name, "hard"] for name in ("good", "even", "bad", "gone"))
    assert [score.accuracy.mean for score in (good, even, bad, gone)] == pytest.approx([0.85, 0.825, 0.2, 0.1])
    assert [score.rank for score in (good, even, bad, gone)] == [1, 2, 3, 4]
    # Below half of .5: one of two; then .2 and the diverged run, which counts as 0.
    assert [(score.collapsed, "†" in score.rank_text) for score in (bad, gone)] == [(1, False), (2, True)]
    assert (gone.diverged, gone.values) == (1, (0.2, 0.0))
    assert grid.before == 0.5
    assert grid.refused == {("even", "easy"): "no room"}
    assert [r["error"] for r in grid.failed] == ["out of memory"]


def test_few_seeds_have_a_range_and_five_an_interval_of_the_mean() -> None:
    """Two seeds were given a "95% bootstrap interval" of [.804, .896]."""
    few = rank_methods(ROWS)
    assert (few.scores["good", "hard"].accuracy.low, few.scores["good", "hard"].accuracy.high) == (0.8, 0.9)
    assert "mean over seeds [range of 2 seeds], #rank" in describe_marks(few)
    many = rank_methods([row("a", "r", seed, value) for seed, value in enumerate((0.1, 0.2, 0.3, 0.4, 0.5))])
    assert "[95% interval of the mean (Student's t)]" in describe_marks(many)
    assert "[" not in describe_marks(rank_methods([row("a", "r", 0, 0.5)]))


def test_the_best_is_tied_with_those_that_its_seeds_do_not_separate() -> None:
    grid = rank_methods(ROWS)
    # good - even is -.05 and .1 by seed; good - bad is .7 and .6.
    assert grid.scores["even", "hard"].behind.mean == pytest.approx(0.025)
    assert grid.scores["bad", "hard"].behind.low == pytest.approx(0.6)
    assert [grid.scores[name, "hard"].is_best for name in ("good", "even", "bad")] == [True] * 3, "two seeds"
    third = [row(name, "hard", 2, value) for name, value in (("good", 0.85), ("even", 0.8), ("bad", 0.2))]
    grid = rank_methods([*ROWS, *third])
    assert [grid.scores[name, "hard"].is_best for name in ("good", "even", "bad")] == [True, True, False]


def test_the_lead_that_would_be_seen_is_said() -> None:
    """b trails by .01 to .05: t = 4.24 is above t(4) = 2.13 at 5%. With more: test_intervals.py."""
    first = [0.9, 0.8, 0.85, 0.9, 0.9]
    second = [value - 0.01 * (seed + 1) for seed, value in enumerate(first)]
    pairs = zip("ab", (first, second), strict=True)
    grid = rank_methods([row(name, "r", seed, value) for name, values in pairs for seed, value in enumerate(values)])
    assert not grid.scores["b", "r"].is_best
    # (t(4) at 5 % + at 80 %) * .015811 / sqrt(5)
    assert grid.scores["b", "r"].detectable == pytest.approx((2.131847 + 0.940965) * 0.0158114 / 5**0.5, abs=1e-5)
    assert "seen with 80%: r 0.022 (from 0.022 to 0.022)." in describe_marks(grid)
    assert "seen with" not in describe_marks(rank_methods(ROWS))


def test_the_table_in_markdown() -> None:
    grid = rank_methods(ROWS)
    lines = format_markdown(grid).splitlines()
    assert lines[0] == "| method | hard | easy |"
    assert lines[2] == "| `good` | 0.850 [0.800, 0.900] #1 | 0.700 #1 |"
    assert lines[3].startswith("| `even` | 0.825 ")
    assert lines[3].endswith("#2= | – |")
    assert format_cell(grid, "gone", "hard").endswith("#4= †"), "two seeds separate nothing"


def test_the_name_of_a_method_stays_in_its_cell() -> None:
    name = "a|b`c``d\n| e |"
    grid = rank_methods([row(name, "r|<b>", seed, 0.9) for seed in (0, 1)])
    inner = [
        token.children or [] for token in MarkdownIt().enable("table").parse(format_markdown(grid)) if token.children
    ]
    assert [[token.content for token in cell if token.content] for cell in inner] == [
        ["method"],
        ["r|<b>"],
        [name.replace("\n", " ")],
        ["0.900 [0.900, 0.900] #1"],
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path / "results.parquet")
    return path


def test_the_page_shows_what_the_file_holds_and_escapes_it(tmp_path: Path) -> None:
    rows = [*ROWS, row("<script>", "hard", 0, 0.4), row("<script>", "hard", 1, 0.4)]
    page = write_experiment_page(
        rank_methods(read_table(written(tmp_path, rows))), tmp_path / "report.html", notes=["<b>note</b>"]
    ).read_text()
    assert "<script>" not in page
    assert "&lt;b&gt;note" in page
    assert "[0.800, 0.900]" in page
    assert "what hard is" in page
    assert "easy, even: no room" in page
    assert "easy, bad, seed 0: out of memory" in page


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"results\.parquet is damaged or missing .*: `trimtab compare"):
        read_table(tmp_path)
    (tmp_path / "results.parquet").write_bytes(b"PAR1 and not more")
    with pytest.raises(TrimtabError, match="is damaged"):
        read_table(tmp_path)
    with pytest.raises(TrimtabError, match="has no column 'method'"):
        read_table(written(tmp_path, [{"a": 1}]))
    pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "results.parquet")
    with pytest.raises(TrimtabError, match="no finished run yet"):
        read_table(tmp_path)


def test_the_figure_of_a_comparison_has_a_dot_for_each_seed_and_is_written_for_a_paper(tmp_path: Path) -> None:
    order = ("bad", "gone", "good")
    grid = rank_methods(sorted((row for row in ROWS if row["method"] in order), key=lambda row: row["method"]))
    figure = draw_accuracy(grid)
    hard, easy = figure.axes
    start, *pairs = hard.lines
    assert np.asarray(start.get_xdata()).tolist() == [0.5, 0.5]
    drawn = [tuple(np.asarray(values).tolist() for values in line.get_data()) for line in pairs]
    assert drawn == [
        ([0.1, 0.3], [0, 0]),
        ([pytest.approx(0.2)], [0]),
        ([0.2, 0.0], [1, 1]),  # one diverged
        ([pytest.approx(0.1)], [1]),
        ([0.8, 0.9], [2, 2]),
        ([pytest.approx(0.85)], [2]),
    ]
    assert len(easy.lines) == 3, "a failed run has no dot"
    written = write_accuracy_figure(grid, tmp_path / "a" / "accuracy")
    assert [path.name for path in written] == ["accuracy.png", "accuracy.svg"]
    again = write_accuracy_figure(grid, tmp_path / "b" / "accuracy")
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    text = written[1].read_text()
    assert "currentColor" not in text
    assert "<text" not in text, "letters are outlines: no font is needed"
