"""Records what the losses of other trainers receive: a `Dump` for `trimtab diagnose`, and a `trimtab.Monitor`.

`Dump` needs no library. It writes one file per update, atomically, with the column names of Trimtab's own trajectory
files. A monitor is passed in by the user, or created at the first batch of a process. A created monitor stops the
training at the signs that the environment variable TRIMTAB_STOP_ON names, such as `ess,mismatch` (`stop_on` of
`trimtab.Monitor`).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.corrections.reduce import nan_below_minimum
from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.files import readable_errors, replace_file
from trimtab.monitor import Monitor
from trimtab.monitor.response_sample import response_rows, trained_length
from trimtab.objectives import PolicyLogps

STOP_ON = "TRIMTAB_STOP_ON"
OBSERVED = ("mismatch/k3", "mismatch/ess_token", "mean_ratio", "monitor/alarms")
"""Scalars of the monitor that every step has and that a trainer may average over micro-batches and processes."""

MonitorChoice = str | Path | bool | None
"""True, a folder for the files of each process that trains, or no monitor."""

_FILE = re.compile(r"(?:step|call)_(\d+)_rank_(\d+)\.jsonl")
_STARTED = time.time()
"""Files of other ranks older than this process belong to earlier runs; newer files may belong to this run."""


class Dump:
    """Writes one file per update, or per call of a loss, into a folder, which is created on first use.

    If the folder holds files of an earlier run, a new run writes into a folder beside it (`logps_2`), with a warning,
    because `trimtab diagnose` reads every file of a folder. A run whose first step is above the last one written counts
    as resumed, and keeps the folder; a loss that knows no step always begins a new run. All ranks choose the same
    folder, without a collective. Raises `TrimtabError` if `folder` is not a path.
    """

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | os.PathLike) or not folder:
            raise TrimtabError(f'dump={folder!r} is not a folder: give one, such as dump="logps"')
        self.folder = self._first = Path(folder).absolute()
        self._last: int | None = None  # number of the last step or call

    def write(self, step: int, batch: Sequence[Mapping[str, Any]], *, rank: int = 0) -> Path:
        """Writes `step_STEP_rank_RANK.jsonl` and returns its path. Raises `TrimtabError` if that fails."""
        if self._last is None or step <= self._last:
            self._begin(step, rank)
        return self._write("step", step, rank, [{"step": step, **row} for row in batch])

    def write_call(self, logps: PolicyLogps, advantage: Tensor) -> Path:
        """Writes the log-probs of one call of a loss that knows no step, as `call_NUMBER_rank_RANK.jsonl`.

        Each response ends with its last trained token. advantage: (batch, time). Of the trainer's log-probs, only those
        at the start of the update (`logps.proximal`) are written.
        """
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if self._last is None:
            self._begin(0, rank)
        batch = response_rows(
            trained_length(logps.mask),
            {"logp_behavior": logps.behavior, "logp_proximal": logps.proximal, "loss_mask": logps.mask.long()},
            {"advantage": torch.where(logps.mask, advantage, 0.0).sum(1) / logps.mask.sum(1).clamp(min=1)},
        )
        return self._write("call", (self._last or 0) + 1, rank, list(batch))

    def _begin(self, step: int, rank: int) -> None:
        """Chooses the folder of a run that begins or resumes at `step`: the first without files from that step on."""
        later = (self._first.with_name(f"{self._first.name}_{number}") for number in count(2))
        self.folder = next(folder for folder in chain([self._first], later) if not _holds(folder, step, rank))
        resumed = any(self.folder.glob("*_rank_0.jsonl"))
        if self.folder != self._first and rank == 0 and not resumed:
            text = f"{self._first} holds log-probs of an earlier run: those of this run are written to {self.folder}"
            warnings.warn(text, TrimtabWarning, stacklevel=3)

    def _write(self, kind: str, number: int, rank: int, batch: Sequence[Mapping[str, Any]]) -> Path:
        self._last, path = number, self.folder / f"{kind}_{number:06d}_rank_{rank}.jsonl"
        with readable_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, "".join(json.dumps(row) + "\n" for row in batch).encode())
        return path


def _holds(folder: Path, step: int, rank: int) -> bool:
    """Returns whether an earlier run wrote files of `step`, or of a later step, into a folder.

    Files of other ranks count only if they are older than this process: newer ones may be of this run, and if they
    counted, its ranks would choose different folders.
    """
    names = ((path, _FILE.fullmatch(path.name)) for path in folder.glob("*_rank_*.jsonl"))
    later = [(path, int(name[2])) for path, name in names if name and int(name[1]) >= step]
    if not later or any(other == rank for _, other in later):
        return bool(later)
    with readable_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        ahead = os.fstat(file.fileno()).st_mtime - time.time()  # of the clock that dates files (a server's?)
    return any(path.stat().st_mtime < _STARTED + ahead for path, _ in later)


def open_monitor(monitor: Monitor | str | Path | bool, *, merge_ranks: bool) -> Monitor:
    """Returns the given monitor, a new one without files for True, or a new one that writes into the given folder.

    A monitor closes itself when the process ends. merge_ranks: as for `trimtab.Monitor`; if False, each rank of
    `torch.distributed` writes into a subfolder `rank_RANK`. Raises `TrimtabError` for another value of `monitor`.
    """
    if not isinstance(monitor, bool | str | Path):
        if not hasattr(monitor, "observe"):
            raise TrimtabError(f"monitor={monitor!r}: give True, a folder, or a trimtab.Monitor")
        return monitor
    alone = not merge_ranks and dist.is_available() and dist.is_initialized()
    folder = None if isinstance(monitor, bool) else Path(monitor) / (f"rank_{dist.get_rank()}" if alone else "")
    return Monitor(folder, merge_ranks=merge_ranks, stop_on=stop_on())


def stop_on() -> list[str]:
    """Returns the signs that the environment variable TRIMTAB_STOP_ON names."""
    return [name for part in os.environ.get(STOP_ON, "").split(",") if (name := part.strip())]


class Observations:
    """Shows a monitor what a loss receives in one process. An update ends when an optimizer of `torch.optim` steps.

    Ranks are not merged: they may call a loss a different number of times (pipelines, single sequences), and a
    collective would hang.
    """

    def __init__(self, monitor: Monitor | str | Path | bool) -> None:
        self._monitor = open_monitor(monitor, merge_ranks=False)
        self._step, self._updated = 0, False
        self._follows_optimizer = False

    def show(self, logps: PolicyLogps, step: int | None = None) -> dict[str, float]:
        """Adds a micro-batch, returns the scalars of its update so far. step: the update, if the trainer passes it."""
        train = logps.current if logps.proximal is None else logps.proximal
        assert train is not None
        assert logps.behavior is not None
        if step is None:
            if not self._follows_optimizer:  # The hook lasts as long as the process.
                register_optimizer_step_post_hook(lambda *_: setattr(self, "_updated", True))
                self._follows_optimizer = True
            self._step, self._updated = self._step + self._updated, False
            step = self._step
        return self._monitor.observe(
            logp_train=train.detach(),
            logp_rollout=nan_below_minimum(logps.behavior),
            mask=logps.mask,
            step=step,
            version=None if logps.age is None else step - (logps.age - 1),  # The newest policy has the age 1.
        )


def observations(monitor: MonitorChoice | Observations) -> Observations | None:
    """Returns the `Observations` of this process: the same object for every call with the same setting.

    A loss stores the setting and calls this function, because a trainer may copy or pickle the loss.

    monitor: True or a folder; None and False mean no monitor; `Observations` are returned unchanged. Raises
    `TrimtabError` for other values.
    """
    if monitor is None or monitor is False or isinstance(monitor, Observations):
        return monitor or None
    if not isinstance(monitor, bool | str | Path):
        raise TrimtabError(f"monitor={monitor!r}: give True or a folder, each process that trains makes its monitor")
    return _of_process(monitor)


_of_process = cache(Observations)
