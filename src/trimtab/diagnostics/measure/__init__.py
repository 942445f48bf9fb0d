"""One pass over the tokens of any amount of data: how large the mismatch is and where it sits."""

from trimtab.diagnostics.measure.measure import measure

__all__ = ["measure"]
