"""A callback for trainers of transformers and TRL: raises the monitor's alarms from the scalars that they log."""

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

    on_alarm: called with each alarm, once per name; by default, it issues a `TrimtabWarning`. Set `logging_steps=1`,
    because alarms compare steps. If vLLM samples, TRL logs the mismatch (`sampling/sampling_logp_difference/mean`);
    otherwise only length, truncation, reward and gradient norm are judged.
    """

    def __init__(self, on_alarm: Callable[[Alarm], None] = warn) -> None:
        self._on_alarm = on_alarm
        self._history = History()
        self._raised: set[str] = set()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Judges the step. Logs without a known scalar, such as those of an evaluation, are ignored."""
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
