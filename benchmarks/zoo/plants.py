"""Faults planted in streams: each at three strengths, with the causes that may be named for it first.

A fault of the values (`structural`) must be named first whatever the noise. Any other may come second where the noise
of the base is more than half of k3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from zoo.streams import Stream
from zoo.synthetic import TRAINER_AT

Change = Callable[[Stream, int, np.random.Generator], Stream]
REFUSED = "refused"
"""Answer of a diagnosis that reads nothing and says why."""


@dataclass(frozen=True)
class Plant:
    """A fault.

    name: cause and variant, "cause: variant". kind: of the stream that it needs. accepted: first causes that count as
    right. columns: whether it shows only in columns beside the two log-probs. needs: columns of the stream.
    apart: whether other tokens are as they were, and those with the fault agree or
    are read as missing, so that a diagnosis that does not know it names the noise of the base rightly.
    """

    name: str
    kind: str
    change: Change
    accepted: frozenset[str]
    structural: bool = True
    columns: bool = False
    needs: frozenset[str] = frozenset()
    apart: bool = False

    @property
    def cause(self) -> str:
        return self.name.partition(":")[0]

    @property
    def pair(self) -> bool:
        return "+" in self.cause


def _plant(
    name: str,
    kind: str,
    change: Change,
    *also: str,
    structural: bool = True,
    columns: bool = False,
    needs: Iterable[str] = (),
    apart: bool = False,
) -> Plant:
    accepted = frozenset({name.partition(":")[0], *also})
    return Plant(name, kind, change, accepted, structural, columns, frozenset(needs), apart)


def _nothing(stream: Stream, _level: int, _random: np.random.Generator) -> Stream:
    return stream


def _column(name: str, source: str) -> Change:
    """Replaces a column by another of the stream."""
    return lambda stream, _level, _random: stream.changed(**{name: stream[source]})


def _some_rows(stream: Stream, share: float, random: np.random.Generator) -> np.ndarray:
    """Marks all tokens of a share of the responses (tokens,)."""
    chosen = np.zeros(stream.responses, dtype=bool)
    chosen[random.permutation(stream.responses)[: max(2, round(share * stream.responses))]] = True
    return chosen[stream.row]


def _some_tokens(
    stream: Stream, share: float, random: np.random.Generator, among: np.ndarray | None = None
) -> np.ndarray:
    """Marks a share of the trained tokens, or of those `among`, at least three (tokens,)."""
    index = np.flatnonzero(stream.mask if among is None else stream.mask & among)
    chosen = np.zeros(len(stream), dtype=bool)
    chosen[random.permutation(index)[: max(3, round(share * len(index)))]] = True
    return chosen


# Values that are not log-probs.


def _end_at_zero(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """An end token that was appended, not sampled: 0.0 by the sampler."""
    last = (stream.left == 0) & _some_rows(stream, (0.2, 0.5, 1.0)[level], random)
    trainer = np.where(last, np.log(random.uniform(0.004, 0.5, len(stream))), stream["trainer"])
    return stream.changed(behavior=np.where(last, 0.0, stream["behavior"]), trainer=trainer)


def _sentinel_at_end(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """Unmasked padding: 1.0 by the sampler, anything by the trainer."""
    padding = (stream.left < (2, 3, 5)[level]) & _some_rows(stream, (0.3, 0.6, 1.0)[level], random)
    trainer = np.where(padding, -np.abs(random.normal(3, 2, len(stream))), stream["trainer"])
    return stream.changed(behavior=np.where(padding, 1.0, stream["behavior"]), trainer=trainer)


def _sentinel_anywhere(value: float) -> Change:
    def change(stream: Stream, level: int, random: np.random.Generator) -> Stream:
        chosen = _some_tokens(stream, (0.001, 0.004, 0.02)[level], random)
        return stream.changed(behavior=np.where(chosen, value, stream["behavior"]))

    return change


def _observations_at_zero(stream: Stream, level: int, _random: np.random.Generator) -> Stream:
    """Tool output with log-prob 0.0 from the sampler, in a file without a mask; observations are cut to a length."""
    observed = ~stream.mask
    count = np.cumsum(observed)
    place = count - np.maximum.accumulate(np.where(observed, 0, count))
    tokens = {name: values for name, values in stream.tokens.items() if name != "mask"}
    tokens["behavior"] = np.where(observed, 0.0, stream["behavior"])
    return Stream(stream.starts, tokens, stream.rows).keeping(place <= (2, 4, 6)[level])


def _padded_both(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """Responses cut at random lengths; both lists padded with 0.0 to the longest, without a mask."""
    shortest = (0.8, 0.5, 0.2)[level] * stream.lengths
    cut = stream.keeping(stream.position < np.ceil(random.uniform(shortest, stream.lengths + 1))[stream.row])
    width = int(cut.lengths.max())
    tokens = {}
    for name in ("behavior", "trainer"):
        tokens[name] = np.zeros(cut.responses * width)
        tokens[name][cut.row * width + cut.position] = cut[name]
    return Stream(np.arange(cut.responses + 1) * width, tokens, cut.rows)


def _all_zero(stream: Stream, _level: int, _random: np.random.Generator) -> Stream:
    return stream.changed(behavior=np.zeros(len(stream)))


# Tokens paired with the wrong values.


def _rolled(stream: Stream, values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Rolls the values of each response by its own number of places."""
    length = np.repeat(stream.lengths, stream.lengths)
    source = (stream.position - by[stream.row]) % length
    return values[np.repeat(stream.starts[:-1], stream.lengths) + source]


