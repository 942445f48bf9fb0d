"""Aligns the lists of a batch of rows to the sampler's log-probs: without padding and prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trimtab.diagnosis.reading.batches import Batch, flat, list_lengths
from trimtab.diagnosis.reading.counts import EXTERNAL_TRACE, OUT_OF_LOSS, UNEQUAL, ReadCounts
from trimtab.diagnosis.reading.layouts import Layout

_WHOLE_NUMBERS = ("response_ids", "policy_version", "turn", "loss_mask", "padding_mask")


class KeptRows:
    """The rows that are still kept: `rows`, bool (rows,). A dropped one is counted by the first reason for it."""

    def __init__(self, numbers: Sequence[int], tally: ReadCounts) -> None:
        self.rows = np.ones(len(numbers), dtype=np.bool_)
        self.tally = tally
        self._numbers = numbers

    def drop(self, bad: np.ndarray, reason: str, detail: Callable[[int], str] = lambda _: "") -> None:
        """Drops the rows where `bad` (rows,) is True; `detail` describes one of them."""
        dropped = np.flatnonzero(bad & self.rows)
        if len(dropped):
            first = int(dropped[0])
            self.rows[dropped] = False
            self.tally.drop(reason, len(dropped), self._numbers[first], detail(first))


class TokenLists:
    """The entries of the lists of all kept rows: `values` (tokens,) by role; `lengths` (rows,), 0 for a dropped row.

    ids: all response_ids of the rows, with the prompts that lists begin with, and where those of each row start.
    prompt_length: number of tokens before the response (rows,), if the lists tell it.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        values: dict[str, np.ndarray],
        ids: tuple[np.ndarray, np.ndarray],
        prompt_length: np.ndarray | None = None,
    ) -> None:
        self.lengths, self.values, self.prompt_length = lengths, values, prompt_length
        self._ids, self._first = ids
        self.starts = np.append(0, np.cumsum(lengths))
        self.row = np.repeat(np.arange(len(lengths)), lengths)
        self.position = np.arange(len(self.row)) - self.starts[self.row]

    def having(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the rows (rows,) with at least one of the marked tokens."""
        return np.bincount(self.row[tokens], minlength=len(self.lengths)) > 0

    def prompts(self, rows: np.ndarray) -> list[np.ndarray | None]:
        """Returns the ids that each list begins with before its response, where `rows` is True; None if unknown."""
        if self.prompt_length is None or not len(self._ids):
            return [None] * int(rows.sum())
        spans = zip(self._first[rows].tolist(), self.prompt_length[rows].tolist(), strict=True)
        return [self._ids[first : first + int(count)] if count == count else None for first, count in spans]


def drop_rows(batch: Batch, kept: KeptRows, in_loss: bool) -> None:
    scalars = batch.scalars
    if "off_policy" in scalars:
        kept.drop(scalars["off_policy"] == 1, EXTERNAL_TRACE)
    if "sample_mask" in scalars:
        kept.drop((scalars["sample_mask"] == 0) == in_loss, OUT_OF_LOSS)
    if "sample_id" in scalars:
        steps = scalars.get("step", np.zeros(len(kept.rows)))
        repeated = np.zeros(len(kept.rows), dtype=np.bool_)
        for row, key in enumerate(zip(steps.tolist(), scalars["sample_id"].tolist(), strict=True)):
            repeated[row] = key in kept.tally.seen
            kept.tally.seen[key] = 0
        kept.drop(repeated, "the same response in the file of another rank")
    for reason, rows in batch.faults.items():
        kept.drop(np.isin(np.arange(len(kept.rows)), list(rows)), reason, rows.__getitem__)
    for role in ("policy_version", "response_length", "step", "proximal_version"):
        if role in scalars:
            kept.drop(~np.isfinite(scalars[role]), f"no {role}")


def align(batch: Batch, kept: KeptRows) -> TokenLists:
    """Returns the lists of the kept rows, all as long as the sampler's log-probs."""
    scalars = batch.scalars
    whole = {role: list_lengths(lists).fill_null(0).to_numpy().astype(np.int64) for role, lists in batch.lists.items()}
    skip = {role: np.zeros(len(kept.rows), dtype=np.int64) for role in whole}

    def lengths_text(row: int) -> str:
        known = {role: int(lengths[row]) for role, lengths in whole.items()}
        if "response_length" in scalars:
            known["response_length"] = int(scalars["response_length"][row])
        return ", ".join(f"{role} {number}" for role, number in known.items())

    if "response_length" in scalars:
        expected = np.nan_to_num(scalars["response_length"], posinf=0, neginf=0)
        expected = np.clip(expected, 0, 2**53).astype(np.int64)
        skip = {role: np.maximum(lengths - expected, 0) for role, lengths in whole.items()}
        kept.drop(whole["logp_behavior"] - skip["logp_behavior"] != expected, UNEQUAL, lengths_text)
    if "prompt_length" in scalars:  # of some lists only: they begin with the prompt
        prompt = scalars["prompt_length"]
        shortest = np.min([lengths - skip[role] for role, lengths in whole.items()], axis=0)
        for role, lengths in whole.items():
            longer = lengths - skip[role] - shortest
            skip[role] = skip[role] + np.where(longer == prompt, longer, 0)
    tokens = whole["logp_behavior"] - skip["logp_behavior"]
    if "padding_mask" in whole:  # an attention mask covers the prompt as well
        skip["padding_mask"] = np.maximum(whole["padding_mask"] - tokens, skip["padding_mask"])
    unequal = [lengths - skip[role] != tokens for role, lengths in whole.items()]
    kept.drop(np.any(unequal, axis=0), UNEQUAL, lengths_text)
    kept.drop(tokens == 0, "no tokens")
    prompt_length = None
    if "response_length" in scalars and "response_ids" in whole:
        # Ids that begin with the prompt tell its length, unless all lists do, which may be padded on the left.
        prompt_length = np.where(skip["logp_behavior"] == 0, skip["response_ids"], np.nan)
    tokens = np.where(kept.rows, tokens, 0)
    entries = {role: flat(lists) for role, lists in batch.lists.items()}
    values = {role: _entries(entries[role], whole[role], skip[role], tokens) for role in entries}
    counts = whole.get("response_ids", tokens)
    ids = entries.get("response_ids", np.zeros(0)), np.cumsum(counts) - counts
    return TokenLists(tokens, values, ids, prompt_length)


def _entries(values: np.ndarray, whole: np.ndarray, skip: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns `lengths` values of each row after its first `skip`; the rows have `whole` values."""
    if np.array_equal(whole, lengths):
        return values
    first = np.cumsum(whole) - whole + skip
    return values[np.repeat(first - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())]


def trained_tokens(tokens: TokenLists, kept: KeptRows) -> np.ndarray:
    """Returns the tokens (tokens,) that all masks select; drops rows where a mask or another integer is null."""
    values = tokens.values
    for role in _WHOLE_NUMBERS:
        if role in values and values[role].dtype.kind == "f":
            kept.drop(tokens.having(~np.isfinite(values[role])), f"{role} holds nulls")
    if "turn" in values:
        kept.drop(tokens.having(values["turn"] < 0), "turn is negative")
    trained = np.ones(len(tokens.row), dtype=np.bool_)
    for role in ("loss_mask", "padding_mask", "loss_weight"):  # a null weight is the weight of 1
        if role in values:
            trained &= values[role] != 0
    return trained


def response_span(tokens: TokenLists, trained: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns which tokens (tokens,) are neither padding nor a prompt, of which it notes the length."""
    inside = np.ones(len(tokens.row), dtype=np.bool_)
    if not (layout.whole or layout.padded):
        return inside
    marked = trained if layout.whole else tokens.values.get("padding_mask", trained) != 0
    row, position = tokens.row[marked], tokens.position[marked]
    if layout.padded:
        last = tokens.lengths - 1
        last[row] = position  # the last assignment to an index wins
        inside = tokens.position <= last[tokens.row]
    if layout.whole:
        tokens.prompt_length = np.zeros_like(tokens.lengths)
        tokens.prompt_length[row[::-1]] = position[::-1]
        inside &= tokens.position >= tokens.prompt_length[tokens.row]
    return inside
