"""The view by response length, which shows whether sequence-level rules reject long responses."""

from __future__ import annotations

import itertools
import math

import numpy as np

from trimtab.diagnosis.measure.bins import octave, octave_edges
from trimtab.diagnosis.measure.trained_tokens import FIELDS, TrainedTokens
from trimtab.diagnosis.measure.views import BinnedSums
from trimtab.diagnosis.records import View

_OCTAVES = 24
_FINE = _OCTAVES << 5
_BINS = 10


def _outside(log: np.ndarray, low: float, high: float) -> np.ndarray:
    return (log < math.log(low)) | (log > math.log(high))


def rejected(log: np.ndarray, length: np.ndarray, k3: np.ndarray) -> dict[str, np.ndarray]:
    """Returns which responses each rule rejects at published bounds, bool (responses,), from sums over trained tokens.

    Sequence bounds: ALP (arXiv 2603.19470, Table 1) and verl; geometric: SkyRL and Miles; mean k3: verl's preset; mean
    log mu - log pi: OPSM (DeepSeek-V3.2) without its condition on the advantage.
    """
    mean = log / length
    return {
        "sequence [0.5, 2]": _outside(log, 0.5, 2.0),
        "sequence [0.5, 3]": _outside(log, 0.5, 3.0),
        "geometric [0.99, 1.01]": _outside(mean, 0.99, 1.01),
        "geometric [0.99, 1.001]": _outside(mean, 0.99, 1.001),
        "mean k3 <= 0.01": k3 / length > 0.01,
        "opsm 0.05": -mean > 0.05,
    }


class LengthView:
    """The view by number of trained tokens of the response, in bins with about equally many responses.

    Fine bins are filled in one pass and merged at the end.
    """

    def __init__(self) -> None:
        self._bins = BinnedSums(_FINE)
        self._responses = np.zeros(_FINE, dtype=np.int64)
        self._rejected: dict[str, np.ndarray] = {}

    def add(self, tokens: TrainedTokens) -> None:
        fine = np.minimum(octave(tokens.lengths.astype(np.float32), 0), _FINE - 1)
        self._bins.add(np.repeat(fine, tokens.lengths), tokens)
        self._responses += np.bincount(fine, minlength=_FINE)
        log, k3 = (tokens.sums[:, FIELDS.index(name)] for name in ("log", "k3"))
        for rule, gone in rejected(log, tokens.lengths, k3).items():
            share = self._rejected.setdefault(rule, np.zeros(_FINE))
            share += np.bincount(fine, weights=gone, minlength=_FINE)

    def view(self) -> View:
        starts = self._starts()
        responses = np.add.reduceat(self._responses, starts)
        edges = np.ceil(octave_edges(0, _FINE))[np.append(starts, np.flatnonzero(self._responses)[-1] + 1)]
        labels = [_label(int(low), int(high) - 1) for low, high in itertools.pairwise(edges)]
        columns = {
            f"rejected/{rule}": np.add.reduceat(gone, starts) / responses for rule, gone in self._rejected.items()
        }
        return self._bins.merged(starts).view("length", labels, edges, {"responses": responses, **columns})

    def _starts(self) -> np.ndarray:
        """Returns the first fine bin of each bin; a new one begins after every tenth of the responses."""
        used = np.flatnonzero(self._responses)
        before = np.cumsum(self._responses[used]) - self._responses[used]
        tenth = before * _BINS // self._responses.sum()
        return used[np.append(True, np.diff(tenth) > 0)]


def _label(low: int, high: int) -> str:
    return f"{low}" if high <= low else f"{low}-{high}"
