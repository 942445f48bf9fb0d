"""Accumulates all measurements chunk by chunk in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from trimtab.diagnostics.diagnosis import Chunk, Measured, Origin
from trimtab.diagnostics.measure.length import ByLength
from trimtab.diagnostics.measure.sample import Sample
from trimtab.diagnostics.measure.size import Sizes
from trimtab.diagnostics.measure.split import Drift
from trimtab.diagnostics.measure.trained import Trained
from trimtab.diagnostics.measure.versions import ByAge
from trimtab.diagnostics.measure.views import ByEntropy, ByPosition, ByProbability, ByTurn, ByTurnNumber, Part
from trimtab.diagnostics.measure.vocabulary import ById
from trimtab.diagnostics.tokens import plane
from trimtab.errors import TrimtabError

SCATTER = 100


def measure(chunks: Iterable[Chunk], origin: Callable[[], Origin], *, seed: int = 0) -> Measured:
    """Everything `diagnose` says about size and place of the mismatch, from one pass; `origin` is asked after it.

    How the data is cut into chunks changes nothing but the last digits of sums. `seed` draws the bootstrap.

    Raises `TrimtabError` when there is no trained token, or when chunks have different columns.
    """
    sizes, drift, sample, ids = Sizes(), Drift(), Sample(), ById()
    places = (ByProbability(), ByPosition(), ByLength(), ByTurn(), ByTurnNumber())
    parts: tuple[Part, ...] = (*places, ByAge(), ByEntropy())
    scatter = np.zeros((SCATTER, SCATTER), dtype=np.int64)
    responses = trained = 0
    for chunk in chunks:
        tokens = Trained.of(chunk, responses)
        sample.add(chunk, responses)
        responses += chunk.responses
        if not len(tokens):
            continue
        trained += len(tokens)
        scatter += plane(tokens.q, tokens.p, SCATTER)
        for part in (sizes, drift, ids, *parts):
            part.add(tokens)
    found = origin()
    if not trained:
        raise TrimtabError("no response has a trained token: check loss_mask, at least one token must be True")
    drawn = sample.result()
    views = [ids.view(drawn), *(part.view() for part in parts)]
    return Measured(
        origin=found,
        size=sizes.size(found.anchor, seed),
        views={view.name: view for view in views if view is not None},
        split=drift.split(seed),
        scatter=scatter,
        sample=drawn,
    )
