"""Readers of token log-probs in any known layout; `open_log` gives a stream of token tables and read counts."""

from trimtab.diagnosis.reading.log_source import LogSource, open_log

__all__ = ["LogSource", "open_log"]
