"""The run directory: one writer, any number of readers, and consistent after a kill at any moment.

config.toml  provenance.json  metrics.jsonl  trajectories/step-000010.parquet  checkpoints/  model/  report.html
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trimtab.errors import RESUME, TrimtabError
from trimtab.files import parse_json, regular_file
from trimtab.runs import atomic, layout

NONFINITE = "metrics/nonfinite"

# POSIX locks belong to the process: children that outlive a killed trainer do not keep them. A second open in the same
# process would succeed, however, and its close would release the lock; this set prevents that.
_open_directories: set[Path] = set()


class RunDirectory:
    """A locked run directory, built with `create` or `open` and used as a context manager or closed explicitly.

    If the block of a new run fails before anything was logged or checkpointed (an unknown model, for example), its
    files are removed, so that the corrected command is not rejected.
    """

    writes = True  # False for the views of ranks other than the first

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint_root = path / layout.CHECKPOINTS
        self.trajectory_folder = path / layout.TRAJECTORIES
        self.model_folder = path / layout.MODEL
        self.report = path / layout.REPORT
        self._lock = ExitStack()
        self._metrics: int | None = None
        self._last_step: int | None = None
        self._new = False
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self.finish_saving: Callable[[], None] = lambda: None  # waits for `finish_later`'s work, and raises its error
        self._take_lock()

    @classmethod
    def create(cls, path: Path, config_toml: str) -> RunDirectory:
        """Starts a run in `path`, which is created if needed.

        Raises `TrimtabError` if it already holds a run or another process uses it.
        """
        with atomic.readable_errors(path, "create"):
            path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        try:
            folders = (run.checkpoint_root, run.trajectory_folder, run.model_folder)
            for part in (path / layout.CONFIG, path / layout.METRICS, *folders):
                if part.exists():
                    raise TrimtabError(
                        f"{path} already holds a run ({part.name}): continue it with --resume, or choose another --out"
                    )
            atomic.remove_leftovers(path)
            run._new = True
            atomic.write_text(path / layout.CONFIG, config_toml)
            run._open_metrics()
        except BaseException:
            run._discard_if_unused()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Opens an existing run for writing and removes files that a kill left incomplete.

        An incomplete last line of metrics.jsonl is dropped: its step was never checkpointed and is repeated.
        Raises `TrimtabError` if there is no run or another process is writing it.
        """
        if not (path / layout.CONFIG).is_file():
            missing = f"{layout.CONFIG} is missing"
            raise TrimtabError(f"{path} holds no run ({missing}): check --out, or start without --resume")
        run = cls(path)
        try:
            for folder in (path, run.checkpoint_root, run.trajectory_folder):
                atomic.remove_leftovers(folder)
            run._open_metrics()
        except BaseException:
            run.close()
            raise
        return run

    def _take_lock(self) -> None:
        self._lock.enter_context(locked(self.path))

    @property
    def config_toml(self) -> str:
        """The resolved recipe of the run as TOML."""
        return (self.path / layout.CONFIG).read_text(encoding="utf-8")

    def checkpoints(self) -> list[Path]:
        """Returns the folders of all finished checkpoints, oldest first, without validation."""
        self.finish_saving()
        return layout.list_checkpoints(self.checkpoint_root)

    def finish_later(self, work: Callable[[], None]) -> None:
        """Calls `work`, which finishes a checkpoint, in a thread; call `finish_saving` before."""
        self.finish_saving = self._thread.submit(work).result

    def trajectory_file(self, step: int) -> Path:
        """Returns the path of the trajectory file of `step`."""
        return self.trajectory_folder / f"step-{step:06d}.parquet"

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Appends one step to metrics.jsonl and flushes it to the disk; `step` must increase.

        JSON has no NaN or infinity: such values become null and are counted in `metrics/nonfinite` (absent if none).
        Raises `ValueError` for a step that was already logged and `TrimtabError` when the file cannot be written.
        """
        step = metrics["step"]
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} was already logged (the last one is {self._last_step})")
        try:
            atomic.append(self._open_metrics(), _encode_line(metrics))
        except OSError as error:
            remedy = "start again" if self._last_step is None else RESUME
            path = self.path / layout.METRICS
            raise TrimtabError(f"cannot write {path}: {error.strerror}; free space there, then {remedy}") from error
        self._last_step = step

    def metrics(self) -> list[dict[str, Any]]:
        """Returns all steps logged so far."""
        return read_metrics(self.path / layout.METRICS)

    def truncate_after(self, step: int) -> None:
        """Removes metrics and trajectory files after `step`, from which a resumed run continues (-1: all).

        Later checkpoints are moved aside. They are damaged; otherwise the run would continue from them.
        """
        lines = [line for line in self.metrics() if line["step"] <= step]
        self._close_metrics()
        atomic.write_text(self.path / layout.METRICS, "".join(json.dumps(line) + "\n" for line in lines))
        self._open_metrics()
        for number, file in layout.trajectory_files(self.trajectory_folder).items():
            if number > step:
                file.unlink()
        layout.move_aside_after(self.checkpoint_root, step)

    def close(self) -> None:
        """Waits until no thread writes there, then releases the directory. Idempotent."""
        self._thread.shutdown()
        self._close_metrics()
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard_if_unused()

    def _discard_if_unused(self) -> None:
        """Closes the directory. Removes the files of a new run without a logged step or a checkpoint after step 0."""
        if self._new and self._last_step is None and not any(map(layout.checkpoint_step, self.checkpoints())):
            for folder in (self.model_folder, self.checkpoint_root):
                shutil.rmtree(folder, ignore_errors=True)
            for name in (layout.METRICS, layout.PROVENANCE, layout.CONFIG):
                (self.path / name).unlink(missing_ok=True)
        self.close()

    def _open_metrics(self) -> int:
        if self._metrics is None:
            path = self.path / layout.METRICS
            complete = _whole_lines(path.read_bytes()) if path.exists() else b""
            self._metrics = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._metrics, len(complete))
            lines = parse_metrics(complete, path)
            self._last_step = lines[-1]["step"] if lines else None
        return self._metrics

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl, also while it is being written: an incomplete last line is left out."""
    try:
        return parse_metrics(regular_file(path).read_bytes(), path)
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror}") from None


