"""`trimtab.Monitor` in a loop: its figures, its alarms, what it writes, and that its memory is bounded."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.noisy_batch import ROWS, batch

import trimtab
from trimtab.adapters.recording import open_monitor
from trimtab.errors import GuardStop, TrimtabError
from trimtab.monitor import Alarm, Monitor
from trimtab.monitor.response_sample import ResponseSample


def test_figures_are_those_of_mismatch_and_of_any_split() -> None:
    one = batch(0)
    whole = Monitor().observe(**one)
    expected = trimtab.mismatch(one["logp_train"], one["logp_rollout"], one["mask"]).finalize()
    assert {name: whole[f"mismatch/{name}"] for name in expected} == pytest.approx(expected)
    assert whole["response/length"] == pytest.approx(float(one["mask"].sum(1).double().mean()))
    assert whole["reward/mean"] == pytest.approx(float(one["reward"].double().mean()))
    split = Monitor()
    for part in (slice(0, 10), slice(10, ROWS)):
        last = split.observe(**{k: v[part] if isinstance(v, torch.Tensor) else v for k, v in one.items()})
    assert last == pytest.approx(whole)


@pytest.mark.parametrize("value", [torch.nan, -9999.0])
def test_tokens_without_a_log_prob_are_left_out_and_counted(value: float) -> None:
    one = batch(0)
    clean = Monitor().observe(**one)
    without = one["mask"].clone()
    without[0, 0] = False
    found = Monitor().observe(**one | {"logp_rollout": torch.where(without == one["mask"], one["logp_rollout"], value)})
    assert found["nonfinite"] == 1
    assert found["mismatch/tokens"] == clean["mismatch/tokens"] - 1
    assert found["mismatch/k3"] == pytest.approx(Monitor().observe(**one | {"mask": without})["mismatch/k3"])
    assert found["response/length"] == clean["response/length"]


def test_alarms_are_raised_again_if_they_get_worse_or_after_twenty_quiet_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {1: "note", 2: "note", 3: "fail", 4: "fail", 5: "note", 24: "note", 44: "note"}
    monkeypatch.setattr(
        "trimtab.monitor.monitor.alarms",
        lambda steps: [Alarm(planted[n], "undelivered", "", step=n) for n in [steps[-1].number] if n in planted],
    )
    raised: list[Alarm] = []
    monitor = Monitor(on_alarm=raised.append)
    for step in range(46):
        monitor.observe(**batch(step))
    assert (monitor.close().status, monitor.verdict.detail) == ("fail", "undelivered at step 3")
    assert [(one.step, one.status) for one in raised] == [(1, "note"), (3, "fail"), (44, "note")]


def test_no_alarm_without_a_fault_and_a_verdict_after_twenty_steps() -> None:
    raised: list[Alarm] = []
    monitor = Monitor(on_alarm=raised.append)
    figures = [monitor.observe(**batch(step)) for step in range(40)]
    assert raised == []
    assert monitor.verdict.status == "ok"
    assert "monitor/verdict" not in figures[19]
    assert figures[20]["monitor/verdict"] == 0


def test_files_and_the_figures_of_diagnose_on_them(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path)
    parts = [batch(step) for step in range(3)]
    figures = [monitor.observe(**part) for part in parts]
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["mismatch/k3"] for line in lines] == [one["mismatch/k3"] for one in figures]
    rows = [json.loads(line) for line in (tmp_path / "sample.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * ROWS
    assert {(row["step"], row["policy_version"], row["proximal_version"]) for row in rows} == {
        (n, n, n) for n in range(3)
    }
    tokens = sum(sum(row["loss_mask"]) for row in rows)
    assert tokens == sum(int(part["mask"].sum()) for part in parts)
    found = trimtab.diagnose(tmp_path / "sample.jsonl").measured.size.by_step
    for here, row in zip(figures, found, strict=True):
        for name in ("k1", "k3", "ess_token", "ess_seq", "ratio_mean"):
            assert row[name] == pytest.approx(here[f"mismatch/{name}"], rel=1e-5)  # files keep float32


def test_the_sample_is_bounded_and_fair(tmp_path: Path) -> None:
    sample, mask = ResponseSample(limit=2000, seed=0), torch.ones(10, 10, dtype=torch.bool)
    for step in range(1000):
        sample.add(mask, {"logp_behavior": -torch.rand(10, 10), "step": step})
        assert len(sample) <= 260
    sample.write(tmp_path / "sample.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "sample.jsonl").read_text().splitlines()]
    steps = np.array([row["step"] for row in rows])
    assert 190 <= len(sample) <= 260
    # The mean of 200 uniform numbers in [0, 1000) is 500 with a standard error of 20.
    assert abs(steps.mean() - 500) < 80


def test_the_sample_keeps_responses_up_to_their_last_trained_token(tmp_path: Path) -> None:
    sample = ResponseSample(limit=100, seed=0)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    values = {"step": 7, "reward": torch.tensor([0.5, 1.0, 2.0])}
    sample.add(mask, {"response_ids": torch.arange(12).view(3, 4), **values})
    sample.write(tmp_path / "sample.jsonl")
    sample.add(torch.zeros_like(mask), {"response_ids": torch.arange(12).view(3, 4), **values})
    rows = [json.loads(line) for line in (tmp_path / "sample.jsonl").read_text().splitlines()]
    assert len(sample) == 2
    assert sorted(rows, key=lambda row: row["reward"]) == [
        {"loss_mask": [True, False, True], "response_ids": [0, 1, 2], "step": 7, "reward": 0.5},
        {"loss_mask": [False, True, True, True], "response_ids": [8, 9, 10, 11], "step": 7, "reward": 2.0},
    ]


TRAINING = """
import os, signal, sys
from trimtab.monitor import Monitor
from tests.support.noisy_batch import batch
monitor = Monitor(sys.argv[1], on_alarm=lambda _: None)
for step in range(4):
    monitor.observe(**batch(step))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (root / "src", root)))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("end", "steps"), [("killed", 3), ("without close", 4)])
