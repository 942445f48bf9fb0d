"""Shows a `trimtab.Monitor` what the losses of other trainers are given.

It is given, or made at the first batch of a process that asks for one. One that is made stops the training at what the
environment variable TRIMTAB_STOP_ON names, such as `ess,mismatch` (`stop_on` of `trimtab.Monitor`).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.corrections.reduce import nan_below_minimum
from trimtab.errors import TrimtabError
from trimtab.monitor import Monitor
from trimtab.objectives import PolicyLogps

STOP_ON = "TRIMTAB_STOP_ON"
OBSERVED = ("mismatch/k3", "mismatch/ess_token", "mean_ratio", "monitor/alarms")
"""Scalars of the monitor that every step has and that a trainer may average over micro-batches and processes."""

MonitorChoice = str | Path | bool | None
"""True, a folder for the files of each process that trains, or no monitor."""


def opened(monitor: Monitor | str | Path | bool, *, merge_ranks: bool) -> Monitor:
    """Returns the given monitor, one without files for True, or one that writes into a folder.

    A monitor closes itself when the process ends. merge_ranks: as for `trimtab.Monitor`. Without it, each rank of
    `torch.distributed` has the folder `rank_RANK`. Raises `TrimtabError` for what is none of these.
    """
    if not isinstance(monitor, bool | str | Path):
        if not hasattr(monitor, "observe"):
            raise TrimtabError(f"monitor={monitor!r}: give True, a folder, or a trimtab.Monitor")
        return monitor
    if isinstance(monitor, bool):
        return Monitor(merge_ranks=merge_ranks, stop_on=stop_on())
    alone = not merge_ranks and dist.is_available() and dist.is_initialized()
    folder = Path(monitor) / (f"rank_{dist.get_rank()}" if alone else "")
    return Monitor(folder, merge_ranks=merge_ranks, stop_on=stop_on())


def stop_on() -> list[str]:
    """Returns what TRIMTAB_STOP_ON names."""
    return [name for part in os.environ.get(STOP_ON, "").split(",") if (name := part.strip())]


class Observations:
    """What a loss is given in one process. An update ends when an optimizer of `torch.optim` steps in it.

    Ranks are not merged: they do not call a loss alike (pipelines, single sequences); a collective would wait for ever.
    """

    def __init__(self, monitor: Monitor | str | Path | bool) -> None:
        self._monitor = opened(monitor, merge_ranks=False)
        self._step, self._updated = 0, False
        self._follows_optimizer = False

    def show(self, logps: PolicyLogps, step: int | None = None) -> dict[str, float]:
        """Adds a micro-batch, and returns the scalars of its update so far.

        step: of the update, where the trainer passes it.
        """
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
    """Returns the observations of this process: the same object for each call with one setting.

    A trainer may copy or pickle a loss, so a loss keeps the setting and looks the object up.

    monitor: True, or a folder; None and False are none; observations are returned as they are. Raises `TrimtabError`
    for other values.
    """
    if monitor is None or monitor is False or isinstance(monitor, Observations):
        return monitor or None
    if not isinstance(monitor, bool | str | Path):
        raise TrimtabError(f"monitor={monitor!r}: give True or a folder, each process that trains makes its monitor")
    return _of_process(monitor)


@cache
def _of_process(monitor: str | Path | bool) -> Observations:
    return Observations(monitor)
