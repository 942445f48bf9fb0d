"""The page: complete, self-contained, and closed to what a model says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.support.fake_run import relog
from tests.support.html_reader import Reader

from trimtab.diagnosis.answer import read_text
from trimtab.diagnosis.output.panels import view_panels
from trimtab.diagnosis.pipeline import examine
from trimtab.errors import TrimtabError
from trimtab.report.run_report import write_report
from trimtab.runs.reader import read_run

pytestmark = pytest.mark.e2e

# The page's own elements; anything else can only come from data.
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "footer", "section", "div", "ul", "li", "span", "p"),
    *("a", "h1", "h2", "h3", "figure", "figcaption", "strong", "pre", "details", "summary", "bdi", "br", "dl", "dt"),
    *("dd", "table", "thead", "tbody", "tr", "th", "td", "svg", "defs", "g", "path", "use", "clippath", "rect", "text"),
}


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return read(write_report(read_run(finished_run), tmp_path_factory.mktemp("page")))


def test_the_page_describes_the_run(page: Reader, finished_run: Path) -> None:
    rows = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert f"0.210 → {rows[-1]['eval/arithmetic/greedy']:.3f}" in page.text
    assert "min(ρ_t, 2)" in page.text, "the resolved equation with its numbers"
    assert (finished_run / "config.toml").read_text() in page.text
    for key in rows[-1]:
        assert key in page.text


def test_the_page_is_well_formed_and_loads_nothing(page: Reader) -> None:
    assert (page.open, page.active) == ([], [])
    assert set(page.tags) <= ALLOWED
    assert re.findall(r"url\((?!#)", page.source) == []
    assert "@import" not in page.source


def test_every_reference_inside_a_figure_has_its_one_target(page: Reader) -> None:
    identifiers = [value for name, value in page.attributes if name == "id"]
    assert len(set(identifiers)) == len(identifiers)
    wanted = re.findall(r'(?:url\(#|href="#)([^)"]+)', page.source)
    assert wanted
    assert set(wanted) <= set(identifiers)


def test_figures_take_their_colors_from_the_theme(page: Reader) -> None:
    figures = "".join(re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL))
    assert "var(--blue)" in figures
    assert "currentColor" in figures
    assert re.findall(r"#0072b2|#d55e00|#010203", figures, flags=re.IGNORECASE) == []


def test_what_a_model_writes_stays_text(make_run: Callable[..., Path], evil_text: str, tmp_path: Path) -> None:
    page = read(write_report(read_run(make_run(tmp_path / "run", steps=2, every=1, text=evil_text, keys=["step"]))))
    assert set(page.tags) <= ALLOWED
    assert evil_text.replace("\u202e", "\\u202e") in page.text
    assert page.active == []


def test_names_that_look_like_markup_or_mathematics_stay_names(small_run: Path) -> None:
    relog(small_run, lambda row: row | {"reward/<b>$x_$": 0.1 * row["step"], "odd<key>": 1.0})
    page = read(write_report(read_run(small_run)))
    assert "b" not in page.tags
    assert page.text.count("<b>$x_$") >= 2, "in the legend and in the table"
    assert "not documented" in page.text


def test_the_same_run_gives_the_same_bytes(small_run: Path) -> None:
    first = write_report(read_run(small_run)).read_bytes()
    assert write_report(read_run(small_run)).read_bytes() == first


def test_a_metric_outside_its_range_is_named_with_what_to_do(small_run: Path) -> None:
    healthy = read(write_report(read_run(small_run))).text
    relog(small_run, lambda row: row | {"mismatch/ess_token": 0.4321, "weight_raw/q01": 0.0123, "weight_raw/q99": 7.89})
    text = " ".join(re.sub("<[^>]*>", " ", write_report(read_run(small_run)).read_text()).split())
    assert "Outside its healthy range" not in healthy
    assert "mismatch/ess_token 0.4321 3 of 3 steps above 0.95 lower lag or mismatch" in text
    assert "weight_raw/q01 0.0123 3 of 3 steps" in text
    assert "weight_raw/q99 7.89 3 of 3 steps" in text


def test_a_run_of_one_step_without_trajectories_or_accuracy_has_a_page(small_run: Path) -> None:
    (small_run / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5, "mismatch/k3": null, "metrics/nonfinite": 1}\n'
    )
    for file in (small_run / "trajectories").iterdir():
        file.unlink()
    assert "has no trajectory file" in read(write_report(read_run(small_run))).text


def test_the_mismatch_is_that_of_the_steps_that_measured_one(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """A file of another step may lack the trainer's clean log-probs, as those of a perturbed run do."""
    run = make_run(tmp_path / "run", steps=4, every=1, keys=["step", "mismatch/k3"])

    def leave_out(*steps: int) -> None:
        relog(run, lambda row: {key: row[key] for key in row if key == "step" or row["step"] not in steps})

    leave_out(2)
    file = run / "trajectories" / "step-000002.parquet"
    clean = {"logp_current", "logp_proximal"}
    table = pq.read_table(file)
    pq.write_table(table.drop_columns([name for name in table.column_names if name in clean]), file)
    text = read(write_report(read_run(run))).text
    measured, _ = examine([file.with_name(f"step-{n:06d}.parquet") for n in (1, 3, 4)], "trimtab", {}, lambda *_: None)
    assert f"Steps 1, 3, 4: {read_text(measured.origin)}" in text
    assert all(chart.title in text for chart in view_panels(measured)[0])
    leave_out(1, 2, 3, 4)
    assert "No step with a trajectory file measured the mismatch." in read(write_report(read_run(run))).text


def test_what_the_guard_did_is_listed_and_drawn(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6, every=6, keys=["step", "reward/mean", "mismatch/k3"])
    mark = {"guard/returns": 1, "guard/continues_from": 2, "guard/event": "step 4: ess: <b>low</b>; returned"}
    relog(run, lambda row: row | (mark if row["step"] == 5 else {}))
    page = read(write_report(read_run(run)))
    assert "What the guard did" in page.text
    assert "step 4: ess: <b>low</b>; returned" in page.text
    assert "it returned once to an earlier policy and discarded 2 steps" in page.text
    assert page.source.count("returned to step 2") == 2, "in the chart of each metric"
    assert set(page.tags) <= ALLOWED


def test_long_texts_are_cut_and_marked(make_run: Callable[..., Path], tmp_path: Path) -> None:
    page = read(write_report(read_run(make_run(tmp_path / "run", steps=1, every=1, text="y" * 2_500, keys=["step"]))))
    assert "y" * 2_000 + " … (500 more characters)" in page.text
    assert "y" * 2_001 not in page.text


def test_a_page_that_cannot_be_written_is_one_line(small_run: Path) -> None:
    (small_run / "report.html").mkdir()
    with pytest.raises(TrimtabError, match=r"cannot write .*report\.html") as error:
        write_report(read_run(small_run))
    assert "\n" not in str(error.value)
    assert [item.name for item in small_run.iterdir() if item.name.startswith(".")] == [], "no temporary file is left"