def _whole_lines(data: bytes) -> bytes:
    data = data.rstrip(b"\0")  # after a power failure the end of a file may be filled with zeros
    return data[: data.rfind(b"\n") + 1]


def parse_metrics(data: bytes, path: Path) -> list[dict[str, Any]]:
    """Returns the steps in the content of a metrics.jsonl; `path` is named in errors."""
    lines, last = [], -1
    for number, line in enumerate(_whole_lines(data).splitlines(), start=1):
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if not isinstance(value, dict) or type(value.get("step")) is not int or not last < value["step"] < 1 << 53:
            raise TrimtabError(f"{path}, line {number} is not a step's metrics, or not of a later step: delete it")
        lines.append(value)
        last = value["step"]
    return lines


def _encode_line(metrics: Mapping[str, Any]) -> bytes:
    values: dict[str, Any] = {}
    for key, value in metrics.items():
        values[key] = value.item() if isinstance(value, np.generic) else value
        if not isinstance(values[key], bool | int | float | str | None):
            raise TypeError(f"metric {key!r} is a {type(value).__name__}, not a number or a string")
    nonfinite = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    if nonfinite:
        values |= dict.fromkeys(nonfinite, None) | {NONFINITE: len(nonfinite)}
    return json.dumps(values, allow_nan=False).encode() + b"\n"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates a folder and locks it for the block. Raises `TrimtabError` if that fails or it is in use."""
    resolved = folder.resolve()
    if resolved in _open_directories:
        raise TrimtabError(f"{folder} is already open in this process: close that run first")
    with atomic.readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / layout.LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, folder)
        _open_directories.add(resolved)
        yield
    finally:
        os.close(descriptor)
        _open_directories.discard(resolved)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 100).decode(errors="replace") or "unknown"
        raise TrimtabError(
            f"{folder} is in use by another process ({owner}): wait for it, or choose another --out"
        ) from None
    except OSError as error:
        raise TrimtabError(f"cannot lock {folder}: {error.strerror}; choose another --out") from None
