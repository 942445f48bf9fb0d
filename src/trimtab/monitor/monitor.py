"""`trimtab.Monitor`: three lines in any training loop."""

from __future__ import annotations

import atexit
import json
import operator
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections.policy_logps import check_batch, check_tensor
from trimtab.errors import Finding, GuardStop, Status, TrimtabError, TrimtabWarning, did_you_mean
from trimtab.files import readable_errors
from trimtab.monitor.alarms import DIAGNOSE, WINDOW, Alarm, History, Step, alarms
from trimtab.monitor.collapse_signs import WATCHED, first_sign
from trimtab.monitor.metrics_of_step import MeanRatio, over_ranks, step_metrics
from trimtab.monitor.response_sample import ResponseSample
from trimtab.objectives import Metrics
from trimtab.text import json_value

STATUSES: tuple[Status, ...] = ("ok", "note", "fail")
"""From the best to the worst; `monitor/verdict` is the index of a status here."""
STOPPED = 3
"""Exit status of a process that `stop_on` has stopped."""


class Monitor:
    """Measures the mismatch of trainer and sampler at every step, raises alarms, and keeps a sample.

        monitor = trimtab.Monitor(out="logs")
        logger.log(monitor.observe(logp_train=new, logp_rollout=old, mask=mask, step=step))   # in the loop
        monitor.close()

    out: a folder for `metrics.jsonl` (one object per step) and `sample.jsonl` (which `trimtab diagnose` reads), both
        written at every step; None writes nothing.
    on_alarm: called with each alarm; by default, it issues a `TrimtabWarning`.
    sample_tokens: number of trained tokens in the sample, on each rank.
    process_group: the ranks whose batches are merged, with one collective per call; None: the default group, if
        `torch.distributed` is initialized at the first call.
    merge_ranks: False measures each rank alone, without a collective, for ranks that do not make the same calls.
    stop_on: what stops the training, from "reward", "ess", "length" and "mismatch": at the first sign of a collapse,
        `observe` raises `GuardStop`, and so does every later call. The message says what was seen, and the newest step
        that is not in doubt. A script that does not catch the error prints the message and exits with status 3. A Ray
        worker passes the error to its driver, which exits likewise if it has such a monitor and no handler of its own.

    Memory does not grow with the number of steps. An alarm is raised once, again if it gets worse, and again if it
    comes back after 20 steps. A monitor that is still open when the process ends closes itself. A second trainer may
    use the same monitor: a step below the previous one begins a new run, with its own alarms and sample. If `out` has
    files of an earlier run or process, they stay, and a folder beside it is written (`logs_2`).
    """

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        on_alarm: Callable[[Alarm], None] | None = None,
        sample_tokens: int = 200_000,
        process_group: dist.ProcessGroup | None = None,
        merge_ranks: bool = True,
        stop_on: Collection[str] = (),
    ) -> None:
        self._stop_on = checked_signs(stop_on)
        if self._stop_on:
            exit_when_stopped()
        self._group = process_group
        self._merge_ranks = merge_ranks
        self._distributed, self._rank = False, 0
        self._folder = None if out is None else Path(out).absolute()
        self._on_alarm = on_alarm or warn
        self._sample_tokens = sample_tokens
        self._begin_run()

    def _begin_run(self) -> None:
        self._out = None if self._folder is None else _new_folder(self._folder)
        self._open = False  # Whether `close` has files to write.
        self._current: tuple[int, Metrics, dict[str, float]] | None = None
        self._history = History()
        self._last_seen: dict[str, int] = {}  # name of an alarm -> number of the step, counted from 0
        self._raised: dict[str, Alarm] = {}
        self._stopped = ""  # Why training stops.

    @torch.no_grad()
    def observe(
        self,
        *,
        logp_train: Float[Tensor, "batch time"],
        logp_rollout: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
        step: int,
        version: int | Tensor | None = None,
        group: Tensor | None = None,
        reward: Tensor | None = None,
        advantage: Tensor | None = None,
        response_ids: Tensor | None = None,
        truncated: Tensor | None = None,
        grad_norm: float | None = None,
    ) -> dict[str, float]:
        """Adds a batch or micro-batch of a step, and returns the metrics of that step so far, for a logger.

        logp_train: the trainer's log-probs, from the weights before the update. logp_rollout: the log-probs that the
            sampler reported. mask: the trained tokens, bool.
        version: of the weights that sampled, in the unit of `step`: one number, (batch,) or (batch, time).
        group: (batch,) the number of the prompt. reward, advantage, truncated (bool): (batch,).
        response_ids: (batch, time). grad_norm: the gradient norm of the previous step.

        A step is judged when it is complete: at the first call for the next step. All ranks must make the same calls.
        Raises `ValueError` for a wrong type, shape or device, `TrimtabError` if a file cannot be written, and
        `GuardStop` for `stop_on`.
        """
        step = _whole("step", step)
        check_batch(mask, **{"logp_train": logp_train, "logp_rollout": logp_rollout, "response_ids": response_ids})
        columns = {"group": group, "reward": reward, "advantage": advantage}
        for name, column in {**columns, "truncated": truncated}.items():
            if column is not None:
                check_tensor(name, column, mask, (len(mask),), kind="real", words="(batch,)")
        if self._current is not None and self._current[0] != step:
            self._finish()
        self._open_run(step)
        here = step_metrics(
            logp_train,
            logp_rollout,
            mask,
            age=None if version is None else step - _column(version, mask),
            **{
                "reward/mean": reward,
                "response/truncated": truncated,
                "grad_norm": None if grad_norm is None else torch.tensor([_number(grad_norm)], device=mask.device),
            },
        )
        here = over_ranks(here, self._group) if self._distributed else here
        merged = here if self._current is None else self._current[1] + here
        metrics = merged.finalize() | {"monitor/alarms": float(len(self._raised))}
        if self._history.count >= WINDOW:
            metrics["monitor/verdict"] = float(STATUSES.index(self.verdict.status))
        self._current = (step, merged, metrics)
        if self._out is not None:
            tokens = {"logp_behavior": logp_rollout, "logp_proximal": logp_train, "response_ids": response_ids}
            versions = {"policy_version": version, "proximal_version": None if version is None else step}
            self._sample.add(mask, {**tokens, "step": step, **columns, **versions})
        return dict(metrics)

    def _open_run(self, step: int) -> None:
        """Begins a new run if the step is below the previous one. Raises `GuardStop` if a sign was seen in this run."""
        if self._history.count and step < self._history.newest[-1].number:
            self.close()
            self._begin_run()
        if self._stopped:
            raise GuardStop(self._stopped)
        if not self._history.count and self._current is None:
            # Not earlier: a monitor may be made before `torch.distributed` is initialized.
            self._distributed = self._merge_ranks and dist.is_available() and dist.is_initialized()
            self._rank = dist.get_rank(self._group) if self._distributed else 0
            self._sample = ResponseSample(self._sample_tokens, seed=self._rank)
        if self._out is not None and not self._open:
            self._open = True
            atexit.register(self._close_at_exit)

    @property
    def steps(self) -> list[Step]:
        """The finished steps that the rules read: the first, the newest, and the window of the best reward."""
        return self._history.steps()

    @property
    def verdict(self) -> Finding:
        """The worst status of all alarms so far: `ok`, `note` (may matter) or `fail`, and what to do."""
        raised = sorted(self._raised.values(), key=lambda alarm: alarm.step)
        status = STATUSES[max((STATUSES.index(alarm.status) for alarm in raised), default=0)]
        diagnose = f"{'' if self._out else 'give out=FOLDER and '}run `trimtab diagnose {self._out or 'FOLDER'}`"
        if not self._history.count and self._current is None:
            return Finding("note", "monitor", "no step was observed", "call `observe` at every step")
        if not raised:
            advice = f"{diagnose} to see which tokens the mismatch is at"
            return Finding(status, "monitor", f"no alarm in {self._history.count} steps", advice)
        detail = "; ".join(f"{alarm.name} at step {alarm.step}" for alarm in raised)
        advice = next(alarm.next_step for alarm in raised if alarm.status == status)
        return Finding(status, "monitor", detail, advice.replace(DIAGNOSE, diagnose))

    def close(self) -> Finding:
        """Judges the last step, writes its files, and returns the verdict.

        A second call changes nothing. With `merge_ranks`, all ranks call it.
        """
        if self._current is not None:
            self._finish()
        if self._open:
            self._open = False
            atexit.unregister(self._close_at_exit)
            self._write_sample()  # again, in case that it failed
            if self._distributed:
                dist.barrier(self._group)  # The sample is complete when all ranks have written.
        return self.verdict

    def _close_at_exit(self) -> None:
        # Ranks do not end together: a collective could hang.
        if not self._distributed:
            self.close()
        elif self._current is not None:
            self._finish()

    def _write_sample(self) -> None:
        if self._out is not None and len(self._sample):
            path = self._out / (f"sample_rank_{self._rank}.jsonl" if self._distributed else "sample.jsonl")
            with readable_errors(path):
                self._sample.flush(path)

    def _finish(self) -> None:
        assert self._current is not None
        number, merged, metrics = self._current
        self._current = None
        ratio = merged.parts["mean_ratio"]
        assert isinstance(ratio, MeanRatio)
        step = Step(number, metrics, MeanRatio(**{name: value.cpu() for name, value in vars(ratio).items()}))
        self._history.add(step)
        found = alarms(self._history.steps())
        for alarm in found:
            earlier = self._raised.get(alarm.name)
            worse = earlier is None or STATUSES.index(alarm.status) > STATUSES.index(earlier.status)
            if worse:
                self._raised[alarm.name] = alarm
            if self._rank == 0 and (worse or self._history.count - self._last_seen[alarm.name] >= WINDOW):
                self._on_alarm(alarm)
            self._last_seen[alarm.name] = self._history.count
        self._write_sample()
        if self._out is not None and self._rank == 0:
            row = {"step": number, **step.metrics, "alarms": [alarm.name for alarm in found]}
            path = self._out / "metrics.jsonl"
            with readable_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(json_value(row)) + "\n")
        if self._stop_on and not self._stopped:
            self._stopped = self._reason_to_stop()

    def _reason_to_stop(self) -> str:
        """Returns the first sign of a collapse at the newest step as one line; empty without one."""
        steps = self.steps
        sign = first_sign(steps, self._stop_on)
        if sign is None:
            return ""
        healthy = max(sign.healthy, steps[0].number)
        files = "" if self._out is None else f", and look at {self._out}"
        return (
            f"step {steps[-1].number}: {sign.name}: {sign.text}; training stops: go on from a checkpoint of step "
            f"{healthy} or before, the newest that is not in doubt, with a stricter correction or a lower learning "
            f"rate{files}"
        )


