"""Measures everything in one pass over the tables of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.measure.batch_anomalies import find_anomalies
from trimtab.diagnosis.measure.placeholders import PlaceholderSums, remove_placeholders
from trimtab.diagnosis.measure.rescored_sides import describe_sides, judge_sides
from trimtab.diagnosis.measure.sample import Sample, describe_sample
from trimtab.diagnosis.measure.size import DriftSums, SizeSums
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens, plane
from trimtab.diagnosis.measure.views import AXES, AxisView, TokenIdView, prompt_view
from trimtab.diagnosis.records import DataSummary, DriftSplit, Measured, Placeholder
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

SCATTER = 100
ASSUMED = "the age of 0 of all tokens is assumed, not recorded"


def measure(
    tables: Iterable[TokenTable], origin: Callable[[], DataSummary], *, left_out: tuple[Placeholder, ...] = ()
) -> Measured:
    """Measures size and location of the mismatch in one pass, and finds placeholders; `origin` is called after it.

    left_out: placeholders of an earlier pass, which all figures exclude. The split into tables affects only the last
    digits of sums. Raises `TrimtabError` if no token is trained, if tables have different columns, or if padding cannot
    be told from tokens.
    """
    constants = PlaceholderSums()
    sizes, drift, sample, ids = SizeSums(), DriftSums(), Sample(), TokenIdView()
    parts = [AxisView(axis) for axis in AXES]
    scatter = np.zeros((SCATTER, SCATTER), dtype=np.int64)
    responses = trained = 0
    for whole in tables:
        if not left_out:
            constants.add(whole)
        table = remove_placeholders(whole, left_out)
        tokens = TrainedTokens.of(table, responses)
        sample.add(table, responses)
        responses += table.responses
        if not len(tokens):
            continue
        trained += len(tokens)
        scatter += plane(tokens.q, tokens.p, SCATTER)
        for part in (sizes, drift, ids, *parts):
            part.add(tokens)
    summary = origin()
    if not trained:
        raise TrimtabError("no response has a trained token: check loss_mask, at least one token must be True")
    drawn = sample.result()
    sides = judge_sides(drawn)
    unknown = "version" if "policy_version" in summary.missing else ""  # ages of a synchronous trainer, not recorded
    views = [*(part.view() for part in parts), ids.view(drawn), prompt_view(drawn)]
    found = (*constants.findings(), *find_anomalies(drawn), *describe_sample(drawn, trained), *describe_sides(sides))
    return Measured(
        origin=replace(summary, trained=trained, findings=(*summary.findings, *found)),
        size=sizes.size(summary.anchor),
        views={view.name: view for view in views if view is not None and view.name != unknown},
        split=DriftSplit(False, ASSUMED) if summary.assumes_current else drift.split(),
        scatter=scatter,
        sample=drawn,
        rescored=sides,
        placeholders=left_out or constants.found(),
        cleaned=bool(left_out),
    )
