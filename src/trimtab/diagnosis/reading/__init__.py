"""Readers of token log-probs in any known layout; `open_source` gives a stream of chunks and read counts."""

from trimtab.diagnosis.reading.log_source import Source, open_source

__all__ = ["Source", "open_source"]
