"""Watches the mismatch of trainer and sampler, and the curves of a run, and raises alarms.

`alarms` is the table of rules, pure functions of the steps so far, that everything here and the report of a run ask.
`monitor` is `trimtab.Monitor` for any training loop: `metrics_of_step` measures, `response_sample` keeps responses for
`trimtab diagnose`. `scalars` judges and prints what another trainer logged: `scalar_files` reads it, `curves` finds
what is known by scalars.csv, and what excludes another; `log_alarms` does so while a trainer of transformers runs.

Another alarm is a function and a row of `RULES` in `alarms`. A metric that it reads has its names in `scalars.METRICS`
and scalars.csv. Guards and `stop_on` act on it if `collapse_signs.WATCHED` names it, and the verdict of a report
repeats it if `report.health.ALARMS` does.
"""

from trimtab.monitor.alarms import Alarm
from trimtab.monitor.monitor import Monitor

__all__ = ["Alarm", "Monitor"]
