"""The run directory: one writer, any readers, usable after a kill at any moment.

config.toml  provenance.json  metrics.jsonl  trajectories/step-000010.parquet  checkpoints/  model/  report.html
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trimtab.errors import RESUME, TrimtabError
from trimtab.runs import atomic
from trimtab.runs.layout import CONFIG, LOCK, METRICS, MODEL, PROVENANCE, list_checkpoints, move_aside_after

NONFINITE = "metrics/nonfinite"
_TRAJECTORIES = re.compile(r"step-(\d+)\.parquet")

# POSIX locks belong to the process: children that outlive a killed trainer do not keep them, but a second open in
# the same process would not be refused and its close would drop the lock, hence this set.
_held: set[Path] = set()


class RunDirectory:
    """A locked run directory. Build it with `create` or `open`; close it, or use it as a context manager.

    A new run whose block fails before anything was logged or checkpointed (no such model, say) leaves no run behind,
    so that the mended command is not refused.
    """

    writes = True  # ranks other than the first have views that do not

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint_root = path / "checkpoints"
        self.trajectory_folder = path / "trajectories"
        self.model_folder = path / MODEL
        self.report = path / "report.html"
        self._lock: int | None = None
        self._metrics: int | None = None
        self._last_step: int | None = None
        self._new = False
        self._take()

    @classmethod
    def create(cls, path: Path, config_toml: str) -> RunDirectory:
        """Start a run in `path` (made if needed). `TrimtabError` if it already holds one or another process uses it."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrimtabError(f"cannot create {path}: {error.strerror}; choose another --out") from None
        run = cls(path)
        try:
            for part in (path / CONFIG, path / METRICS, run.checkpoint_root, run.trajectory_folder, run.model_folder):
                if part.exists():
                    raise TrimtabError(
                        f"{path} already holds a run ({part.name}): continue it with --resume, or choose another --out"
                    )
            atomic.sweep(path)
            run._new = True
            atomic.write_text(path / CONFIG, config_toml)
            run._open_metrics()
        except BaseException:
            run._abandon()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Take over a run that was started before, removing what a kill left half-written.

        A torn last line of metrics.jsonl is dropped: its step was never checkpointed and will be done again.
        `TrimtabError` if there is no run, or another process is writing it.
        """
        if not (path / CONFIG).is_file():
            raise TrimtabError(f"{path} holds no run ({CONFIG} is missing): check --out, or start without --resume")
        run = cls(path)
        try:
            for folder in (path, run.checkpoint_root, run.trajectory_folder):
                atomic.sweep(folder)
            run._open_metrics()
        except BaseException:
            run.close()
            raise
        return run

    def _take(self) -> None:
        self._lock = _acquire(self.path)

    @property
    def config_toml(self) -> str:
        """The resolved recipe the run was started with."""
        return (self.path / CONFIG).read_text(encoding="utf-8")

    def checkpoints(self) -> list[Path]:
        """Folders of all checkpoints, oldest first, unchecked."""
        return list_checkpoints(self.checkpoint_root)

    def trajectory_file(self, step: int) -> Path:
        """Where the trajectories of `step` go."""
        return self.trajectory_folder / f"step-{step:06d}.parquet"

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one step to metrics.jsonl and wait until it is on the disk; `step` must grow.

        JSON has no NaN or infinity: such values become null and are counted in `metrics/nonfinite` (absent if none).
        """
        step = metrics["step"]
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} was already logged (the last one is {self._last_step})")
        again = "start again" if self._last_step is None else RESUME
        _append(self._open_metrics(), self.path / METRICS, _line(metrics), again)
        self._last_step = step

    def metrics(self) -> list[dict[str, Any]]:
        """Everything logged so far."""
        return read_metrics(self.path / METRICS)

    def truncate_after(self, step: int) -> None:
        """Forget everything after `step`, the checkpoint a resumed run continues from (-1: forget all).

        Removes later metrics and trajectory files; later checkpoints, damaged or they would have been used, are set
        aside.
        """
        lines = [line for line in self.metrics() if line["step"] <= step]
        self._close_metrics()
        atomic.write_text(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
        self._open_metrics()
        if self.trajectory_folder.is_dir():
            for item in self.trajectory_folder.iterdir():
                match = _TRAJECTORIES.fullmatch(item.name)
                if match and int(match[1]) > step:
                    item.unlink()
        move_aside_after(self.checkpoint_root, step)

    def close(self) -> None:
        """Release the directory. Idempotent."""
        self._close_metrics()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _held.discard(self.path.resolve())

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Take back a start that came to nothing; a run that has anything to show stays as it is."""
        if self._new and self._last_step is None and not self.checkpoints():
            shutil.rmtree(self.model_folder, ignore_errors=True)
            for name in (METRICS, PROVENANCE, CONFIG):
                (self.path / name).unlink(missing_ok=True)
        self.close()

    def _open_metrics(self) -> int:
        if self._metrics is None:
            path = self.path / METRICS
            whole = _whole_lines(path.read_bytes()) if path.exists() else b""
            self._metrics = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._metrics, len(whole))
            lines = _parse(whole, path)
            self._last_step = lines[-1]["step"] if lines else None
        return self._metrics

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl, also while a run is writing it: an unfinished last line is not there yet."""
    try:
        return _parse(_whole_lines(path.read_bytes()), path)
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror}") from None


def _whole_lines(data: bytes) -> bytes:
    data = data.rstrip(b"\0")  # after a power cut the end of a file may be there in length only
    return data[: data.rfind(b"\n") + 1]


def _parse(data: bytes, path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            value = json.loads(line)
            value["step"]
        except (ValueError, KeyError, TypeError):
            raise TrimtabError(f"{path}: line {number} is not a step's metrics; delete the line") from None
        lines.append(value)
    return lines


def _line(metrics: Mapping[str, Any]) -> bytes:
    plain = {key: _plain(key, value) for key, value in metrics.items()}
    lost = [key for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)]
    if lost:
        plain |= dict.fromkeys(lost, None) | {NONFINITE: len(lost)}
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"metric {key!r} is a {type(value).__name__}, not a number or a string")


def _append(descriptor: int, path: Path, line: bytes, again: str) -> None:
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        rest = line
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except OSError as error:
        os.ftruncate(descriptor, end)
        raise TrimtabError(f"cannot write {path}: {error.strerror}; free space there, then {again}") from error


def _acquire(path: Path) -> int:
    resolved = path.resolve()
    if resolved in _held:
        raise TrimtabError(f"{path} is already open in this process: close that run first")
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise TrimtabError(f"cannot write in {path}: {error.strerror}; choose another --out") from None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 100).decode(errors="replace") or "unknown"
        os.close(descriptor)
        raise TrimtabError(
            f"{path} is in use by another process ({owner}): wait for it, or choose another --out"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise TrimtabError(f"cannot lock {path}: {error.strerror}; choose another --out") from None
    _held.add(resolved)
    return descriptor
