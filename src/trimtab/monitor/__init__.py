"""Watches the mismatch of trainer and sampler, and the curves of a run, and raises alarms.

monitor            `trimtab.Monitor` for any training loop
metrics_of_step    the statistics of a step that it keeps
response_sample    the sample of responses that it writes for `trimtab diagnose`
alarms             the rules for all alarms: pure functions of the steps so far, which the report of a run uses too
collapse_signs     the alarms that guards and `stop_on` act on
scalars            judges and prints the scalars that another trainer logged
scalar_files       reads these scalars from files
curves             finds the names that scalars.csv lists, and logged means that contradict each other
log_alarms         a callback that judges the logged scalars while a trainer of transformers runs

To add an alarm, write a function and a row of `RULES` in `alarms`, and add the names of a new metric to
`scalars.METRICS` and scalars.csv. Guards and `stop_on` act on alarms in `collapse_signs.WATCHED`; the verdict of a
report repeats alarms in `report.health.ALARMS`.
"""

from trimtab.monitor.alarms import Alarm
from trimtab.monitor.monitor import Monitor

__all__ = ["Alarm", "Monitor"]
