"""Watching a folder: which files are read and when, what a line says, which bounds raise an alarm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trimtab.diagnosis.watch import PATIENCE, StepReport, Watch, event_lines, last_line, opening_line, parse_bounds
from trimtab.errors import TrimtabError
from trimtab.runs.metric_catalog import metric

QUIET, LOUD = -1.01, -2.0  # trainer's log-probs beside the sampler's of -1: k3 5e-5 and .37


def lines(trainer: float, **columns: Any) -> str:
    row = {"logp_behavior": [-1.0] * 8, "logp_proximal": [trainer] * 8, **columns}
    return (json.dumps(row) + "\n") * 3


def watched(folder: Path, bounds: Sequence[str] = ()) -> Watch:
    return Watch(folder, parse_bounds(bounds))


def reports(watch: Watch) -> list[StepReport]:
    events = list(watch.poll())
    assert all(isinstance(event, StepReport) for event in events), events
    return events  # type: ignore[return-value]


def steps(watch: Watch) -> list[str]:
    return [report.step for report in reports(watch)]


def test_a_file_is_read_once_it_stays_the_same_for_a_poll(tmp_path: Path) -> None:
    watch = watched(tmp_path / "dump")
    assert steps(watch) == [], "the folder does not exist yet"
    (tmp_path / "dump").mkdir()
    assert steps(watch) == []
    first = tmp_path / "dump" / "train_data_step5.jsonl"
    first.write_text(lines(QUIET))
    assert steps(watch) == []
    (report,) = reports(watch)
    assert report.step == "5", "the number in the name, where no column says it"
    assert report.figures["k3"] == pytest.approx(4.98e-5, rel=1e-2)
    assert (report.figures["sequences"], report.figures["tokens"]) == (3, 24)
    assert (report.crossed, steps(watch)) == ((), [])


def test_a_step_whose_file_grows_is_reported_again_and_the_others_are_not(tmp_path: Path) -> None:
    watch, file = watched(tmp_path), tmp_path / "all.jsonl"
    file.write_text(lines(QUIET, step=1))
    assert [*steps(watch), *steps(watch)] == ["1"]
    file.write_text(lines(QUIET, step=1) + lines(LOUD, step=2))
    assert [*steps(watch), *steps(watch)] == ["2"]
    file.write_text(lines(QUIET, step=1) + 2 * lines(LOUD, step=2))
    assert [*steps(watch), *steps(watch)] == ["2"]
    file.write_text(lines(2 * QUIET, step=1) + 2 * lines(LOUD, step=2))
    assert [*steps(watch), *steps(watch)] == ["1"], "rewritten, with as many tokens"
    assert (watch.steps, watch.alarms) == (2, 2)


def test_an_unfinished_last_line_is_waited_for_and_then_left_out(tmp_path: Path) -> None:
    watch, file = watched(tmp_path), tmp_path / "3.jsonl"
    file.write_text(lines(QUIET) + lines(QUIET)[:20])
    assert [steps(watch) for _ in range(PATIENCE)] == [[]] * PATIENCE
    (report,) = reports(watch)
    assert report.left_out == "1 x unfinished last line"
    assert "left out: 1 x unfinished last line" in event_lines(report)[0]
    file.write_text(lines(QUIET) + lines(QUIET))
    assert [*steps(watch), *steps(watch)] == ["3"], "the writer went on after all"


def test_the_files_of_several_ranks_are_one_step(tmp_path: Path) -> None:
    row = {"inference_logprobs": [0.0, -1.0], "trainer_logprobs": [0.0, -1.5], "loss_mask": [0, 1], "step": 4}
    folder = tmp_path / "token_exports" / "step_4"
    folder.mkdir(parents=True)
    watch = watched(tmp_path)
    for rank in range(2):
        (folder / f"rank_{rank}.jsonl").write_text(json.dumps(row) + "\n")
    assert steps(watch) == []
    (report,) = reports(watch)
    assert (report.step, report.figures["sequences"]) == ("4", 2)


def test_the_dump_of_an_adapter_is_one_step_of_all_ranks_or_one_call(tmp_path: Path) -> None:
    watch = watched(tmp_path)
    for rank in range(2):
        (tmp_path / f"step_000003_rank_{rank}.jsonl").write_text(lines(QUIET, step=3))
        (tmp_path / f"call_000012_rank_{rank}.jsonl").write_text(lines(LOUD))
    assert steps(watch) == []
    call, step = reports(watch)
    assert [(one.unit, one.step, one.figures["sequences"]) for one in (call, step)] == [
        ("call", "12", 6),
        ("step", "3", 6),
    ]
    assert [line.partition(":")[0] for line in event_lines(call)] == ["call 12", "ALARM call 12"]
    assert (step.as_dict()["unit"], call.as_dict()["unit"]) == ("step", "call")
    assert last_line(watch) == "watched 1 step, 1 call, 1 alarm"


def test_what_cannot_be_read_is_said_once_and_tried_again_when_it_changes(tmp_path: Path) -> None:
    watch, file = watched(tmp_path), tmp_path / "1.parquet"
    file.write_bytes(b"PAR1 cut")
    assert list(watch.poll()) == []
    (text,) = watch.poll()
    assert isinstance(text, str)
    assert text.startswith(f"not read: {file}")
    assert event_lines(text) == [text]
    assert list(watch.poll()) == []
    file.unlink()
    (tmp_path / "1.jsonl").write_text(lines(QUIET))
    assert [*steps(watch), *steps(watch)] == ["1"]


def test_an_alarm_is_a_line_with_the_remedy_and_a_file_that_is_no_data(tmp_path: Path) -> None:
    watch = watched(tmp_path)
    (tmp_path / "12.jsonl").write_text(lines(LOUD))
    assert steps(watch) == []
    (report,) = reports(watch)
    row = metric("mismatch/k3")
    assert row is not None
    assert event_lines(report)[1:] == [f"ALARM step 12: k3 0.37 is above 0.01: {row.action}"]
    alarm = json.loads((tmp_path / "ALARM.json").read_text())
    assert alarm["alarms_so_far"] == 1
    assert alarm["latest"]["step"] == 12
    (entry,) = alarm["latest"]["alarms"]
    assert (entry["figure"], entry["bound"], entry["side"]) == ("k3", row.high, "above")
    assert entry["value"] == pytest.approx(0.3679, rel=1e-3)
    assert [list(watch.poll()) for _ in range(2)] == [[], []]
    assert last_line(watch) == "watched 1 step, 1 alarm"


def test_bounds_come_from_the_table_of_metrics_unless_given(tmp_path: Path) -> None:
    assert {(bound.name, bound.value, bound.is_upper) for bound in parse_bounds([])} == {
        ("k3", 0.01, True),
        ("ess_token", 0.95, False),
    }
    given = parse_bounds(["k3=0.1,ess_token=", "pearson"])
    assert [(bound.name, bound.value) for bound in given] == [("k3", 0.1), ("pearson", 0.95)]
    assert opening_line(watched(tmp_path, ["k3=0.1", "ess_token="]), 2.0).endswith(
        "every 2 s; alarm at: k3 above 0.1; end with Ctrl-C"
    )


@pytest.mark.parametrize(
    ("bound", "message"), [("k4=1", "unknown figure 'k4'.*did you mean 'k3'"), ("k3=much", "'much' is not a number")]
)
def test_a_wrong_bound_is_refused(bound: str, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        parse_bounds([bound])


def test_a_figure_that_is_not_a_number_crosses_every_bound() -> None:
    upper, lower = parse_bounds([])
    assert upper.crossed_by(float("nan"))
    assert lower.crossed_by(float("nan"))
    assert not upper.crossed_by(0.01)
    assert not lower.crossed_by(0.95)
    assert lower.crossed_by(0.9499)
