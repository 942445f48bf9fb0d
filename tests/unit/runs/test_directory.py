"""The run directory: one writer, no run overwritten, metrics that survive kills and continue without duplicates."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.runs import atomic
from trimtab.runs.directory import RunDirectory, locked, read_metrics
from trimtab.trainer.checkpoint import store

CONFIG = 'description = "größer"\n'


def raw(run: RunDirectory) -> bytes:
    return (run.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("left", ["config.toml", "metrics.jsonl", "checkpoints", "trajectories", "model"])
def test_a_directory_with_a_run_is_refused_and_left_alone(tmp_path: Path, left: str) -> None:
    """Part of a run is enough, and a folder that only looks like a part is not ours to replace either."""
    precious = tmp_path / left if "." in left else tmp_path / left / "mine"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    for _ in range(2):  # the refused directory is not left locked
        with pytest.raises(
            TrimtabError, match=rf"already holds a run \({left}\): continue it with --resume, or choose"
        ):
            RunDirectory.create(tmp_path, CONFIG)
    assert precious.read_text() == "precious"


def fail_in(run: RunDirectory, *, after_logging: bool = False) -> None:
    with run:
        run.model_folder.mkdir(exist_ok=True)
        (run.path / "provenance.json").touch()
        if after_logging:
            run.log({"step": 0})
        raise TrimtabError("no such model")


def test_a_start_that_failed_leaves_no_run_behind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrimtabError, match="no such model"):
        fail_in(RunDirectory.create(tmp_path, CONFIG))
    assert sorted(item.name for item in tmp_path.iterdir()) == [".lock", "notes.txt"]
    with pytest.raises(TrimtabError, match="no such model"):
        fail_in(RunDirectory.create(tmp_path, CONFIG), after_logging=True)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_a_resume_that_failed_removes_nothing(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG).close()  # killed before its first line
    with pytest.raises(TrimtabError, match="no such model"):
        fail_in(RunDirectory.open(tmp_path))
    assert (tmp_path / "config.toml").is_file()
    assert (tmp_path / "metrics.jsonl").is_file()


def test_a_directory_without_a_run_may_hold_other_things(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{atomic.TEMPORARY}config.toml-00000000").write_text("a start that was killed")
    RunDirectory.create(tmp_path, CONFIG).close()
    assert sorted(item.name for item in tmp_path.iterdir()) == [".lock", "config.toml", "metrics.jsonl", "notes.txt"]


def test_a_file_in_the_way_and_metrics_of_no_run_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(TrimtabError, match=r"cannot create .*out: File exists; .* choose another folder"):
        RunDirectory.create(tmp_path / "out", CONFIG)
    with pytest.raises(TrimtabError, match=r"cannot read .*metrics.jsonl: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_what_cannot_be_removed_is_named_with_what_to_check(tmp_path: Path) -> None:
    advice = "No such file or directory; check the permissions there"
    with pytest.raises(TrimtabError, match=rf"^cannot remove {tmp_path}/none: {advice}$"):
        atomic.remove_folder(tmp_path / "none")


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(TrimtabError, match=r"holds no run \(config.toml is missing\)"):
            RunDirectory.open(folder)
    assert list(tmp_path.iterdir()) == []


def test_one_line_a_step_as_given(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.log({"step": 0, "eval/arithmetic/greedy": 0.1875})
        run.log({"step": 1, "reward/mean": np.float32(0.5), "n": np.int64(3), "mismatch/anchor": "proximal", "x": None})
        assert raw(run).splitlines() == [
            b'{"step": 0, "eval/arithmetic/greedy": 0.1875}',
            b'{"step": 1, "reward/mean": 0.5, "n": 3, "mismatch/anchor": "proximal", "x": null}',
        ]


def test_values_that_json_cannot_hold_are_null_and_counted(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.log({"step": 1, "a": float("nan"), "b": np.float32("inf"), "c": -float("inf"), "d": 1.0})
        run.log({"step": 2, "a": 0.0})
        assert run.metrics() == [
            {"step": 1, "a": None, "b": None, "c": None, "d": 1.0, "metrics/nonfinite": 3},
            {"step": 2, "a": 0.0},
        ]
        assert b"NaN" not in raw(run)
        assert b"Infinity" not in raw(run)


@pytest.mark.parametrize("value", [torch.tensor(1.0), [1], {"a": 1}, np.zeros(2)])
def test_only_numbers_and_strings_are_metrics(tmp_path: Path, value: Any) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        with pytest.raises(TypeError, match=f"metric 'odd' is a {type(value).__name__}"):
            run.log({"step": 1, "odd": value})
        assert raw(run) == b""


def test_a_step_is_logged_once(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.log({"step": 3})
        for step in (3, 2):
            with pytest.raises(ValueError, match=rf"step {step} was already logged \(the last one is 3\)"):
                run.log({"step": step})
    with RunDirectory.open(tmp_path) as run, pytest.raises(ValueError, match="already logged"):
        run.log({"step": 3})


@pytest.mark.parametrize("torn", [b'{"step": 2, "rew', b'{"step": 2}', b"\0\0\0", b'{"st\0\0\0\0'])
def test_a_torn_last_line_is_dropped_and_the_next_one_is_whole(tmp_path: Path, torn: bytes) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.log({"step": 1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]  # a reader does not see it
    with RunDirectory.open(tmp_path) as run:
        run.log({"step": 2, "again": True})
        assert raw(run) == b'{"step": 1}\n{"step": 2, "again": true}\n'


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"step": 1}', '{"reward": 1}', '{"step": NaN}', '{"step": 1%s}' % ("0" * 400), "[" * 100_000],
)
def test_damage_in_the_middle_names_the_line(tmp_path: Path, line: str) -> None:
    RunDirectory.create(tmp_path, CONFIG).close()
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):  # the failed open holds no lock
        with pytest.raises(TrimtabError, match=r"metrics.jsonl, line 2 is not a step's metrics"):
            RunDirectory.open(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def fill(run: RunDirectory, steps: range) -> None:
    run.trajectory_folder.mkdir(exist_ok=True)
    for step in steps:
        run.trajectory_file(step).write_bytes(b"rows")
        run.log({"step": step, "reward/mean": step / 10})


def test_resume_continues_from_the_checkpoint_without_duplicates(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        fill(run, range(0, 3))
        store.save(run.checkpoint_root, 2, {}, {})
        fill(run, range(3, 6))
        store.save(run.checkpoint_root, 5, {}, {})
        (run.checkpoint_root / "step-000005" / "meta.json").write_text("damaged")
        (run.trajectory_folder / "notes.parquet").write_bytes(b"mine")
    with RunDirectory.open(tmp_path) as run:
        run.truncate_after(2)
        assert [line["step"] for line in run.metrics()] == [0, 1, 2]
        assert sorted(item.name for item in run.trajectory_folder.iterdir()) == [
            "notes.parquet",
            "step-000000.parquet",
            "step-000001.parquet",
            "step-000002.parquet",
        ]
        assert [folder.name for folder in run.checkpoints()] == ["step-000002"]
        fill(run, range(3, 5))
        assert [(line["step"], line["reward/mean"]) for line in run.metrics()] == [
            (step, step / 10) for step in range(5)
        ]
        run.truncate_after(-1)
        assert run.metrics() == []
        run.log({"step": 0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_open_clears_what_a_kill_left(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        for folder in (run.path, run.checkpoint_root, run.trajectory_folder):
            folder.mkdir(exist_ok=True)
            (folder / f"{atomic.TEMPORARY}half-00000000").write_text("half")
        store.save(run.checkpoint_root, 1, {}, {"whole": True})
        (run.checkpoint_root / "step-000001").rename(run.checkpoint_root / f"{atomic.REPLACED}step-000001")
    with RunDirectory.open(tmp_path) as run:
        assert not list(tmp_path.rglob(f"{atomic.TEMPORARY}*"))
        assert [folder.name for folder in run.checkpoints()] == ["step-000001"]


def test_a_checkpoint_that_a_thread_finishes_is_waited_for(tmp_path: Path) -> None:
    begun, done = threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        time.sleep(0.05)
        done.append("finished")

    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.finish_saving()
        for count, wait in enumerate(("finish_saving", "checkpoints", "close"), start=1):
            begun.clear()
            run.finish_later(work)
            assert begun.wait(10)
            assert len(done) == count - 1
            getattr(run, wait)()
            assert len(done) == count


def test_the_error_of_that_thread_is_raised(tmp_path: Path) -> None:
    def fails() -> None:
        raise TrimtabError("the disk is full")

    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.finish_later(fails)
        with pytest.raises(TrimtabError, match="the disk is full"):
            run.finish_saving()
        with pytest.raises(TrimtabError, match="the disk is full"):
            run.checkpoints()
        run.finish_later(lambda: None)
        assert run.checkpoints() == []


def test_a_full_disk_loses_no_line(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunDirectory.create(tmp_path, CONFIG) as run:
        run.log({"step": 1})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            with pytest.raises(TrimtabError, match=r"cannot write .*metrics.jsonl: File too large; free space there"):
                run.log({"step": 2, "long": "x" * 200})  # the first 88 bytes of it fit
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert raw(run) == b'{"step": 1}\n'
        run.log({"step": 2})
        assert [line["step"] for line in run.metrics()] == [1, 2]


def test_twice_in_one_process_is_refused(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, CONFIG) as run:
        for path in (tmp_path, tmp_path / ".." / tmp_path.name):
            with pytest.raises(TrimtabError, match="already open in this process"):
                RunDirectory.open(path)
        run.log({"step": 1})
    RunDirectory.open(tmp_path).close()


def test_a_folder_is_locked_for_a_block_as_a_run_is(tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    for _ in range(2):
        with locked(folder), pytest.raises(TrimtabError, match="already open in this process"):
            RunDirectory.create(folder, "")
