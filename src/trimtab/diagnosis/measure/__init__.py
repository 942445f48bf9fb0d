"""Measures the size and the location of a mismatch in one pass over the tokens, in bounded memory: `measure`.

  one_pass        all measurements in one pass
  sample          a random sample of the responses; batch_anomalies: its anomalies; rescored_sides: which side is wrong
  trained_tokens  trained tokens, fixed bins and sums over groups, which all others use
  size            k3 and the other figures with intervals, their floor, and the parts of mismatch and staleness
  views           by probability, position, turn, ..., and where in them the mismatch is
  placeholders    constants in place of log-probs

To add a view, add an `Axis` in views and its chart in texts.toml (`views`). To let the answer name it as the place of a
mismatch, also add its name to `views.ORDERED` or to texts.toml (`bins`). To add a figure, add it to
`corrections/statistics.py`.
"""

from trimtab.diagnosis.measure.one_pass import measure

__all__ = ["measure"]
