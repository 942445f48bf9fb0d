"""Finds placeholders in one pass: constants in place of log-probs that were missing.

A placeholder is a whole number (0.0, 1.0, -1.0, -9999.0). A number above 0 or below -50 needs no proof, since no
sampled token has such a log-prob. 0.0 is also the log-prob of a certain token, on which the other side agrees. So 0.0
is a placeholder if the other side is below -1 more often than at tokens that are almost certain. Any other whole number
is a placeholder if it repeats far more often than values near it, since log-probs of two tokens are seldom equal to the
last digit. If it repeats seldom, the other side must disagree. Lists of one length that end (or begin) with 0.0 on both
sides are padded.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from trimtab.diagnosis.records import Placeholder, finding
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable
from trimtab.errors import Finding, TrimtabError
from trimtab.types import MIN_BEHAVIOR

IMPOSSIBLE = -50.0  # nats: a whole number at most this large was not sampled [p = 2e-22]
MIN_CONTRADICTED = 3  # fewest tokens that contradict a constant
WHOLE_VALUES = 4  # distinct whole numbers from which on a column of nothing else was rounded
MIN_REPEATS = 20  # fewest tokens with one value that prove a constant, where values near it repeat a tenth as often
WHOLE_PLACE = 0.25  # share of contradicted tokens from which on a whole place is left out
MIN_LAST = 20  # fewest last tokens with other values that are compared with those of one value
MOST_CASES = 4  # most tokens of a response that count as independent evidence of a placeholder
MIN_LAST_RATE = 20  # times as often at the last token as elsewhere, where the other side is far from it
CHANCE = 9.2  # log of the chance by which a constant is contradicted as often as values near 0 [1e-4]
MIN_CERTAIN = 50  # fewest tokens within 1e-3 of 0 that are compared with those at 0
MIN_PADDING_RUN = 2  # fewest 0.0 on both sides at the end of a padded response
MIN_PADDING_RESPONSES = 4  # fewest responses of one length that can be padded
MIN_PADDING_SHARE = 0.2  # least share of responses that end with such padding
MAX_PADDING_BIAS = 0.05  # share of k3 that certain last tokens, taken for padding, may cause [computed]

PLACES = ("last", "end", "stretch", "single")
"""The last trained token; the tokens of one value before it; two and more in a row elsewhere; one alone."""
COLUMNS, ENDS = ("behavior", "trainer"), ("end", "start")
_CERTAIN, _APART = -1e-3, 1.0  # nats


@dataclass
class _Counts:
    """Counts of the tokens with one value at one place."""

    tokens: int = 0
    apart: int = 0  # tokens on which the other side is far away
    responses: int = 0  # responses with any such token


@dataclass
class PlaceholderSums:
    """Counts of whole numbers by column and place, and of the values around them."""

    counts: dict[tuple[str, float, str], _Counts] = field(default_factory=dict)  # by column, value and place
    around: Counter[tuple[str, float]] = field(default_factory=Counter)  # repeats of the most frequent value near it
    usual: dict[tuple[str, str], _Counts] = field(default_factory=dict)  # other values: certain, any, last
    lengths: Counter[int] = field(default_factory=Counter)  # responses of each length
    padding: dict[str, _Counts] = field(default_factory=lambda: {end: _Counts() for end in ENDS})  # 0.0 on both sides
    ids: dict[str, set[int]] = field(default_factory=lambda: {end: set() for end in ENDS})  # token ids of padding
    lowest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0.0))
    zeros: int = 0  # tokens with 0.0 on both sides
    tokens: int = 0
    responses: int = 0

    def add(self, table: TokenTable) -> None:
        mask = table.mask
        if not table.tokens:
            return
        self.tokens += int(mask.sum())
        self.responses += table.responses
        self.lengths.update(table.lengths.tolist())
        for name in COLUMNS:
            self._add_column(table, name)
        both = mask & (table.behavior == 0) & (table.trainer == 0)
        self.zeros += int(both.sum())
        for end in ENDS if both.any() else ():
            inside = _edge(table, both, end)
            rows = np.bincount(table.row[inside], minlength=table.responses)
            counts = self.padding[end]
            counts.tokens += int(inside.sum())
            counts.responses += int((rows >= MIN_PADDING_RUN).sum())
            if table.ids is not None and len(self.ids[end]) < 3:
                self.ids[end] |= set(np.unique(table.ids[inside])[:3].tolist())

    def _add_column(self, table: TokenTable, name: str) -> None:
        values, mask = getattr(table, name), table.mask
        whole = np.rint(values)
        exact = mask & (values == whole)
        self.lowest[name] = min(self.lowest[name], float(values[mask].min(initial=0.0)))
        other = table.trainer if name == "behavior" else table.behavior
        apart = np.abs(other - values) >= _APART
        rest = mask & ~exact
        for key, part in (("certain", rest & (values > _CERTAIN)), ("any", rest), ("last", rest & _last(table))):
            usual = self.usual.setdefault((name, key), _Counts())
            usual.tokens += int(part.sum())
            usual.apart += int((part & apart).sum())
        if not exact.any():
            return
        found, counted = np.unique(values[exact], return_counts=True)
        for value, count in zip(found.tolist(), counted.tolist(), strict=True):
            if value < 0:
                near = values[mask & ~exact & (np.abs(values - value) <= 0.25)]
                repeated = np.unique(near, return_counts=True)[1].max(initial=0) if count > 1 else 1
                self.around[name, value] += int(repeated)
            for place, inside in zip(PLACES, _places(table, exact & (values == value)), strict=True):
                if inside.any():
                    counts = self.counts.setdefault((name, value, place), _Counts())
                    counts.tokens += int(inside.sum())
                    counts.apart += int((inside & apart).sum())
                    counts.responses += len(np.unique(table.row[inside]))

    def found(self) -> tuple[Placeholder, ...]:
        """Returns the placeholders; raises `TrimtabError` for padding that cannot be told from certain tokens."""
        result = [
            placeholder
            for (name, value, place), counts in sorted(self.counts.items())
            if (placeholder := self._judge(name, value, place, counts)) is not None
        ]
        return (*result, *(self._padding(end) for end in ENDS if self._is_padded(end)))

    def findings(self) -> tuple[Finding, ...]:
        """Returns one finding for each column that is clamped at a whole number: its lowest value repeats."""
        found = []
        for name in COLUMNS:
            value, usual = self.lowest[name], self.usual.get((name, "any"), _Counts())
            tokens = self._count_everywhere(name, value)[0]
            is_low = IMPOSSIBLE < value < 0 and not self._is_whole(name)
            if is_low and tokens >= max(MIN_REPEATS, 10 * self.around[name, value]) and usual.tokens:
                found.append(finding("clamped", column=name, value=f"{value:g}", tokens=f"{tokens:,}"))
        return tuple(found)

    def _judge(self, name: str, value: float, place: str, counts: _Counts) -> Placeholder | None:
        found = Placeholder(name, value, place, counts.tokens, counts.responses)
        if value > MAX_ROUNDED_LOGP:
            return found
        if self._is_whole(name):
            return None
        share = counts.apart / counts.tokens
        if value != 0:
            tokens, apart = self._count_everywhere(name, value)
            if tokens < 2 * self.around[name, value]:
                return None
            if value < MIN_BEHAVIOR or (name == "behavior" and value <= IMPOSSIBLE):
                return found
            if value <= self.lowest[name]:  # values are clamped there
                return None
            if tokens >= max(MIN_REPEATS, 10 * self.around[name, value]):
                return found
            frequent = tokens >= MIN_CONTRADICTED
            return found if frequent and apart >= 0.5 * tokens and not self._is_usual(name, share, tokens) else None
        # Tokens of a run are not independent of each other.
        is_usual = self._is_usual(name, share, min(counts.tokens, MOST_CASES * counts.responses))
        if counts.apart < MIN_CONTRADICTED or (is_usual and not self._is_only_last(name, place, counts)):
            return None
        others, every = self.usual[name, "last"], self.usual[name, "any"]
        odd = max(0.5 * others.tokens, 2 * every.apart * others.tokens / max(every.tokens, 1))
        if place == "last" and others.tokens >= MIN_LAST and others.apart > odd:
            return None  # the two sides disagree on last tokens, whatever the value
        return replace(found, uncertain_only=share < WHOLE_PLACE)

    def _is_whole(self, name: str) -> bool:
        """Whether the column holds several whole numbers and hardly anything else: it was rounded to them."""
        values = {value for column, value, _ in self.counts if column == name and value > IMPOSSIBLE}
        return len(values) >= WHOLE_VALUES and self.usual[name, "any"].tokens < 0.2 * self.tokens

    def _count_everywhere(self, name: str, value: float) -> tuple[int, int]:
        """Returns the number of tokens with a value at any place, and of those on which the other side is far away."""
        total = [self.counts[name, value, place] for place in PLACES if (name, value, place) in self.counts]
        return sum(counts.tokens for counts in total), sum(counts.apart for counts in total)

    def _is_usual(self, name: str, share: float, tokens: int) -> bool:
        """Whether almost certain tokens (any tokens, if these are few) may be contradicted as often."""
        certain = self.usual[name, "certain"]
        usual = certain if certain.tokens >= MIN_CERTAIN else self.usual[name, "any"]
        if not usual.tokens:  # the column holds nothing else
            return False
        expected = (usual.apart + 1) / (usual.tokens + 20)
        if share <= expected:
            return True
        # The binomial tail, by Chernoff's bound.
        inside = (1 - share) * math.log((1 - share) / (1 - expected)) if share < 1 else 0.0
        return tokens * (share * math.log(share / expected) + inside) < CHANCE

    def _is_only_last(self, name: str, place: str, counts: _Counts) -> bool:
        """Whether 0.0 is frequent at last tokens, with the other side far away, and rare elsewhere."""
        elsewhere = (self._count_everywhere(name, 0.0)[0] - counts.tokens + 1) / self.tokens
        frequent = counts.tokens / self.responses > MIN_LAST_RATE * elsewhere
        return place == "last" and frequent and counts.apart >= 0.5 * counts.tokens

    def _is_padded(self, end: str) -> bool:
        counts = self.padding[end]
        few = len(self.lengths) <= max(1, self.responses // 10)
        chance = self._chance(end)
        return (
            self.responses >= MIN_PADDING_RESPONSES
            and few
            and counts.responses >= MIN_PADDING_SHARE * self.responses
            and counts.tokens > 3 * chance * self.responses
            and len(self.ids[end]) <= 2
        )

    def _chance(self, end: str) -> float:
        """Returns the expected number of certain tokens that a response ends with by chance."""
        rest = self.tokens - self.padding[end].tokens
        share = (self.zeros - self.padding[end].tokens) / max(rest, 1)
        return share / max(1 - share, 1e-9)

    def _padding(self, end: str) -> Placeholder:
        counts = self.padding[end]
        length = (self.tokens - counts.tokens) / self.responses
        if not self.ids[end] and self._chance(end) > MAX_PADDING_BIAS * length:
            raise TrimtabError(
                f"both lists are padded with 0.0 ({counts.tokens} of {self.tokens} tokens at the {end} of "
                f"{counts.responses} responses), and other tokens are 0.0 as well, so that padding cannot be told from "
                "tokens: add a column loss_mask, or write lists without padding"
            )
        return Placeholder("both", 0.0, end, counts.tokens, counts.responses)


def placeholder_tokens(table: TokenTable, placeholders: tuple[Placeholder, ...]) -> np.ndarray:
    """Returns which tokens of a table are placeholders (tokens,)."""
    result = np.zeros(table.tokens, dtype=bool)
    for found in placeholders:
        if found.column == "both":
            both = table.mask & (table.behavior == 0) & (table.trainer == 0)
            result |= _edge(table, both, found.place)
            continue
        values, other = (getattr(table, name) for name in sorted(COLUMNS, key=lambda name: name != found.column))
        at = table.mask & (values == found.value)
        inside = _places(table, at)[PLACES.index(found.place)]
        result |= inside & (other < -0.1) if found.uncertain_only else inside
    return result


def remove_placeholders(table: TokenTable, placeholders: tuple[Placeholder, ...]) -> TokenTable:
    """Returns the table without placeholders: stretches inside a response become untrained, others are removed.

    In a file without a mask, tool output is such a stretch; untrained, it separates turns.
    """
    if not placeholders or not table.tokens or not (bad := placeholder_tokens(table, placeholders)).any():
        return table
    inside = _places(table, bad)[PLACES.index("stretch")]
    return replace(table, mask=table.mask & ~inside).without(bad & ~inside)


def _places(table: TokenTable, at: np.ndarray) -> tuple[np.ndarray, ...]:
    """Splits tokens with one value by place, in the order of `PLACES`."""
    last = _last(table) & (end := _edge(table, at, "end"))
    rest = at & ~end
    same = rest[1:] & rest[:-1] & (table.row[1:] == table.row[:-1])
    beside = np.append(False, same) | np.append(same, False)
    return last, end & ~last, rest & beside, rest & ~beside


def _last(table: TokenTable) -> np.ndarray:
    """Returns which tokens are the last trained token of their response."""
    trained = np.flatnonzero(table.mask)
    last = np.zeros_like(table.mask)
    last[trained[np.diff(table.row[trained], append=-1) != 0]] = True
    return last


def _edge(table: TokenTable, at: np.ndarray, end: str) -> np.ndarray:
    """Returns the tokens `at` with no trained token but `at` between them and that end of their response."""
    index = np.arange(table.tokens)
    other = table.mask & ~at
    if end == "end":
        return at & (index > table.at_tokens(np.maximum.reduceat(np.where(other, index, -1), table.starts[:-1])))
    first = np.minimum.reduceat(np.where(other, index, table.tokens), table.starts[:-1])
    return at & (index < table.at_tokens(first))
