"""Where a run comes from, as its page says it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.report.groups import group_runs, list_cautions
from trimtab.report.run_report import write_report
from trimtab.runs.provenance import read_starts
from trimtab.runs.reader import read_run

START: dict[str, Any] = {
    "command": "trimtab train quickstart --out 'runs/<b>'",
    "started": "2026-11-22T12:00:00+00:00",
    "ended": "2026-11-22T14:05:00+00:00",
    "seconds": 7500.0,
    "first_step": 1,
    "last_step": 80,
    "ranks": 1,
    "versions": {"python": "3.11.2", "trimtab": "0.1.0", "torch": "2.13.0"},
    "commit": {"id": "0123abc", "modified": True},
    "hardware": {"cpu": "AMD EPYC", "cores": 2, "threads": 1, "memory": 16 * 1024**3, "gpus": ["H200", "H200"]},
}


def test_the_page_shows_every_start_and_escapes_it(small_run: Path) -> None:
    (small_run / "provenance.json").write_text(json.dumps([START | {"last_step": 40}, START | {"first_step": 41}]))
    page = write_report(read_run(small_run)).read_text()
    assert "runs/&lt;b&gt;" in page
    for words in ("<h3>Start", "Resumed", "<bdi>40</bdi>", "<bdi>41</bdi>", "H200, H200", "0123abc"):
        assert words in page


def test_a_run_without_provenance_says_so_and_a_damaged_one_is_one_line(small_run: Path) -> None:
    assert "This run has no provenance.json" in write_report(read_run(small_run)).read_text()
    for text in ("[{", "{}", "[1]", '[{"versions": []}]'):
        (small_run / "provenance.json").write_text(text)
        with pytest.raises(TrimtabError, match="delete it") as error:
            read_starts(small_run)
        assert "\n" not in str(error.value)


def test_a_comparison_warns_of_different_machines(make_run: Callable[..., Path], tmp_path: Path) -> None:
    keys = ("step", "reward/mean", "eval/arithmetic/greedy", "eval/arithmetic/before")
    runs = [make_run(tmp_path / f"seed{seed}", steps=2, seed=seed, every=9, keys=keys) for seed in (0, 1)]
    other = START | {"hardware": START["hardware"] | {"gpus": []}}
    for starts, warned in (((START, START), False), ((START, other), True)):
        for run, start in zip(runs, starts, strict=True):
            (run / "provenance.json").write_text(json.dumps([start]))
        result = list_cautions(group_runs(runs)[0])
        assert any("different versions, commits or hardware" in line for line in result) == warned
