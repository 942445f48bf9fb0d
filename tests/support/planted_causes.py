"""What the diagnosis names for a table of tokens, without what only its figures and pages need."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes import find_causes
from trimtab.diagnosis.records import Cause, DataSummary, DriftSplit, Measured, MismatchSize
from trimtab.diagnosis.tokens import TokenTable


def measured(sample: TokenTable) -> Measured:
    origin = DataSummary("trimtab", 1, sample.responses, sample.tokens, int(sample.mask.sum()), "proximal")
    size = MismatchSize({}, {}, 0.0, "", "dense")
    return Measured(origin, size, {}, DriftSplit(False, ""), np.zeros((1, 1)), sample)


def causes(sample: TokenTable) -> tuple[Cause, ...]:
    return find_causes(measured(sample))


def names(sample: TokenTable) -> set[str]:
    return {cause.name for cause in causes(sample)}