def _shifted(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    chosen = _some_rows(stream, (0.3, 0.6, 1.0)[level], random)
    moved = _rolled(stream, stream["trainer"], np.full(stream.responses, (1, -2, 1)[level]))
    return stream.changed(trainer=np.where(chosen, moved, stream["trainer"]))


def _shifted_differently(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    by = -random.integers(1, (3, 4, 6)[level], stream.responses)
    return stream.changed(behavior=_rolled(stream, stream["behavior"], by))


def _first_lost(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """The first log-probs are lost and the list is filled with 0.0 at its end."""
    by = random.integers(1, (3, 4, 6)[level], stream.responses)
    moved = _rolled(stream, stream["behavior"], -by)
    return stream.changed(behavior=np.where(stream.left < by[stream.row], 0.0, moved))


def _swapped(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """The trainer's list is that of another response of the same length, where there is one."""
    other = np.arange(stream.responses)
    for length in np.unique(stream.lengths):
        alike = np.flatnonzero(stream.lengths == length)
        other[alike] = np.roll(alike, 1)
    chosen = _some_rows(stream, (0.3, 0.6, 1.0)[level], random)
    moved = stream["trainer"][stream.starts[other][stream.row] + stream.position]
    return stream.changed(trainer=np.where(chosen, moved, stream["trainer"]))


def _shifted_from_turn(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    chosen = _some_rows(stream, (0.3, 0.6, 1.0)[level], random) & (stream["turn"] > 0)
    moved = _rolled(stream, stream["trainer"], np.full(stream.responses, (1, 2, -1)[level]))
    return stream.changed(trainer=np.where(chosen, moved, stream["trainer"]))


def _other_ids_at_turn(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """The tokens on both sides of an observation were encoded again as others, which the model hardly expects."""
    edge = stream.mask & (np.roll(~stream.mask, 1) | np.roll(~stream.mask, -1)) & (stream.position > 0)
    edge &= _some_rows(stream, (0.3, 0.6, 1.0)[level], random)
    far = stream["trainer"] - random.uniform(4, 14, len(stream))
    return stream.changed(trainer=np.where(edge, far, stream["trainer"]))


# Values of another meaning.


def _log_base(stream: Stream, level: int, _random: np.random.Generator) -> Stream:
    name, base = (("trainer", 2), ("behavior", 2), ("behavior", 10))[level]
    return stream.changed(**{name: stream[name] / np.log(base)})


def _top_token(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    chosen = _some_rows(stream, (0.4, 0.7, 1.0)[level], random)
    return stream.changed(behavior=np.where(chosen, stream["top"], stream["behavior"]))


def _copied(stream: Stream, level: int, _random: np.random.Generator) -> Stream:
    """One column is a copy of the other, written with 4 digits, with 6, or as it is."""
    values = stream["behavior"] if level == 2 else np.round(stream["behavior"], (4, 6)[level])
    return stream.changed(behavior=values, trainer=values)


def _other_temperature(stream: Stream, level: int, _random: np.random.Generator) -> Stream:
    return stream.changed(trainer=stream[tuple(TRAINER_AT)[level]])


def _non_finite(value: float, column: str) -> Change:
    def change(stream: Stream, level: int, random: np.random.Generator) -> Stream:
        chosen = _some_tokens(stream, (0.001, 0.01, 0.05)[level], random)
        return stream.changed(**{column: np.where(chosen, value, stream[column])})

    return change


def _null_where_certain(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    certain = stream["behavior"] > min(-2e-3, np.quantile(stream["behavior"][stream.mask], 0.8))
    return stream.changed(null=_some_tokens(stream, (0.1, 0.5, 1.0)[level], random, certain))


# Faults that none of the named causes describes.


def _unrelated(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """The trainer's values are those of tokens anywhere in the data."""
    chosen = _some_rows(stream, (0.3, 0.6, 1.0)[level], random)
    pool = stream["trainer"][stream.mask]
    return stream.changed(trainer=np.where(chosen, random.choice(pool, len(stream)), stream["trainer"]))


def _running_sum(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """The sampler reports the sum over the response so far."""
    total = np.cumsum(np.where(stream.mask, stream["behavior"], 0))
    total -= np.repeat((total - np.where(stream.mask, stream["behavior"], 0))[stream.starts[:-1]], stream.lengths)
    chosen = _some_rows(stream, (0.4, 0.7, 1.0)[level], random)
    return stream.changed(behavior=np.where(chosen, total, stream["behavior"]))


def _per_length(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    """The sampler's values are divided by the length of the response."""
    chosen = _some_rows(stream, (0.4, 0.7, 1.0)[level], random)
    length = np.repeat(stream.lengths, stream.lengths)
    return stream.changed(behavior=np.where(chosen, stream["behavior"] / length, stream["behavior"]))


def _negated(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    chosen = _some_rows(stream, (0.4, 0.7, 1.0)[level], random)
    return stream.changed(behavior=np.where(chosen, -stream["behavior"], stream["behavior"]))


def _probabilities(stream: Stream, level: int, random: np.random.Generator) -> Stream:
    chosen = _some_rows(stream, (0.4, 0.7, 1.0)[level], random)
    return stream.changed(behavior=np.where(chosen, np.exp(stream["behavior"]), stream["behavior"]))


NOTHING = Plant("nothing", "plain", _nothing, frozenset(), structural=False)
"""No fault: the answer should be the noise of the base, or nothing."""

SINGLE = (
    _plant("placeholder: end token at 0", "plain", _end_at_zero),
    _plant("placeholder: 1.0 at the end", "plain", _sentinel_at_end),
    _plant("placeholder: -9999", "plain", _sentinel_anywhere(-9999.0)),
    _plant("placeholder: -100", "plain", _sentinel_anywhere(-100.0)),
    _plant("placeholder: observations at 0", "turns", _observations_at_zero),
    _plant("placeholder: both padded", "plain", _padded_both, REFUSED, apart=True),
    _plant("placeholder: all 0", "plain", _all_zero),
    _plant("misaligned: one shift", "plain", _shifted),
    _plant("misaligned: shifts of their own", "plain", _shifted_differently),
    _plant("misaligned: first lost", "plain", _first_lost, "placeholder"),
    _plant("misaligned: other response", "plain", _swapped),
    _plant("retokenized: from a turn on", "turns", _shifted_from_turn),
    _plant("retokenized: other ids", "turns", _other_ids_at_turn),
    _plant("log-base", "plain", _log_base),
    _plant("wrong-token", "plain", _top_token, needs=("top",)),
    _plant("copied", "plain", _copied),
    _plant("temperature", "plain", _other_temperature, structural=False, needs=TRAINER_AT),
    _plant("raw-logprobs: temperature", "cold", _column("behavior", "raw"), structural=False),
    _plant("raw-logprobs: top-p", "cut", _column("behavior", "raw"), structural=False),
    _plant("truncated-sampling", "cut", _column("trainer", "trainer_raw"), structural=False),
    _plant("undelivered", "steps", _nothing, structural=False, columns=True),
    _plant("stale", "aged", _nothing, structural=False, columns=True),
    _plant("stale-cache", "cached", _nothing, structural=False, columns=True),
    _plant("non-finite: nan", "plain", _non_finite(np.nan, "trainer"), apart=True),
    _plant("non-finite: -inf", "plain", _non_finite(-np.inf, "trainer"), apart=True),
    _plant("non-finite: null", "plain", _null_where_certain, apart=True),
    _plant("routing", "routed", _nothing, structural=False),
    _plant("unexplained: prompts", "prompts", _nothing, "precision", structural=False, columns=True),
    _plant("unexplained: unrelated", "plain", _unrelated),
    _plant("unexplained: running sum", "plain", _running_sum),
    _plant("unexplained: per length", "plain", _per_length),
    _plant("unexplained: negated", "plain", _negated, "placeholder", REFUSED),
    _plant("unexplained: probabilities", "plain", _probabilities, "placeholder", REFUSED),
)


def _together(first: str, second: str) -> Plant:
    """Two faults; the second one is planted in the data of the first. Either may be named first."""
    one, two = (next(plant for plant in SINGLE if plant.name == name) for name in (first, second))
    assert two.kind in ("plain", one.kind), f"{second} needs a stream of its own"

    def change(stream: Stream, level: int, random: np.random.Generator) -> Stream:
        return two.change(one.change(stream, level, random), level, random)

    return Plant(
        f"{one.cause} + {two.cause}",
        one.kind,
        change,
        one.accepted | two.accepted,
        one.structural or two.structural,
        one.columns or two.columns,
        one.needs | two.needs,
    )


PAIRS = tuple(
    _together(*names)
    for names in (
        ("misaligned: one shift", "placeholder: end token at 0"),
        ("temperature", "placeholder: end token at 0"),
        ("temperature", "misaligned: one shift"),
        ("stale", "placeholder: 1.0 at the end"),
        ("stale", "misaligned: one shift"),
        ("undelivered", "placeholder: -9999"),
        ("truncated-sampling", "misaligned: one shift"),
        ("truncated-sampling", "placeholder: end token at 0"),
        ("retokenized: from a turn on", "placeholder: end token at 0"),
        ("raw-logprobs: temperature", "non-finite: nan"),
        ("routing", "placeholder: end token at 0"),
        ("wrong-token", "placeholder: end token at 0"),
        ("log-base", "placeholder: end token at 0"),
        ("temperature", "non-finite: -inf"),
    )
)
