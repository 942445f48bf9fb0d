"""A callback for transformers' trainers, TRL's among them: the monitor's alarms from what the trainer logs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.monitor.alarms import Alarm, History, alarms
from trimtab.monitor.curves import best_mismatch, curves_of
from trimtab.monitor.monitor import warn
from trimtab.monitor.scalars import metric_names, step_of, without_sample

# Not an import statement: the package is not required.
TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback


class LogAlarms(TrainerCallback):
    """Raises alarms from the scalars that a trainer logs; its loss is not changed.

        from trimtab.monitor.log_alarms import LogAlarms
        trainer = GRPOTrainer(..., callbacks=[LogAlarms()])

    on_alarm: is called with each alarm, once by name; by default it is a `TrimtabWarning`. Set `logging_steps=1`:
    alarms compare steps. TRL logs the mismatch (`sampling/sampling_logp_difference/mean`) where vLLM samples; elsewhere
    the alarms are those of length, truncation, reward and gradient norm.
    """

    def __init__(self, on_alarm: Callable[[Alarm], None] = warn) -> None:
        self._on_alarm = on_alarm
        self._history = History()
        self._raised: set[str] = set()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Judges the step. Logs without a known scalar, such as those of an evaluation, are left out."""
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
        curves = curves_of([numbers])[1]
        step = step_of({**numbers, "step": state.global_step}, best_mismatch(curves), metric_names(curves))
        if not state.is_world_process_zero or step is None:
            return
        self._history.add(step)
        for alarm in alarms(self._history.steps()):
            if alarm.name not in self._raised:
                self._raised.add(alarm.name)
                self._on_alarm(without_sample(alarm))
