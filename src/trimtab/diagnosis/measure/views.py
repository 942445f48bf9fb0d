"""The views: ways to group trained tokens, each with the statistic of its groups (`Groups`), and the hotspots in them.

Most views are an `Axis`, whose groups are known in advance. The views by token id and by prompt show the groups with
most of the k3. A hotspot is a part of the data whose share of the k3 exceeds its share of the tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.measure import trained_tokens
from trimtab.diagnosis.measure.trained_tokens import Groups, TrainedTokens
from trimtab.diagnosis.records import Measured, MismatchSize, View, read_table
from trimtab.diagnosis.tokens import TokenTable
from trimtab.text import short_exponent

MOST_SHOWN = 20  # largest number of token ids and of prompts in a view
DECILES = 10
_REACH = 3  # tokens either side of a turn's boundary
_TURNS = 8
_SINCE = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128)  # first distance of each bin, in tokens
_AGES = (0, 1, 2, 3, 4, 5, 9, 17, 33, 65, 129, 257)  # first age of each bin, in updates
_ENTROPIES = np.array([0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 12.0])
"""Edges in nats; the logarithm of the largest vocabularies is 12."""
_LENGTHS = np.unique(np.ceil(np.exp2(np.arange(49) / 2)).astype(np.int64))
"""First length of each bin: two bins for a factor of two."""


@dataclass(frozen=True)
class Axis:
    """A way to group trained tokens, with groups that are known in advance."""

    name: str
    group: Callable[[TrainedTokens], np.ndarray | None]  # of each token (tokens,), from 0; None without the column
    labels: Sequence[str]
    edges: np.ndarray | None = None  # (groups + 1,) if groups are bins
    present: Callable[[np.ndarray], bool] = lambda count: bool(count.any())  # whether there is a view, by counts
    is_whole: bool = False  # whether empty groups are shown
    note: str = ""


class AxisView:
    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._groups = Groups(len(axis.labels))

    def add(self, tokens: TrainedTokens) -> None:
        group = self._axis.group(tokens)
        if group is not None:
            self._groups.add(group, tokens)

    def view(self) -> View | None:
        axis, count = self._axis, self._groups.count
        if not axis.present(count):
            return None
        rows = np.arange(len(count)) if axis.is_whole else np.flatnonzero(count)
        labels = [axis.labels[row] for row in rows.tolist()]
        return self._groups.view(axis.name, labels, rows, edges=axis.edges, note=axis.note)


def label_ranges(starts: Sequence[int]) -> list[str]:
    """Returns labels of bins of whole numbers from the first number of each: `0`, `1-3`, ..., `128 and more`."""
    firsts, lasts = starts[:-1], [start - 1 for start in starts[1:]]
    bounded = [f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]
    return [*bounded, f"{starts[-1]} and more"]


def _decile(tokens: TrainedTokens) -> np.ndarray:
    table = tokens.table
    return tokens.at_tokens(DECILES * table.position // table.at_tokens(table.lengths))


def _around_boundary(tokens: TrainedTokens) -> np.ndarray:
    after, before = tokens.around_turns
    group = np.where(before >= -_REACH, before + _REACH, 2 * _REACH + 1)
    return np.where(after <= _REACH, after + _REACH, group)  # near two boundaries, the earlier one counts


def _since_observation(tokens: TrainedTokens) -> np.ndarray:
    after, _ = tokens.around_turns
    since = np.searchsorted(_SINCE, after, side="right") - 1
    return np.where(after > tokens.lengths[tokens.rows], len(_SINCE), since)


def _age(tokens: TrainedTokens) -> np.ndarray | None:
    age = tokens.table.age
    return None if age is None else np.searchsorted(_AGES, tokens.at_tokens(age), side="right")


def _entropy(tokens: TrainedTokens) -> np.ndarray | None:
    if tokens.table.entropy is None:
        return None
    bins = np.searchsorted(_ENTROPIES, tokens.at_tokens(tokens.table.entropy), side="right") - 1
    return np.clip(bins, 0, len(_ENTROPIES) - 2)


_ENDS = [f"{edge:.2g}" for edge in trained_tokens.PROBABILITY_EDGES]
FIRST_AGES = dict(zip(("newer than the trainer", *label_ranges(_AGES)), (-1, *_AGES), strict=True))
"""Smallest age of each bin by its label."""
AXES = (
    Axis(
        "probability",
        lambda tokens: trained_tokens.probability_bin(tokens.behavior),
        [f"below {_ENDS[1]}", *(f"{low} - {high}" for low, high in itertools.pairwise(_ENDS[1:]))],
        trained_tokens.PROBABILITY_EDGES,
        is_whole=True,
    ),
    Axis(
        "position",  # untrained tokens count as places
        _decile,
        [f"{10 * tenth}-{10 * tenth + 10}%" for tenth in range(DECILES)],
        np.linspace(0.0, 1.0, DECILES + 1),
        is_whole=True,
    ),
    # A boundary is the first token of a turn, except the first turn of a response.
    Axis(
        "turn",
        _around_boundary,
        [*(f"{place:+d}" if place else "0" for place in range(-_REACH, _REACH + 1)), "elsewhere"],
        present=lambda count: bool(count[_REACH]),
        is_whole=True,
        note="0 is the first token of a turn that follows untrained tokens, -1 the last trained token before them",
    ),
    Axis(
        "turn-number",
        lambda tokens: np.minimum(tokens.at_tokens(tokens.table.turn_number), _TURNS - 1),
        label_ranges(range(1, _TURNS + 1)),
        present=lambda count: (count > 0).sum() > 1,
    ),
    Axis(
        "observation",
        _since_observation,
        [*label_ranges(_SINCE), "no observation yet"],
        present=lambda count: bool(count[0]),
        note="0 is the first token that follows an observation",
    ),
    Axis("version", _age, list(FIRST_AGES)),
    Axis(
        "length",
        lambda tokens: (np.searchsorted(_LENGTHS, tokens.lengths, side="right") - 1)[tokens.rows],
        label_ranges(_LENGTHS.tolist()),
    ),
    Axis(
        "entropy",
        _entropy,
        [f"{low:g} - {high:g}" for low, high in itertools.pairwise(_ENTROPIES)],
        _ENTROPIES,
        is_whole=True,
    ),
)


class TokenIdView:
    """The token ids with most of the k3. Percentiles are of the sample: a histogram for each id is too large."""

    _LARGEST = 1 << 20  # larger and negative ids share this one: no vocabulary is that large

    def __init__(self) -> None:
        self._groups = Groups(0, bins=0)

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.ids is None:
            return
        ids = self._known(tokens.at_tokens(tokens.table.ids))
        larger = Groups(max(int(ids.max()) + 1, len(self._groups.sums)), bins=0)
        larger.sums[: len(self._groups.sums)] = self._groups.sums
        larger.add(ids, tokens)
        self._groups = larger

    def view(self, sample: TokenTable) -> View | None:
        if not len(self._groups.sums) or sample.ids is None:
            return None
        top, share = _rank_by_k3(self._groups)
        labels = ["other" if number == self._LARGEST else str(number) for number in top]
        columns = {"id": np.where(top == self._LARGEST, -1, top), "share": share}
        log = (sample.trainer.astype(np.float64) - sample.behavior)[sample.mask]
        envelope = _envelope(self._known(sample.ids[sample.mask]), log, top, trained_tokens.FEWEST_IN_GROUP)
        note = f"percentiles are of the sample, where it has {trained_tokens.FEWEST_IN_GROUP} such tokens"
        return self._groups.view("token", labels, top, columns=columns, envelope=envelope, note=note)

    def _known(self, ids: np.ndarray) -> np.ndarray:
        return np.where((ids < 0) | (ids > self._LARGEST), self._LARGEST, ids)


def prompt_view(sample: TokenTable) -> View | None:
    """Returns the prompts of the sample with most of the k3; None if prompts are unknown.

    Its columns are the `number` of the prompt in order of first occurrence, its `responses`, and its `share` of k3.
    Chance affects other prompts every time; arithmetic and routing affect the same prompts. The note says how much of
    the variance of responses' error sizes the prompt decides.
    """
    if sample.prompt is None or not sample.mask.any():
        return None
    tokens = TrainedTokens.of(sample, 0)
    of_response = tokens.per_response(sample.prompt)
    prompt = of_response[tokens.rows]
    groups = Groups(int(prompt.max()) + 1, bins=0)
    groups.add(prompt, tokens)
    top, share = _rank_by_k3(groups)
    columns = {"number": top, "responses": np.bincount(of_response)[top], "share": share}
    size = np.log(tokens.over(tokens.size) / tokens.lengths + 1e-9)
    part = max(trained_tokens.explained(size, of_response, least=2), 0.0)
    note = f"the prompt decides {part:.0%} of the variance of the size of its responses' errors"
    envelope = _envelope(prompt, tokens.log, top, fewest=1)
    return groups.view("prompt", list(map(str, top)), top, columns=columns, envelope=envelope, note=note)


def _rank_by_k3(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """Returns the groups with the largest sums of k3, largest first, ties by number, and their shares of all k3."""
    used, k3 = np.flatnonzero(groups.count), groups.sums[:, 3]
    top = used[np.argsort(-k3[used], kind="stable")[:MOST_SHOWN]]
    return top, k3[top] / k3.sum() if k3.sum() > 0 else np.zeros(len(top))


def _envelope(group: np.ndarray, log: np.ndarray, top: np.ndarray, fewest: int) -> np.ndarray:
    """Returns the percentiles of the log-ratios of each group of `top`; NaN with less than `fewest` tokens."""
    logs = (log[group == number] for number in top)
    unknown = np.full(3, np.nan)
    return np.array([np.quantile(part, trained_tokens.ENVELOPE) if len(part) >= fewest else unknown for part in logs])


ORDERED = ("probability", "entropy", "position", "version")
"""Views with ordered bins: a hotspot is all bins up to one, or from one on."""
SINGLE = read_table("texts.toml")["bins"]
"""What the label of a bin counts, for views of which a hotspot is a single bin."""
GAP, LIFT, SHARE, FEWEST_SHARE = 0.15, 2.0, 0.1, 0.002
"""A hotspot of an ordered view has at least 15 percentage points more of the k3 than of the tokens. One of a single bin
has at least a tenth of all k3, twice its share of tokens, and 0.2% of the tokens."""


@dataclass(frozen=True)
class Hotspot:
    """A group of tokens with more k3 than its share of tokens; both shares in [0, 1]."""

    what: str
    tokens: float
    k3: float


def find_hotspots(measured: Measured, texts: Mapping[int, str]) -> list[Hotspot]:
    """Returns at most one hotspot per view, by descending excess of k3.

    Entropy is left out if the behavior probability has a hotspot, since the two are closely related. `texts`: texts of
    token ids, if known.
    """
    if not measured.size.mismatch.get("k3", math.nan) > 0:
        return []
    result = {}
    for name in (*ORDERED, *SINGLE):
        if (view := measured.views.get(name)) is None:
            continue
        tokens, k3 = shares(view, measured.size)
        found = _find_stretch(view, tokens, k3) if name in ORDERED else _find_bin(view, tokens, k3, texts)
        if found is not None:
            what, bins = found
            result[name] = Hotspot(what, float(tokens[bins].sum()), float(k3[bins].sum()))
    if "probability" in result:
        result.pop("entropy", None)
    return sorted(result.values(), key=lambda hotspot: hotspot.tokens - hotspot.k3)


def shares(view: View, size: MismatchSize) -> tuple[np.ndarray, np.ndarray]:
    """Returns each bin's share of all trained tokens and of all k3, both (bins,). Bins may overlap or omit tokens."""
    tokens, k3 = size.mismatch["tokens"], size.mismatch["k3"]
    mass = np.nan_to_num(view.k3 * view.count, nan=0.0, posinf=0.0)
    return view.count / max(tokens, 1.0), mass / (k3 * tokens) if k3 * tokens > 0 else np.zeros(len(mass))


