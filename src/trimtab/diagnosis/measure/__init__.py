"""Measures the size and the location of a mismatch in one pass over the tokens, in bounded memory."""

from trimtab.diagnosis.measure.measure import measure

__all__ = ["measure"]
