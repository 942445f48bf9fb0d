"""The page: captions state planted numbers, text of files cannot break it, and missing views are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.diagnosis_example import MISMATCH, compared, example, steps, view, views
from tests.support.html_reader import Reader

from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.output import panels
from trimtab.diagnosis.output.as_text import markdown
from trimtab.diagnosis.output.html_page import page, top_tokens, write_page
from trimtab.diagnosis.records import Cause, Measured, Numerics
from trimtab.errors import Finding
from trimtab.pages.page import Cell, Chart

pytestmark = pytest.mark.e2e

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def captions(diagnosis: Diagnosis, make: Callable[[Measured], tuple[list[Chart], list[str]]]) -> dict[str, str]:
    """What each figure says this data shows, by title."""
    return {chart.title: chart.notes[-1].text for chart in make(diagnosis.measured)[0]}


@pytest.fixture(scope="module")
def whole() -> str:
    return page(example())


def bare(**changes: Any) -> Diagnosis:
    """A diagnosis with few figures, so that its page is drawn quickly."""
    return example(**{"only": {}, **changes, "size": {"by_step": (), **changes.get("size", {})}})


def test_sections_in_order_and_the_verdict_first(whole: str) -> None:
    verdict = ("What was found", "What to do first", "How large it is", "Where it is", "Why this answer")
    sections = ("1. How large it is", "2. Where it is", "3. What kind it is", "4. What to do", "What was read")
    places = [whole.index(text) for text in (*verdict, *sections)]
    assert places == sorted(places)


def test_every_figure_outside_its_range_is_in_a_table_that_a_phone_shows_whole(whole: str) -> None:
    """Of tables with up to four columns text wraps below 640 pixels; wider ones scroll."""
    [table] = re.findall(r"<h3>All figures</h3>.*?</table>", whole, re.DOTALL)
    assert re.findall(r"<th>(.*?)</th>", table) == ["figure", "value", "95% interval", "healthy"]
    marked = re.findall(r'<span class="tag warn">(.*?)</span>', table)
    assert sorted(marked) == sorted(example().answer.outside.values())
    assert f"{len(marked)} are outside their healthy ranges, marked in the table." in whole
    assert "table:not(:has(th:nth-child(5))) .tag { white-space: normal;" in whole


def test_lines_to_copy_and_outcomes_are_there(whole: str) -> None:
    text = " ".join(Reader(whole).texts)
    assert "--use-tis --tis-clip 1.31" in text
    assert "algorithm.rollout_correction.rollout_is_threshold=1.31" in text
    recommended = re.findall(r'<tr class="best">.*?</tr>', whole, re.DOTALL)
    assert len(recommended) == 1, "one row is the recommended one"
    assert "weight_max=1.31" in recommended[0]
    assert 'style="width: 1.0%"' in recommended[0], "1% of the weights changed"


def test_text_of_files_is_escaped_everywhere() -> None:
    evil = bare(
        causes=(Cause("stale", 0.5, EVIL, EVIL),),
        origin={
            "dropped": {EVIL: 2},
            "missing": {EVIL: EVIL},
            "nonfinite": {EVIL: 3},
            "findings": (Finding("note", EVIL, EVIL, EVIL),),
        },
        size={"floor_note": EVIL},
        only={
            "token": views(hostile=EVIL)["token"],
            "turn": view("turn", [EVIL, "2"], [50, 50], [0.1, 0.2]),  # a label inside a figure
        },
    )
    text = page(evil)
    reader = Reader(text)
    assert reader.active == []
    assert text.count("&lt;script&gt;") >= 8


def test_captions_of_the_views_state_planted_numbers() -> None:
    result = captions(example(), panels.view_panels)
    assert result["k3 by age of the weights"] == (
        "k3 1.1e-3 at 0, 0.01 at 5-8; highest 0.01 at 5-8. Mean log-ratio −1.1e-3 at 0, −0.01 at 5-8."
    )
    # Width of the rarest bin: 4 sqrt(2 * 0.12) = 1.96; its k3 is 120 of 91,000 * 0.0048 = 436.8 nats.
    assert result["Log-ratio by probability"].startswith(
        "Widest at <1e-3 (2 nats, 1.1% of the tokens, 27% of the mismatch); 2 at <1e-3, 0.13 at 0.5 to 1."
    )
    assert result["k3 by position"].startswith("k3 4.0e-3 at 0-10%, 6.0e-3 at 90-100%; highest 6.0e-3 at 90-100%.")
    assert result["Log-ratio by entropy"].endswith("Mean log-ratio −5.0e-4 at 0 to 0.5, −0.03 at 2 to 4.")


def test_captions_over_steps_and_of_the_scatter_state_planted_numbers() -> None:
    plane = np.zeros((50, 50), dtype=np.int64)
    plane[10, 10], plane[40, 10] = 97, 3
    planted = example()
    result = captions(replace(planted, measured=replace(planted.measured, scatter=plane)), panels.size_panels)
    assert result["Trainer against sampler"] == "100 tokens, 3.0% of them more than 0.05 away from the line."
    # First and last quarter: medians of steps 3 and 18, .002 (1 + .15 * 2) and .002 (1 + .15 * 17).
    assert (
        result["k3 over steps"] == "Median of the first quarter 2.6e-3, of the last 7.1e-3; highest 7.7e-3 at step 20."
    )
    assert result["ESS over steps"] == (
        "token weights 1 at first, 0.98 at last; sequence weights 0.9 at first, 0.23 at last."
    )


def test_a_jump_at_one_turn_is_named() -> None:
    turns = view("turn", ["-1", "0", "+1", "elsewhere"], [500, 500, 500, 89500], [0.001, 0.9, 0.002, 0.001])
    result = example(only={"turn": turns})
    caption = captions(result, panels.view_panels)["k3 around the borders of turns"]
    assert "highest 0.9 at 0." in caption
    # 450 nats; the whole is set to 500.
    of_half = example(only={"turn": turns}, size={"mismatch": {**MISMATCH, "k3": 500 / 91000}})
    assert of_half.answer.where == "tokens from the border of a turn: 0 (0.5% of the tokens, 90% of the mismatch)"


def test_top_tokens_are_ranked_by_their_share_of_k3() -> None:
    rows = top_tokens(example())
    assert [row[0] for row in rows] == ["13", "1234", "220", "17"]
    # 51,200 * 0.0032 = 163.84 and 800 * 0.2 = 160 of 91,000 * 0.0048 = 436.8 nats.
    cells = [row[4] for row in rows if isinstance(row[4], Cell)]
    assert [cell.text for cell in cells] == ["38%", "37%", "14%", "8.2%"]
    assert [cell.share for cell in cells] == pytest.approx([nats / 436.8 for nats in (163.84, 160, 60, 36)])
    assert rows[1][3] == "0.9%"


def test_texts_of_ids_stand_beside_them_escaped() -> None:
    tokens = view("token", ["7", "other"], [50, 50], [0.1, 0.2], columns={"id": np.array([7, -1])})
    result = replace(bare(only={"token": tokens}), texts={7: EVIL})
    assert [tuple(row[:2]) for row in top_tokens(result)] == [("other", ""), ("7", EVIL)]
    text = page(result)
    assert "&lt;script&gt;" in text
    assert "<script" not in text


def test_missing_views_are_one_line_and_no_empty_figure() -> None:
    result = example(size={"by_step": ()}, only={"probability": views()["probability"]})
    text = page(result)
    assert "Not shown: curves over steps (the files do not say which step a response is of)." in text
    assert "Not shown: position in the response; length of the response, tokens; tokens from the border of" in text
    assert "the files have no token ids" in text
    assert text.count("<svg") == 3, "the range, the scatter and the envelope"


def test_a_single_step_and_a_single_age_are_no_curves() -> None:
    result = example(size={"by_step": steps(1)}, only={"version": view("version", ["0"], [10], [0.1])})
    assert panels.size_panels(result.measured)[1] == ["curves over steps (the files have one step)"]
    assert "age of the weights, optimizer updates (only 0 in this data)" in panels.view_panels(result.measured)[1]


def test_a_page_without_figures_is_written() -> None:
    empty = view("probability", ["a", "b"], [0, 0], [0.0, 0.0], edges=np.array([0, 0.5, 1.0]))
    nan = {key: float("nan") for key in example().measured.size.mismatch}
    text = page(bare(causes=(), size={"mismatch": nan, "intervals": {}}, only={"probability": empty}))
    assert "nan" not in " ".join(Reader(text).texts).lower().split()


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    written = write_page(bare(), tmp_path / "new" / "d.html")
    assert written.read_text().rstrip().endswith("</html>")


def test_a_reader_of_an_issue_finds_versions_settings_the_command_and_the_lines() -> None:
    import platform
    from importlib.metadata import version

    sample = replace(
        bare().measured.sample,
        temperature=np.array([0.7, 1.0, np.nan]),
        top_p=np.array([0.9, 0.9, 0.9]),
        raw=np.zeros(3, dtype=bool),
    )
    diagnosis = bare(origin={"numerics": Numerics("int8", "float32", "none", ("engine.quantize = int8",))})
    diagnosis = replace(diagnosis, measured=replace(diagnosis.measured, sample=sample))
    texts = Reader(page(diagnosis, "trimtab diagnose 'a<b>.jsonl'")).texts
    for name in ("trimtab", "torch", "numpy"):
        assert any(f"{name} {version(name)}" in text for text in texts)
    assert any(f"Python {platform.python_version()}" in text for text in texts)
    assert markdown(diagnosis, None, "trimtab diagnose 'a<b>.jsonl'") in texts, "the text to paste, whole"
    [issue] = [text for text in texts if text.startswith("**")]
    assert "command: `trimtab diagnose 'a<b>.jsonl'`" in issue
    assert "temperature 0.7 or 1, top\\_p 0.9, processed log-probs" in issue
    assert "sampler int8, trainer float32, engine.quantize = int8" in issue


def test_a_comparison_stands_first_with_its_table() -> None:
    comparison = replace(compared(bare(), (EVIL, "old.jsonl")), paired="", pairs=0)
    text = page(bare(), "", comparison)
    assert "<script" not in text
    texts = [part.strip() for part in Reader(text).texts]
    order = ["A against B", "2 times (1.5 to 2.5), more than chance", "What was found"]
    assert [part for part in texts if part in order] == order
    [first] = [part for part in texts if part.startswith("k3 in A relative to B: 2 times")]
    assert texts.index(first) < texts.index("A against B")