def checked_signs(names: Collection[str]) -> tuple[str, ...]:
    """Returns the names as a tuple. Raises `TrimtabError` for a name that cannot be watched."""
    known = set(WATCHED.values())
    for name in (names,) if isinstance(names, str) else names:
        if name not in known:
            raise TrimtabError(f"stop_on: {name!r} cannot be watched{did_you_mean(name, known)}")
    return tuple(names)


def exit_when_stopped() -> None:
    """Makes an uncaught `GuardStop` end this process with its message, without a traceback, and with status 3."""
    before = sys.excepthook
    if getattr(before, "exits_when_stopped", False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not isinstance(error, GuardStop):
            before(kind, error, where)
            return
        traceback.print_exception(GuardStop, GuardStop(str(error)), None)
        raise SystemExit(STOPPED)  # Raised here, it ends Python as if the script had raised it.

    hook.exits_when_stopped = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _new_folder(folder: Path) -> Path:
    """Returns a folder without files of an earlier run: the given one, or a new one beside it."""
    new, number = folder, 1
    while any(new.glob("metrics.jsonl")) or any(new.glob("sample*.jsonl")):
        number += 1
        new = folder.with_name(f"{folder.name}_{number}")  # `trimtab diagnose` reads every file of a folder
    with readable_errors(new):
        new.mkdir(parents=True, exist_ok=True)
    return new


def _column(version: int | Tensor, mask: Tensor) -> Tensor:
    if not isinstance(version, Tensor):
        return torch.full((len(mask),), float(_whole("version", version)), device=mask.device)
    version = version.to(mask.device)
    shapes = ((), (len(mask),), tuple(mask.shape))
    check_tensor("version", version, mask, *shapes, kind="number", words="one number, (batch,) or (batch, time)")
    return version.double()


def _whole(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 1 << 53
    if abs(number) >= 1 << 53:
        raise ValueError(f"{name} must be a whole number below 2^53, and not this {type(value).__name__}")
    return number


def _number(grad_norm: float) -> float:
    try:
        return float(grad_norm)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        kind = type(grad_norm).__name__
        raise ValueError(f"grad_norm must be one number that a float can hold, and not this {kind}") from None


def warn(alarm: Alarm) -> None:
    """Warns of an alarm in one line."""
    # Level 5 is the line of the training loop, outside `_finish`, `observe` and its decorator. For `LogAlarms`, it is
    # a line of transformers, which calls the callback.
    warnings.warn(f"step {alarm.step}: {alarm.name}: {alarm.text}", TrimtabWarning, stacklevel=5)
