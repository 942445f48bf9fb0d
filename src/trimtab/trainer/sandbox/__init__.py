"""Runs code that is not ours: functions in processes with limits, Python text of a model in a sandbox."""
