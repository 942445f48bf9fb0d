"""Watches the log-probs of trainer and sampler inside a training loop."""

from trimtab.monitor.alarms import Alarm
from trimtab.monitor.monitor import Monitor

__all__ = ["Alarm", "Monitor"]
