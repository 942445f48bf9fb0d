"""The section on tokens as a whole: which files it reads, what it shows of each kind of run, what it says instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import escape

from trimtab.diagnosis.measure.sample import Sample
from trimtab.errors import TrimtabError
from trimtab.pages.page import Card, Charts, Note, Part, Table
from trimtab.report import token_section as token_section_module
from trimtab.report.run_report import write_report
from trimtab.report.token_section import token_section
from trimtab.runs.reader import read_run
from trimtab.trainer.models import laboratory

pytestmark = pytest.mark.e2e

NAN = float("nan")


@pytest.fixture
def folder(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    """A run of a bypass objective that wrote no trajectory file yet."""
    return make_run(tmp_path / "run", steps=3, every=9, objective="token-bypass", keys=["step"])


def _write(folder: Path, step: int, **columns: Any) -> None:
    path = folder / "trajectories" / f"step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)


def _plain(rows: int = 20, **columns: Any) -> dict[str, Any]:
    """Responses of two tokens, of probability 0.5 and 0.25; the trainer makes the second one e^0.3 likelier."""
    return {
        "group": list(range(rows)),
        "reward": [1.0] * rows,
        "response_ids": [[7, 8]] * rows,
        "logp_behavior": [[np.log(0.5), np.log(0.25)]] * rows,
        "logp_current": [[np.log(0.5), np.log(0.25) + 0.3]] * rows,
        "advantage": [1.0] * rows,
        **columns,
    }


class Shown:
    """The parts of the section: its first note, figures by title, what is not shown, and tables by title."""

    def __init__(self, parts: list[Part]) -> None:
        notes = [part.text for part in parts if isinstance(part, Note)]
        self.note = notes[0]
        self.absent = notes[1].removeprefix("Not shown: ").removesuffix(".").split("; ") if len(notes) > 1 else []
        self.charts = {chart.title: chart for part in parts if isinstance(part, Charts) for chart in part.shown}
        self.cuts = next((part for part in parts if isinstance(part, Card)), None)

    def what(self, title: str) -> str:
        return self.charts[title].notes[0].text


def _section(folder: Path) -> Shown:
    return Shown(token_section(read_run(folder)))


def test_a_run_without_trajectory_files_has_no_section(folder: Path) -> None:
    assert token_section(read_run(folder)) == []


def test_numbers_of_a_small_run_by_hand(folder: Path) -> None:
    _write(folder, 1, **_plain(entropy=[[1.0, 2.0]] * 20))
    _write(folder, 3, **_plain(entropy=[[1.0, 2.0]] * 20))
    section = _section(folder)
    assert section.note == "From the trajectory files of steps 1, 3: 40 responses."
    assert section.absent == []
    assert section.cuts is None
    assert list(section.charts) == [
        "Log-ratio envelope",
        "Trainer against sampler",
        "Entropy by position",
        "Clipped tokens by position",
    ]
    # e^0.3 = 1.35 is beyond 1.2 with a positive advantage: every second token.
    assert section.charts["Clipped tokens by position"].now == "50% of all"
    assert "Here r = π/μ; clipped: A < 0 and r < 0.8, or A > 0 and r > 1.2." in section.what(
        "Clipped tokens by position"
    )
    assert section.charts["Trainer against sampler"].now == "r = 1.00000"
    assert "40 tokens" in section.what("Trainer against sampler")
    assert "step 1<" in section.charts["Log-ratio envelope"].svg
    assert "step 3<" in section.charts["Log-ratio envelope"].svg


def test_external_traces_and_broken_rows_are_counted_and_change_nothing(folder: Path) -> None:
    _write(folder, 1, **_plain())
    clean = _section(folder)
    broken = _plain(22)
    broken["logp_behavior"] = [*broken["logp_behavior"][:20], [NAN, NAN], [NAN, -0.5]]
    broken["off_policy"] = [False] * 20 + [True, False]
    _write(folder, 1, **broken)
    section = _section(folder)
    assert section.note == (
        "From the trajectory files of steps 1: 22 responses. Left out: 1 of external traces, which have no behavior "
        "policy, and 1 with a log-prob that is not finite."
    )
    assert section.charts == clean.charts


def test_a_run_of_external_traces_alone_says_so_for_every_figure(folder: Path) -> None:
    _write(folder, 1, **_plain(logp_behavior=[[NAN, NAN]] * 20, off_policy=[True] * 20))
    section = _section(folder)
    assert section.charts == {}
    assert len(section.absent) == 4
    assert all("no response is left" in reason for reason in section.absent)


def test_missing_columns_cost_their_own_figures_only(folder: Path) -> None:
    columns = _plain(entropy=[[1.0, 2.0]] * 20)
    del columns["logp_current"], columns["advantage"]
    _write(folder, 1, **columns)
    section = _section(folder)
    assert list(section.charts) == ["Entropy by position"]
    assert section.absent == [
        "log-ratio envelope (the files have no log-prob of the trainer)",
        "trainer against sampler probability (the files have no log-prob of the trainer)",
        "clipped tokens by position (the files hold no log-prob of the trainer)",
    ]


def test_responses_of_one_token_are_drawn(folder: Path) -> None:
    _write(
        folder,
        1,
        **_plain(
            response_ids=[[7]] * 20,
            logp_behavior=[[-0.5]] * 20,
            logp_current=[[-0.5]] * 20,
            entropy=[[0.5]] * 20,
            policy_version=[[3]] * 20,
        ),
    )
    section = _section(folder)
    assert section.charts["Trainer against sampler"].now == "r not defined"
    assert len(section.charts) == 4
    assert section.cuts is None


def test_a_perturbed_run_is_read_at_its_probe_steps(folder: Path) -> None:
    noisy = _plain(logp_perturbed=[[np.log(0.5), np.log(0.25) + 0.3 + np.log(1.1)]] * 20)
    _write(folder, 1, **noisy)
    _write(folder, 3, **noisy)
    blind = {name: values for name, values in noisy.items() if not name.startswith(("logp_c", "logp_p"))}
    _write(folder, 2, **blind)
    rows = [{"step": 1, "mismatch/k3": 0.1}, {"step": 2}, {"step": 3, "mismatch/k3": 0.1}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = _section(folder)
    assert section.note.startswith("From the trajectory files of steps 1, 3:")
    # Half of the tokens move by 0.25 e^0.3 (1.1 - 1) = 0.0337; the quartile is among them.
    assert section.charts["Change of probability"].now == "75th percentile 0.034"
    assert "50.0% of the tokens did not move" in section.what("Change of probability")


def test_noise_without_effect_is_reported(folder: Path) -> None:
    columns = _plain()
    _write(folder, 1, **columns, logp_perturbed=columns["logp_current"])
    section = _section(folder)
    assert "Change of probability" not in section.charts
    assert section.absent[0] == ("change of probability (at step 1 no token's probability changed: no noise arrived)")


def test_an_objective_over_proximal_says_why_nothing_is_clipped(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, every=9, objective="dapo", keys=["step"])
    _write(folder, 1, **_plain())
    assert _section(folder).absent[-1] == (
        "clipped tokens by position (dapo clips π/π_old, which is 1 in the first update on a batch, so no token is "
        "clipped)"
    )


def test_an_objective_over_proximal_shows_what_its_later_updates_clipped(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", steps=2, every=9, objective="dapo", keys=["step"])
    _write(folder, 1, **_plain())
    tenths = {f"clip/tenth/{n}": 0.01 * n for n in range(1, 11, 3)}  # responses of four tokens
    rows = [{"step": 1} | tenths, {"step": 2} | {key: 3 * value for key, value in tenths.items()}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = _section(folder)
    assert (
        section.charts["Clipped tokens by position"].now == "11% of all"
    )  # .02, .08, .14 and .2 in the mean of both steps
    assert "In the first update on a batch the ratio to π_old is 1" in section.what("Clipped tokens by position")


def _prefixed() -> dict[str, Any]:
    # Version 4 begins with the token 1 (or 2), version 6 goes on with 3; one response has no prefix.
    return _plain(
        response_ids=[[1, 3]] * 12 + [[2, 3]] * 6 + [[5, 5]] * 2,
        policy_version=[[4, 6]] * 18 + [[6, 6]] * 2,
        entropy=[[0.5, 2.0]] * 20,
    )


def test_tokens_at_truncation_points_with_their_texts(folder: Path) -> None:
    _write(folder, 1, **_prefixed())
    _write(folder, 2, **_prefixed())
    _, tokenizer = laboratory.build(0)
    tokenizer.save_pretrained(folder / "model")
    cuts = _section(folder).cuts
    assert isinstance(cuts, Card)
    assert cuts.now == "36 places"
    assert [part.rows for part in cuts.parts if isinstance(part, Table)] == [
        [["1", "1", "24", "66.7%", "0.5"], ["2", "2", "12", "33.3%", "0.5"]],
        [["3", "3", "36", "100.0%", "2"]],
    ]


@pytest.mark.parametrize("content", [None, "{}"])
def test_without_a_tokenizer_ids_are_shown_and_the_reason(folder: Path, content: str | None) -> None:
    _write(folder, 1, **_prefixed())
    if content is not None:
        (folder / "model").mkdir()
        (folder / "model" / "tokenizer.json").write_text(content)
    cuts = _section(folder).cuts
    assert isinstance(cuts, Card)
    note, before, _ = cuts.parts
    assert isinstance(note, Note)
    assert isinstance(before, Table)
    assert "model/tokenizer.json cannot be read" in note.text
    assert [row[0] for row in before.rows] == ["–", "–"]
    assert escape(note.text) in write_report(folder).read_text()


def test_a_large_file_is_sampled_evenly_and_the_note_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_section_module, "Sample", lambda: Sample(tokens=200))
    _write(folder, 1, **_plain(1000))
    section = _section(folder)
    assert section.note == "From the trajectory files of steps 1: 1,000 responses, an even sample of 100."
    assert "200 tokens" in section.what("Trainer against sampler")


def test_rows_are_counted_by_the_reason_they_are_left_out_for(folder: Path) -> None:
    rows = _plain(4, entropy=[[1.0, 2.0]] * 3 + [[1.0]])
    rows["logp_behavior"] = [[NAN, NAN], [-np.inf, -0.2], [-0.3, NAN], [-0.1, -0.2]]
    rows["off_policy"] = [True, None, False, False]
    rows["loss_mask"] = [[True, True], [True, True], [True, False], [True, True]]
    # The last token of the third row is not trained: nobody reads what stands there.
    _write(folder, 1, **rows)
    assert _section(folder).note == (
        "From the trajectory files of steps 1: 4 responses. Left out: 1 of external traces, which have no behavior "
        "policy, and 1 (lists of different lengths), and 1 with a log-prob that is not finite."
    )


def test_the_proximal_policy_comes_before_the_current_one(folder: Path) -> None:
    _write(folder, 1, **_plain(logp_proximal=[[np.log(0.5), np.log(0.25)]] * 20))
    assert "(clean proximal policy)" in _section(folder).what("Trainer against sampler")


def test_a_file_without_rows_has_no_response_left(folder: Path) -> None:
    path = folder / "trajectories" / "step-000001.parquet"
    path.parent.mkdir()
    kinds = {"response_ids": pa.list_(pa.int64()), "logp_behavior": pa.list_(pa.float32())}
    pq.write_table(pa.table({name: pa.array([], kind) for name, kind in kinds.items()}), path)
    section = _section(folder)
    assert section.note == "From the trajectory files of steps 1: 0 responses."
    assert all("no response is left" in reason for reason in section.absent)


def test_a_file_without_log_probs_or_damaged_is_named(folder: Path) -> None:
    _write(folder, 1, response_ids=[[1]])
    with pytest.raises(TrimtabError, match=r"step-000001\.parquet has no logp_behavior"):
        _section(folder)
    _write(folder, 1, **_plain())
    path = folder / "trajectories" / "step-000001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrimtabError, match=r"step-000001\.parquet is damaged"):
        _section(folder)