def test_the_end_of_a_process_leaves_its_rows_and_its_sample(end: str, steps: int, tmp_path: Path) -> None:
    """A killed process loses the step that is not complete; one that ends closes its monitor."""
    ended = script(TRAINING, str(tmp_path), end)
    assert ended.returncode == (-9 if end == "killed" else 0), ended.stderr
    rows, sample = (
        [json.loads(line) for line in (tmp_path / name).open()] for name in ("metrics.jsonl", "sample.jsonl")
    )
    assert [row["step"] for row in rows] == list(range(steps))
    assert [row["step"] for row in sample] == [step for step in range(steps) for _ in range(ROWS)]


def test_the_file_holds_the_sample_after_every_step(tmp_path: Path) -> None:
    """Also where responses are dropped, after which it is written anew."""
    sample, appended = ResponseSample(1_000, seed=0), 0
    path, whole = tmp_path / "sample.jsonl", tmp_path / "whole.jsonl"
    for step in range(20):
        one, before = batch(step), path.read_text() if step else ""
        sample.add(one["mask"], {"logp_behavior": one["logp_rollout"], "step": step})
        sample.flush(path)
        sample.write(whole)
        assert sorted(path.open()) == sorted(whole.open())
        appended += path.read_text().startswith(before)
    assert 3 < appended < 20


def test_closing_again_changes_nothing_and_the_verdict_says_what_to_do(tmp_path: Path) -> None:
    assert Monitor().close().next_step == "call `observe` at every step"
    monitor = Monitor(tmp_path, on_alarm=lambda _: None)
    for step in range(4):
        monitor.observe(**batch(step))
    found = monitor.close()
    assert (found.status, found.next_step.startswith(f"run `trimtab diagnose {tmp_path}`")) == ("ok", True)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {path.name for path in written} == {"metrics.jsonl", "sample.jsonl"}
    assert monitor.close() == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    for step in range(4, 8):
        monitor.observe(**batch(step, drift=1.5))
    alarmed = monitor.close()
    assert (alarmed.status, alarmed.name) == ("fail", "monitor")
    assert alarmed.next_step == monitor._raised["undelivered"].next_step


def test_a_second_trainer_begins_a_new_run(tmp_path: Path) -> None:
    """Its k3 is not compared with that of the first, and its files are beside those of the first."""
    names: list[str] = []
    monitor = Monitor(tmp_path / "logs", on_alarm=lambda alarm: names.append(alarm.name))
    for drift in (0.0, 0.3):
        for step in range(4):
            monitor.observe(**batch(step, drift=drift))
        assert monitor.close().detail == "no alarm in 4 steps"
    assert names == []
    for folder in (tmp_path / "logs", tmp_path / "logs_2"):
        assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()] == [0, 1, 2, 3]
        assert len((folder / "sample.jsonl").read_text().splitlines()) == 4 * ROWS
    # A trainer that goes on with the same run goes on with its files.
    monitor.observe(**batch(4, drift=0.3))
    monitor.close()
    assert len((tmp_path / "logs_2" / "metrics.jsonl").read_text().splitlines()) == 5
    # One that resumes in another process has another monitor, which leaves earlier files as they are.
    earlier = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    resumed = Monitor(tmp_path / "logs")
    resumed.observe(**batch(5, drift=0.3))
    resumed.close()
    assert all(path.read_bytes() == content for path, content in earlier.items())
    for name, count in (("metrics.jsonl", 1), ("sample.jsonl", ROWS)):
        assert len((tmp_path / "logs_3" / name).read_text().splitlines()) == count


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    for name in ("metrics", "sample"):
        monitor, path = Monitor(tmp_path / name), tmp_path / name / f"{name}.jsonl"
        monitor.observe(**batch(0))
        path.mkdir()
        with pytest.raises(TrimtabError, match=rf"cannot write {path}: .*; check that it can be written"):
            monitor.observe(**batch(1))
        path.rmdir()
        monitor.close()
        with pytest.raises(TrimtabError, match=r"cannot write .*sample.jsonl/logs: Not a directory"):
            Monitor(tmp_path / name / "sample.jsonl" / "logs")


