"""Measures the size and the location of a mismatch in one pass over the tokens, in bounded memory: `measure`.

  one_pass        all measurements in one pass; a sample of the tokens, which side is wrong, and what is odd
  trained_tokens  trained tokens, fixed bins and sums over groups, which all others use
  size            k3 and the other figures with intervals, their floor, and the parts of mismatch and staleness
  views           by probability, position, turn, ...
  placeholders    constants in place of log-probs

Another view is one more `Axis` in views, with its chart in texts.toml (`views`) and, to be named as the place of a
mismatch, its name in `hotspots.ORDERED` or in texts.toml (`bins`). Another figure comes from
`corrections/statistics.py`.
"""

from trimtab.diagnosis.measure.one_pass import measure

__all__ = ["measure"]
