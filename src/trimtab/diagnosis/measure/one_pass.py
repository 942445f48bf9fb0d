"""Measures everything in one pass over the tables of tokens, and draws a sample of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.measure.odd_batches import batch_findings
from trimtab.diagnosis.measure.placeholders import PlaceholderSums, without_placeholders
from trimtab.diagnosis.measure.rescored import rescored_sides
from trimtab.diagnosis.measure.size import DriftSums, SizeSums
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens, hash_index, plane
from trimtab.diagnosis.measure.views import AXES, AxisView, TokenIdView, prompt_view
from trimtab.diagnosis.records import DataSummary, DriftSplit, Measured, Placeholder, RescoredSides, finding, read_table
from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding, TrimtabError
from trimtab.text import short

SCATTER = 100
ASSUMED = "the age of 0 of all tokens is assumed, not recorded"


def measure(
    tables: Iterable[TokenTable],
    origin: Callable[[], DataSummary],
    *,
    left_out: tuple[Placeholder, ...] = (),
    seed: int = 0,
) -> Measured:
    """Measures size and location of the mismatch in one pass, and finds placeholders; `origin` is called after it.

    left_out: placeholders of an earlier pass, which no figure counts. The split into tables affects only the last
    digits of sums. `seed` is that of the bootstrap. Raises `TrimtabError` without a trained token, for tables with
    different columns, and for padding that cannot be told from tokens.
    """
    constants = PlaceholderSums()
    sizes, drift, sample, ids = SizeSums(), DriftSums(), Sample(), TokenIdView()
    parts = [AxisView(axis) for axis in AXES]
    scatter = np.zeros((SCATTER, SCATTER), dtype=np.int64)
    responses = trained = 0
    for whole in tables:
        if not left_out:
            constants.add(whole)
        table = without_placeholders(whole, left_out)
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
    sides = rescored_sides(drawn)
    unknown = "version" if "policy_version" in summary.missing else ""  # ages of a synchronous trainer, not recorded
    views = [*(part.view() for part in parts), ids.view(drawn), prompt_view(drawn)]
    return Measured(
        origin=replace(
            summary,
            trained=trained,
            findings=(
                *summary.findings,
                *constants.findings(),
                *batch_findings(drawn),
                *_of_sample(drawn, trained, sides),
            ),
        ),
        size=sizes.size(summary.anchor, seed),
        views={view.name: view for view in views if view is not None and view.name != unknown},
        split=DriftSplit(False, ASSUMED) if summary.assumes_current else drift.split(seed),
        scatter=scatter,
        sample=drawn,
        rescored=sides,
        placeholders=left_out or constants.found(),
        cleaned=bool(left_out),
    )


def _of_sample(sample: TokenTable, trained: int, sides: RescoredSides | None) -> Iterator[Finding]:
    """Yields what causes are inferred from, where that is less than the data, with its k3, and which side is wrong."""
    inside = sample.mask & np.isfinite(sample.behavior) & np.isfinite(sample.trainer)
    if inside.sum() < 0.99 * trained:
        part = float(k3(sample.trainer[inside].astype(np.float64) - sample.behavior[inside]).mean())
        first = f", of long ones the first {LONGEST:,} tokens" if (sample.lengths == LONGEST).any() else ""
        yield finding("sample", tokens=f"{inside.sum():,}", all=f"{trained:,}", first=first, k3=short(part))
    if sides is not None:
        which = read_table("texts.toml")["rescored"]["other" if sides.is_other_model else sides.side]
        yield finding("rescored", sampler=short(sides.sampler.value), trainer=short(sides.trainer.value), which=which)


SAMPLE_TOKENS = 400_000
LONGEST = SAMPLE_TOKENS // 8
"""Longer responses are truncated to this many tokens, so that none fills the sample."""


class Sample:
    """The responses with the smallest hash of their index, as many as fit into `tokens`.

    The sample does not depend on the split of the stream into tables: once a response does not fit, it and all with a
    larger hash are excluded for good.
    """

    def __init__(self, tokens: int = SAMPLE_TOKENS, longest: int = LONGEST) -> None:
        self._limit, self._longest = tokens, longest
        self._kept: list[TokenTable] = []
        self._numbers: list[np.ndarray] = []
        self._tokens = 0
        self._limit_hash = np.iinfo(np.uint64).max

    def add(self, table: TokenTable, first: int) -> None:
        """Adds a table; `first`: number of responses before it. Raises `TrimtabError` for different columns."""
        numbers = hash_index(np.arange(first, first + table.responses, dtype=np.uint64))
        keep = numbers < self._limit_hash
        if self._kept and (differing := table.columns.keys() ^ self._kept[0].columns.keys()):
            raise TrimtabError(
                f"the files have different columns ({', '.join(sorted(differing))} only in some): "
                "diagnose them one kind at a time"
            )
        if not keep.any() and self._kept:
            return
        piece = table.select(keep, self._longest)
        self._kept.append(piece)
        self._numbers.append(numbers[keep])
        self._tokens += piece.tokens
        if self._tokens > self._limit + self._limit // 4:
            self._trim()

    def result(self) -> TokenTable:
        """Returns the sample, in the order of the stream."""
        self._trim()
        return self._kept[0]

    def _trim(self) -> None:
        merged, numbers = TokenTable.concat(self._kept), np.concatenate(self._numbers)
        order = np.argsort(numbers)
        over = np.flatnonzero(np.cumsum(merged.lengths[order]) > self._limit)
        if len(over):
            self._limit_hash = numbers[order[over[0]]]
        keep = numbers < self._limit_hash
        self._kept, self._numbers = [merged.select(keep, self._longest)], [numbers[keep]]
        self._tokens = self._kept[0].tokens
