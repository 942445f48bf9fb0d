"""Measures the size and the location of a mismatch in one pass over the tokens, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from trimtab.diagnosis.measure.by_age import ByAge
from trimtab.diagnosis.measure.by_length import ByLength
from trimtab.diagnosis.measure.by_token_id import ById
from trimtab.diagnosis.measure.drift_split import Drift
from trimtab.diagnosis.measure.mismatch_size import Sizes
from trimtab.diagnosis.measure.sample import Sample
from trimtab.diagnosis.measure.trained_tokens import Trained
from trimtab.diagnosis.measure.views import ByEntropy, ByPosition, ByProbability, ByTurn, ByTurnNumber, Part
from trimtab.diagnosis.records import Chunk, Measured, Origin
from trimtab.diagnosis.token_statistics import plane
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