LOW = 8
"""Step from which the effective sample size of `collapsing` is low."""


def collapsing(step: int) -> dict[str, Any]:
    return batch(step, drift=0.0 if step < LOW else 1.5)


def test_a_sign_that_is_watched_stops_the_training_whatever_catches_it(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, on_alarm=lambda _: None, stop_on=["ess"])
    for step in range(LOW + 3):
        monitor.observe(**collapsing(step))
    for step in (LOW + 3, LOW + 4):
        with pytest.raises(GuardStop, match=f"step {LOW + 2}: ess: effective sample size .* of step 0 or before"):
            monitor.observe(**collapsing(step))
    monitor.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == list(range(LOW + 3))
    assert (tmp_path / "sample.jsonl").exists()
    assert monitor.observe(**batch(0)), "a new run begins anew"
    monitor.close()
    with pytest.raises(TrimtabError, match=r"'es' cannot be watched.*'ess'"):
        Monitor(stop_on=["es"])


def test_it_names_the_newest_step_that_is_not_in_doubt() -> None:
    monitor = Monitor(on_alarm=lambda _: None, stop_on=["length", "ess"])
    for step in range(100, 133):
        monitor.observe(**batch(step, drift=0.0 if step < 130 else 1.5))
    with pytest.raises(GuardStop, match=r"step 132: ess: .* of step 112 or before"):
        monitor.observe(**batch(133))
    watches_another = Monitor(on_alarm=lambda _: None, stop_on=["length"])
    for step in range(20):
        watches_another.observe(**collapsing(step))


STOPPED = """
import sys
from trimtab.monitor import Monitor
from tests.unit.monitor.test_monitor import collapsing
monitor = Monitor(sys.argv[1], on_alarm=lambda _: None, stop_on=["ess"])
for step in range(20):
    monitor.observe(**collapsing(step))
"""


@pytest.mark.slow
def test_a_script_that_is_stopped_exits_with_status_3_and_one_line(tmp_path: Path) -> None:
    ended = script(STOPPED, str(tmp_path))
    assert ended.returncode == 3, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"trimtab.errors.GuardStop: step {LOW + 2}: ess: ")
    assert line.endswith(f"look at {tmp_path}")
    assert (tmp_path / "sample.jsonl").exists(), "the monitor was closed"


def ranks(rank: int, folder: str) -> None:
    monitor = Monitor(f"{folder}/logs")  # Before the process group, as scripts of TRL make it.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    part = slice(0, 10) if rank == 0 else slice(10, ROWS)
    for step in range(2):
        one = batch(step)
        figures = monitor.observe(**{k: v[part] if isinstance(v, torch.Tensor) else v for k, v in one.items()})
    monitor.close()
    if rank == 1:  # The other rank does not call.
        alone = open_monitor(f"{folder}/own", merge_ranks=False).observe(**batch(0))
        assert alone == Monitor(merge_ranks=False).observe(**batch(0))
    stopped, step = Monitor(on_alarm=lambda _: None, stop_on=["ess"]), 0
    try:
        for step in range(20):
            one = collapsing(step)
            stopped.observe(**{k: v[part] if isinstance(v, torch.Tensor) else v for k, v in one.items()})
    except GuardStop as error:
        Path(f"{folder}/stop-{rank}.txt").write_text(f"{step} {error}")
    Path(f"{folder}/rank-{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=ranks, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    return tmp_path


@pytest.mark.slow
def test_two_ranks_have_the_figures_of_the_whole_batch(two_ranks: Path) -> None:
    monitor = Monitor()
    expected = [monitor.observe(**batch(step)) for step in range(2)][-1]
    for rank in range(2):
        assert json.loads((two_ranks / f"rank-{rank}.json").read_text()) == pytest.approx(expected)
    rows = [path.read_text().count("\n") for path in sorted((two_ranks / "logs").glob("sample_rank_*.jsonl"))]
    assert rows == [20, 2 * ROWS - 20]
    assert [path.name for path in (two_ranks / "own").iterdir()] == ["rank_1"]
    assert "sample.jsonl" in {path.name for path in (two_ranks / "own" / "rank_1").iterdir()}  # Written at the end.
    one, other = ((two_ranks / f"stop-{rank}.txt").read_text() for rank in range(2))
    assert one == other
    assert one.startswith(f"{LOW + 3} step {LOW + 2}: ess: ")
