"""`guard=` of TRL's trainers: at the first sign of a collapse, it restores weights from before the sign.

    from trimtab.adapters.trl import GRPOTrainer, Guard
    trainer = GRPOTrainer(model, reward_funcs, args=config, train_dataset=data, guard=True)
    trainer = GRPOTrainer(..., monitor="monitor", guard=Guard(on=("ess", "nonfinite"), every=20))

The guard judges the steps of the monitor, one optimizer step later. Without a sign, training is the same, bit for bit.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from trimtab.errors import TrimtabError, TrimtabWarning, did_you_mean
from trimtab.monitor import Monitor
from trimtab.monitor.alarms import History, Step
from trimtab.monitor.collapse_signs import Sign, Watched, first_sign, needed_snapshots, trusted_step

# Not an import statement: the package is not required.
TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback

LOGGED = {"reward": "reward/mean", "completions/clipped_ratio": "response/truncated"}
"""Name in TRL's log -> name in the rules, for metrics that the rules read and the monitor does not receive."""


@dataclass(frozen=True)
class Guard:
    """What a trainer of TRL does at the first sign of a collapse.

    It restores the newest weights that are not in doubt, with their optimizer and learning-rate schedule, multiplies
    the learning rate by `lr_factor`, drops responses of the discarded weights, and goes on. TRL's step count goes on
    too, so a run does not get longer. At the next sign after `times` returns, it restores weights and stops.

    on: what is watched: "reward" (which needs `logging_steps=1`), "ess", "length", "mismatch" and "nonfinite" losses.
    every: generations between snapshots of weights and optimizer in CPU memory. Up to 20 / `every` + 2 are kept; with
    AdamW, each is three times as large as the trained weights. With several processes, DeepSpeed or FSDP there are no
    snapshots: training stops at a sign, and the warning names the checkpoint of TRL to resume from.

    Raises `TrimtabError` for numbers outside their range and for what cannot be watched.
    """

    on: tuple[Watched, ...] = get_args(Watched)
    every: int = 10
    lr_factor: float = 0.25
    times: int = 3

    def __post_init__(self) -> None:
        for name in self.on:
            if name not in get_args(Watched):
                raise TrimtabError(f"guard: {name!r} cannot be watched{did_you_mean(name, get_args(Watched))}")
        if self.every < 1 or self.times < 0 or not 0 < self.lr_factor < 1:
            raise TrimtabError(f"{self}: every must be at least 1, times at least 0, lr_factor between 0 and 1")


@dataclass(frozen=True)
class Snapshot:
    """A copy of what an optimizer step changes."""

    step: int  # optimizer steps before it
    returns: int  # returns of the guard before it
    tensors: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any]