def _find_stretch(view: View, tokens: np.ndarray, k3: np.ndarray) -> tuple[str, slice] | None:
    """Returns the first or last bins of an ordered view with the largest excess of k3, or None."""
    gap = np.cumsum(k3 - tokens)[:-1]
    if not len(gap) or np.abs(gap).max() < GAP:
        return None
    cut = int(np.abs(gap).argmax()) + 1
    first = bool(gap[cut - 1] > 0)
    bins = slice(0, cut) if first else slice(cut, None)
    if view.name == "version":
        label = view.labels[cut - 1] if first else FIRST_AGES[view.labels[cut]]
        return f"age {label}{' or more' if not first else ' or less' if cut > 1 else ''}", bins
    if view.name == "position" and view.edges is not None:
        share = 100 * float(view.edges[cut])
        return f"the {f'first {share:.0f}' if first else f'last {100 - share:.0f}'}% of the response", bins
    name = {"probability": "sampler probability"}.get(view.name, view.name)
    edge = f"{view.edges[cut]:.2g}" if view.edges is not None else view.labels[cut]
    return f"{name} {'below' if first else 'above'} {short_exponent(edge)}", bins


def _find_bin(view: View, tokens: np.ndarray, k3: np.ndarray, texts: Mapping[int, str]) -> tuple[str, slice] | None:
    candidates = (tokens >= FEWEST_SHARE) & (k3 >= SHARE) & (k3 >= LIFT * tokens)
    if not candidates.any():
        return None
    best = int(np.argmax(np.where(candidates, k3 - tokens, -np.inf)))
    text = texts.get(int(view.columns["id"][best])) if "id" in view.columns else None
    what = f"{SINGLE[view.name]} {view.labels[best]}"
    return f"{what} ({text})" if text else what, slice(best, best + 1)
