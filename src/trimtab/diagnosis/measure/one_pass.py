"""Measures everything in one pass over the tables of tokens, draws a sample of them, and finds its anomalies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.measure.placeholders import PlaceholderSums, remove_placeholders
from trimtab.diagnosis.measure.size import DriftSums, SizeSums
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens, hash_index, plane
from trimtab.diagnosis.measure.views import AXES, AxisView, TokenIdView, prompt_view
from trimtab.diagnosis.records import DataSummary, DriftSplit, Measured, Placeholder, RescoredSides, finding, read_table
from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding, TrimtabError
from trimtab.intervals import cluster_intervals
from trimtab.runs.metric_catalog import k3_ranges
from trimtab.text import short

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
    return Measured(
        origin=replace(
            summary,
            trained=trained,
            findings=(
                *(*summary.findings, *constants.findings()),
                *(*check_batch(drawn), *describe_sample(drawn, trained, sides)),
            ),
        ),
        size=sizes.size(summary.anchor),
        views={view.name: view for view in views if view is not None and view.name != unknown},
        split=DriftSplit(False, ASSUMED) if summary.assumes_current else drift.split(),
        scatter=scatter,
        sample=drawn,
        rescored=sides,
        placeholders=left_out or constants.found(),
        cleaned=bool(left_out),
    )


SAMPLE_TOKENS = 400_000
LONGEST = SAMPLE_TOKENS // 8  # longer responses are truncated to this many tokens, so that none fills the sample


class Sample:
    """A random sample: the responses with the smallest hashes of their index, as many as fit into `tokens`.

    The sample does not depend on the split of the stream into tables: once a response does not fit, it and all
    responses with a larger hash are excluded for good.
    """

    def __init__(self, tokens: int = SAMPLE_TOKENS, longest: int = LONGEST) -> None:
        self._limit, self._longest = tokens, longest
        self._parts: list[TokenTable] = []
        self._numbers: list[np.ndarray] = []
        self._tokens = 0
        self._limit_hash = np.iinfo(np.uint64).max

    def add(self, table: TokenTable, first: int) -> None:
        """Adds a table; `first`: number of responses before it. Raises `TrimtabError` for different columns."""
        numbers = hash_index(np.arange(first, first + table.responses, dtype=np.uint64))
        keep = numbers < self._limit_hash
        if self._parts and (differing := table.columns.keys() ^ self._parts[0].columns.keys()):
            raise TrimtabError(
                f"the files have different columns ({', '.join(sorted(differing))} only in some): "
                "diagnose them one kind at a time"
            )
        if not keep.any() and self._parts:
            return
        piece = table.select(keep, self._longest)
        self._parts.append(piece)
        self._numbers.append(numbers[keep])
        self._tokens += piece.tokens
        if self._tokens > self._limit + self._limit // 4:
            self._trim()

    def result(self) -> TokenTable:
        """Returns the sample, in the order of the stream."""
        self._trim()
        return self._parts[0]

    def _trim(self) -> None:
        merged, numbers = TokenTable.concat(self._parts), np.concatenate(self._numbers)
        order = np.argsort(numbers)
        over = np.flatnonzero(np.cumsum(merged.lengths[order]) > self._limit)
        if len(over):
            self._limit_hash = numbers[order[over[0]]]
        keep = numbers < self._limit_hash
        self._parts, self._numbers = [merged.select(keep, self._longest)], [numbers[keep]]
        self._tokens = self._parts[0].tokens


CHANCE = -12.0  # log-probability of a response below which it does not occur twice by chance
MIN_REPEATED = 8  # fewest responses that repeat another one
MIN_REPEATED_SHARE = 0.1  # least share of such responses among all
MIN_GROUPS = 3  # fewest groups whose advantages contradict their rewards
MIN_GROUP_SHARE = 0.1  # least share of such groups among those that could
ZERO = 0.01  # an advantage below this part of the largest one counts as 0
MOST_ENDS, MOST_BEFORE = 0.9, 0.5  # least share of one id at the ends; largest share of one id before them


def check_batch(sample: TokenTable) -> Iterator[Finding]:
    """Yields anomalies: an end token that is not trained, equal responses, advantages against rewards."""
    yield from _find_untrained_ends(sample)
    prompt = sample.group if sample.prompt is None else sample.prompt
    if prompt is None:
        return
    step = np.zeros_like(prompt) if sample.step is None else sample.step
    yield from _find_repeats(sample, np.stack([prompt, step], axis=1))
    prompt = prompt if sample.group is None else sample.group
    yield from _find_wrong_advantages(sample, np.stack([prompt, step], axis=1))


def _find_untrained_ends(sample: TokenTable) -> Iterator[Finding]:
    """Yields a finding if many responses end with one untrained token, of the same id, that the sampler drew."""
    trained = np.flatnonzero(sample.mask)
    last = trained[np.diff(sample.row[trained], append=-1) != 0]
    end = last[last + 2 == sample.starts[sample.row[last] + 1]] + 1
    if sample.ids is None or len(end) < max(MIN_REPEATED, MIN_REPEATED_SHARE * sample.responses):
        return
    # A token that a template adds is not drawn: its log-prob is a constant, or the end token precedes it.
    columns = sample.ids[end], sample.ids[end - 1], sample.behavior[end]
    same, *others = (np.unique(values, return_counts=True)[1].max() / len(end) for values in columns)
    if same >= MOST_ENDS and max(others) < MOST_BEFORE:
        yield finding("end-token", count=len(end), responses=sample.responses)


def _find_repeats(sample: TokenTable, of: np.ndarray) -> Iterator[Finding]:
    """Yields a finding if improbable responses to one prompt in one step are equal. of: prompt, step (responses, 2)."""
    if sample.ids is None:
        return
    likely = np.bincount(sample.row, np.where(sample.mask, sample.behavior, 0.0), minlength=sample.responses)
    rare = np.flatnonzero(likely < CHANCE)
    text = [hash(sample.ids[sample.starts[i] : sample.starts[i + 1]].tobytes()) for i in rare.tolist()]
    different = np.unique(np.column_stack([of[rare], text]), axis=0) if len(rare) else rare
    count = len(rare) - len(different)
    if count >= max(MIN_REPEATED, MIN_REPEATED_SHARE * sample.responses):
        yield finding("repeated", count=count, responses=sample.responses)


def _find_wrong_advantages(sample: TokenTable, of: np.ndarray) -> Iterator[Finding]:
    """Yields findings if advantages of groups with equal rewards are not 0, or if advantages fall as rewards rise.

    of: (responses, 2), group and step.
    """
    if sample.reward is None or sample.advantage is None:
        return
    known = np.isfinite(sample.reward) & np.isfinite(sample.advantage)
    if not known.any():
        return
    reward, advantage = sample.reward[known], sample.advantage[known]
    index, number = np.unique(of[known], axis=0, return_inverse=True, return_counts=True)[1:]
    index = index.reshape(-1)
    apart, away = (values - (np.bincount(index, values) / number)[index] for values in (reward, advantage))
    largest = np.zeros(len(number))
    np.maximum.at(largest, index, np.abs(advantage))
    varies = np.bincount(index, np.abs(apart)) > 1e-9
    moved = largest > ZERO * largest.max()
    equal = (number > 1) & ~varies
    against = varies & moved & (np.bincount(index, apart * away) < 0)
    if (wrong := equal & moved).sum() >= max(MIN_GROUPS, MIN_GROUP_SHARE * equal.sum()):
        most = short(float(largest[wrong].max()))
        yield finding("advantage-equal", count=int(wrong.sum()), groups=int(equal.sum()), largest=most)
    if (count := int(against.sum())) >= max(MIN_GROUPS, MIN_GROUP_SHARE * varies.sum()):
        yield finding("advantage-against", count=count, groups=int(varies.sum()))


RESAMPLED = 1024  # largest number of groups or responses that are resampled; more are merged evenly
LEAD = 4.0  # one side alone is wrong only if its k3 is this many times the other side's
ORDINARY, ORDINARY_BOTH = (k3_ranges()[name].high for name in ("dense", "small-dense"))
"""k3 that 16-bit arithmetic makes: on any side, and at most, if both differ alike."""


def judge_sides(table: TokenTable) -> RescoredSides | None:
    """Returns which side is wrong; None without the column `logp_rescored` or a trained token.

    One side alone is wrong if its k3 exceeds `ORDINARY` (16-bit arithmetic), and is `LEAD` times the other side's with
    disjoint intervals. Otherwise both are wrong if a k3 exceeds `ORDINARY_BOTH` (small models in 16 bits).
    """
    tokens = TrainedTokens.of(table, 0)
    if table.rescored is None or not len(tokens):
        return None
    rescored = tokens.at_tokens(table.rescored).astype(np.float64)
    known = np.isfinite(rescored)
    if not known.any():
        return None
    pairs = {
        "sampler": rescored - tokens.behavior,
        "trainer": tokens.trainer - rescored,
        "mismatch": tokens.trainer - tokens.behavior,
    }
    cluster = (tokens.cluster % np.uint64(RESAMPLED)).astype(np.int64)[tokens.rows][known]
    fields = (None, *(k3(pair[known]) for pair in pairs.values()))
    sums = np.stack([np.bincount(cluster, weights=field, minlength=RESAMPLED) for field in fields], axis=1)
    means = cluster_intervals(
        sums[sums[:, 0] > 0],
        lambda sums: {name: sums[..., at] / sums[..., 0] for at, name in enumerate(pairs, start=1)},
        seed=0,
    )
    near, far = sorted(("sampler", "trainer"), key=lambda name: means[name].value)
    side = "both"
    if means[far].value <= ORDINARY:
        side = "neither"
    elif means[far].value >= LEAD * means[near].value and not means[far].low <= means[near].high:
        side = far
    elif means[far].value <= ORDINARY_BOTH:
        side = "neither"
    is_other = side == "both" and means[near].value > means["mismatch"].value
    return RescoredSides(side, **means, is_other_model=is_other, tokens=int(known.sum()))


def describe_sample(sample: TokenTable, trained: int, sides: RescoredSides | None) -> Iterator[Finding]:
    """Yields the size and k3 of the sample if causes are inferred from less than all data, and which side is wrong."""
    inside = sample.mask & np.isfinite(sample.behavior) & np.isfinite(sample.trainer)
    if inside.sum() < 0.99 * trained:
        part = float(k3(sample.trainer[inside].astype(np.float64) - sample.behavior[inside]).mean())
        first = f", of long ones the first {LONGEST:,} tokens" if (sample.lengths == LONGEST).any() else ""
        yield finding("sample", tokens=f"{inside.sum():,}", all=f"{trained:,}", first=first, k3=short(part))
    if sides is not None:
        which = read_table("texts.toml")["rescored"]["other" if sides.is_other_model else sides.side]
        yield finding("rescored", sampler=short(sides.sampler.value), trainer=short(sides.trainer.value), which=which)