class ReturnAtSign(TrainerCallback):
    """Judges the steps of a monitor and the losses of a trainer; at a sign of a collapse, restores a snapshot.

    All processes decide alike, because they have the same metrics.
    """

    def __init__(self, trainer: Any, guard: Guard, monitor: Monitor) -> None:
        self._trainer, self._guard, self._monitor = trainer, guard, monitor

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        trainer = self._trainer
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        self._is_whole = trainer.accelerator.num_processes == 1 and not sharded
        updates = getattr(trainer.args, "steps_per_generation", 1) * getattr(trainer.args, "num_iterations", 1)
        self._every = self._guard.every * max(1, updates // trainer.args.gradient_accumulation_steps)
        if "reward" in self._guard.on and trainer.args.logging_steps != 1:
            self._say("guard: the reward is not watched, as TRL does not log every step: set logging_steps=1", state)
        self._returns, self._judged = 0, state.global_step - 1
        self._finite: Tensor | None = None
        self._steps: list[Step] = []
        self._history = History()
        self._logged: dict[int, dict[str, float]] = {}  # number of updates before -> metrics
        self._snapshots = [self._snapshot(state.global_step)] if self._is_whole else []

    def see_loss(self, loss: Tensor) -> None:
        """Stores whether the loss of a micro-batch is finite."""
        finite = torch.isfinite(loss.detach()).all()
        self._finite = finite if self._finite is None else self._finite & finite

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        found = {name: logs[key] for key, name in LOGGED.items() if isinstance(logs.get(key), float)}
        if found:
            self._logged[state.global_step - 1] = found

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sign = self._sign(state.global_step)
        if sign is not None:
            self._act(sign, args, state, control)
        elif self._is_whole and state.global_step % self._every == 0:
            self._snapshots.append(self._snapshot(state.global_step))
            needed = needed_snapshots([one.step for one in self._snapshots], trusted_step(self._steps))
            self._snapshots = [one for one in self._snapshots if one.step in needed]

    def _sign(self, step: int) -> Sign | None:
        """Returns the first sign after `step` updates. The monitor finishes a step at the first batch of the next."""
        finite, self._finite = self._finite, None
        finite = torch.ones(()) if finite is None or "nonfinite" not in self._guard.on else finite
        if not self._trainer.accelerator.gather(finite.long()).all():
            return Sign("nonfinite", "nonfinite", "the loss is not finite", step - 1)
        new = [one for one in self._monitor.steps if one.number > self._judged]
        for one in new:
            self._judged = one.number
            self._steps.append(replace(one, metrics={**one.metrics, **self._logged.pop(one.number, {})}))
            self._history.add(self._steps[-1])
        return first_sign(self._history.steps(), self._guard.on) if new else None

    def _act(self, sign: Sign, args: Any, state: Any, control: Any) -> None:
        text = f"step {state.global_step}: {sign.name}: {sign.text}"
        if not self._is_whole:
            control.should_training_stop = True
            advice = checkpoint_advice(Path(args.output_dir), sign.healthy)
            self._say(f"{text}; training stops, because no process holds the whole training: {advice}", state)
            return
        snapshots = [one for one in self._snapshots if one.step <= sign.healthy] or self._snapshots[:1]
        self._returns += 1
        self._put_back(snapshots[-1], state.global_step)
        start, factor = snapshots[-1].step, self._guard.lr_factor**self._returns
        for key, value in (("returns", self._returns), ("continues_from", start)):
            self._trainer._metrics["train"][f"trimtab/guard/{key}"].append(float(value))
        if self._returns <= self._guard.times:
            self._say(f"{text}; returned to the weights of step {start}, with {factor:g} of the learning rate", state)
            return
        control.should_training_stop = True
        again = f"after {self._guard.times} returns: choose a stricter correction or a lower learning rate"
        self._say(f"{text}; the weights of step {start} are put back, and training stops {again}", state)

    def _say(self, text: str, state: Any) -> None:
        if state.is_world_process_zero:
            warnings.warn(text, TrimtabWarning, stacklevel=2)

    def _snapshot(self, step: int) -> Snapshot:
        trainer = self._trainer
        states = trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()
        return Snapshot(step, self._returns, *map(copied, (dict(self._trained()), *states)))

    def _trained(self) -> list[tuple[str, Tensor]]:
        """Returns the trained parameters and the buffers of the model."""
        model = self._trainer.model
        return [one for one in model.named_parameters() if one[1].requires_grad] + list(model.named_buffers())

    @torch.no_grad()
    def _put_back(self, snapshot: Snapshot, step: int) -> None:
        """Restores a snapshot after `step` updates, and forgets what came after it."""
        trainer = self._trainer
        for name, tensor in self._trained():
            tensor.copy_(snapshot.tensors[name])
        # Copies, because an optimizer may keep and change the tensors that it loads.
        trainer.optimizer.load_state_dict(copied(snapshot.optimizer))
        trainer.lr_scheduler.load_state_dict(copied(snapshot.scheduler))
        factor = self._guard.lr_factor ** (self._returns - snapshot.returns)
        for group in trainer.optimizer.param_groups:
            for key in ("lr", "initial_lr"):
                if group.get(key) is not None:
                    group[key] = group[key] * factor
        for key in ("base_lrs", "_last_lr"):
            if hasattr(trainer.lr_scheduler, key):
                setattr(trainer.lr_scheduler, key, [rate * factor for rate in getattr(trainer.lr_scheduler, key)])
        trainer.drop_responses()
        self._snapshots = [one for one in self._snapshots if one.step <= snapshot.step]
        self._steps = [one for one in self._steps if one.number < snapshot.step]
        self._history = History(self._steps)
        self._judged = step - 1


def copied(value: Any) -> Any:
    """Returns a deep copy of dictionaries, lists and tuples, with every tensor copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        make = getattr(value, "_make", type(value))  # the class of a named tuple takes its items one by one
        return make(map(copied, value))
    return copy.deepcopy(value)


def checkpoint_advice(folder: Path, healthy: int) -> str:
    """Returns advice on which checkpoint in a trainer's folder to resume from: the newest one up to step `healthy`."""
    saved = {int(number): one for one in folder.glob("checkpoint-*") if (number := one.name[11:]).isdecimal()}
    trusted = [number for number in saved if number <= healthy]
    if trusted:
        return f"go on from {saved[max(trusted)]}"
    if saved:
        return f"the newest checkpoint is {saved[max(saved)]}, and steps after {healthy} are in doubt"
    return f"no checkpoint is in {folder}: set save_steps"
