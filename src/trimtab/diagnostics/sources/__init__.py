"""Readers of token log-probs, whatever wrote them: `open_source` gives a stream of chunks and an account of it."""

from trimtab.diagnostics.sources.source import Source, open_source

__all__ = ["Source", "open_source"]
