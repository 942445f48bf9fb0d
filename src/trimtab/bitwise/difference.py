"""Finds the first operation whose bits differ between two ways of running a model.

Each side is run once with fingerprints of everything (`forward_recorder.py`); both are read in the order in which the
second side computes. Of the first place that differs, inputs are equal and outputs are not: there is the culprit. Both
sides are then run again, to keep the numbers of that place and to look at the tensor operations inside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.bitwise.forward_recorder import Half, Place, Tape, Track, recorded, step
from trimtab.errors import TrimtabError

INPUTS, RESULT = "(inputs)", "(result)"
"""Operations whose outputs are what a side was given and what it returned."""

Side = Callable[[Tape], None]
"""Runs one side, again and again with the same bits, while the tape listens."""


@dataclass(frozen=True)
class Difference:
    """The first operation that differs.

    `half`: "output" where the operation computes other bits from equal inputs; "input" where it is given other ones
    although everything before it agrees, so that the fault lies between `after` and it, in no operation that could be
    looked at. `largest` is None where the numbers cannot be subtracted: the two sides have other shapes.
    """

    operation: str
    kind: str
    layer: int | None
    half: Half
    after: str | None  # the last operation before it, whose output is equal
    tokens: int
    compared: int
    largest: float | None
    types: tuple[str, str]
    weights: str | None  # what is wrong with its parameters, if they differ
    inside: str | None  # the tensor operation inside it, or how the two sides' sequences differ


@dataclass(frozen=True)
class Comparison:
    """`tokens` and `operations` were compared; those that only one side ran, or that hold no tokens, were not."""

    tokens: int
    operations: int
    first: Difference | None
    only: tuple[tuple[str, ...], tuple[str, ...]]


def compare(a: Side, b: Side) -> Comparison:
    """Run both sides and find the first operation, in the order of `b`, whose bits differ.

    Raises:
        TrimtabError: no operation ran on both sides, or they share no token.
    """
    tapes = _run(a), _run(b)
    shared = [place for place in tapes[1].tracks if place in tapes[0].tracks]
    found = {place: _apart(*(tape.tracks[place] for tape in tapes)) for place in shared}
    tokens = max((common for common, _ in found.values()), default=0)
    if tokens == 0:
        raise TrimtabError(
            "the two sides have no operation with equal tokens in common: compare modules of one structure, and say "
            "which rows of one are which of the other"
        )
    only = tuple(
        tuple(name for name in dict.fromkeys(place.operation for place in mine) if name not in _names(theirs))
        for mine, theirs in ((tapes[0].tracks, tapes[1].tracks), (tapes[1].tracks, tapes[0].tracks))
    )
    first = next((place for place in shared if found[place][1]), None)
    difference = None if first is None else _look_closer(first, shared, found[first], tapes, (a, b))
    return Comparison(tokens, len(_names(shared)), difference, (only[0], only[1]))


def compare_pair(
    a: Callable[..., Any],
    inputs_a: Any,
    b: Callable[..., Any],
    inputs_b: Any,
    rows: Sequence[tuple[int, int]] | None = None,
) -> Comparison:
    """`a(*inputs_a)` against `b(*inputs_b)`; what is inside modules is compared by the modules' names.

    Tokens are counted over the leading dimensions of the first tensor among the inputs: all of them for ids, all but
    the last for numbers. `rows` says that token i of `a` is token j of `b` (others are not compared); without it both
    have the same tokens in the same order.

    Args:
        inputs_a, inputs_b: a sequence of arguments, or a mapping of keywords.

    Raises:
        TrimtabError: no tensor among the inputs, counts of tokens that do not fit, or nothing to compare.
    """
    counts = _tokens(inputs_a, "first"), _tokens(inputs_b, "second")
    keys = torch.arange(counts[0]), torch.arange(counts[1])
    if rows is None and counts[0] != counts[1]:
        raise TrimtabError(
            f"{counts[0]} tokens on the first side, {counts[1]} on the second: say which rows are the same"
        )
    if rows is not None:
        if any(not (0 <= i < counts[0] and 0 <= j < counts[1]) for i, j in rows):
            raise TrimtabError(f"rows name tokens outside the {counts[0]} of the first and {counts[1]} of the second")
        # Tokens without a partner get keys that no token of the other side has.
        keys = -1 - 2 * keys[0], -2 - 2 * keys[1]
        for number, (i, j) in enumerate(rows):
            keys[0][i] = keys[1][j] = number
    return compare(_side(a, inputs_a, keys[0]), _side(b, inputs_b, keys[1]))


def _side(work: Callable[..., Any], inputs: Any, keys: Tensor) -> Side:
    module = work if isinstance(work, nn.Module) else nn.Module()

    def run(tape: Tape) -> None:
        with recorded(module, tape):
            tape.begin(keys)
            tape.add(tape.call(INPUTS, "inputs"), "output", inputs)
            arguments, keywords = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
            result = tape.run(RESULT, lambda: work(*arguments, **keywords))
            tape.add(tape.call(RESULT, "result"), "output", result)

    return run


def _tokens(inputs: Any, which: str) -> int:
    values = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None:
        raise TrimtabError(f"the inputs of the {which} side hold no tensor: give its arguments, or keywords by name")
    return first.numel() if not first.is_floating_point() or first.ndim < 2 else first.numel() // first.shape[-1]


def _run(side: Side, full: Place | None = None, inside: str | None = None) -> Tape:
    tape = Tape(full, inside)
    side(tape)
    return tape


def _names(places: Any) -> set[str]:
    return {place.operation for place in places}


def _apart(a: Track, b: Track) -> tuple[int, int]:
    """How many tokens both saw, and for how many of them the bits differ. A token may occur several times."""
    (keys_a, values_a), (keys_b, values_b) = a.joined(), b.joined()
    common, apart = set[int](), set[int]()
    for keys, values, others, other_values in (
        (keys_a, values_a, keys_b, values_b),
        (keys_b, values_b, keys_a, values_a),
    ):
        mine, theirs = _partners(keys, others)
        common.update(keys[mine].tolist())
        apart.update(keys[mine][values[mine] != other_values[theirs]].tolist())
    return len(common), len(apart)


def _partners(keys: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in `keys` that `others` has too, and where it has them first."""
    order = others.argsort(stable=True)
    place = torch.searchsorted(others[order], keys).clamp(max=len(others) - 1)
    found = others[order[place]] == keys
    return found.nonzero()[:, 0], order[place[found]]


def _look_closer(
    first: Place, shared: list[Place], counts: tuple[int, int], tapes: tuple[Tape, Tape], sides: tuple[Side, Side]
) -> Difference:
    name, position = first.operation, shared.index(first)
    before = [place.operation for place in shared[:position] if place.half == "output"]
    inside = name if first.half == "output" else None
    again = [_run(side, first, inside) for side in sides]
    tracks = [tape.tracks[first] for tape in again]
    types = tuple("/".join(sorted(track.types)) for track in tracks)
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return Difference(
        operation=name,
        kind=tapes[1].kinds[name] if first.half == "output" else _between(first, before, tapes[1]),
        layer=None if number is None else int(number.group(1)),
        half=first.half,
        after=before[-1] if before else None,
        tokens=counts[1],
        compared=counts[0],
        largest=_largest(*tracks),
        types=(types[0], types[1]),
        weights=_weights(name, tapes) if first.half == "output" else None,
        inside=None if inside is None else _inside(name, again[0], again[1]),
    )


def _between(first: Place, before: Sequence[str], tape: Tape) -> str:
    """What a model computes without a module on the way to this input, in one word."""
    kind, previous = tape.kinds[first.operation], tape.kinds[before[-1]] if before else ""
    if kind == "norm":
        return "residual sum"
    if kind == "linear" and previous in ("linear", "activation"):
        return "activation"
    return previous or kind


def _largest(a: Track, b: Track) -> float | None:
    (keys_a, values_a), (keys_b, values_b) = a.joined(), b.joined()
    if values_a.shape[1:] != values_b.shape[1:]:
        return None
    largest = 0.0
    for keys, values, others, other_values in (
        (keys_a, values_a, keys_b, values_b),
        (keys_b, values_b, keys_a, values_a),
    ):
        mine, theirs = _partners(keys, others)
        largest = max(largest, float((values[mine] - other_values[theirs]).abs().max()))
    return largest


def _weights(operation: str, tapes: tuple[Tape, Tape]) -> str | None:
    """How the parameters of an operation differ between the sides."""
    modules = [tape.modules.get(operation) for tape in tapes]
    if modules[0] is None or modules[1] is None:
        return None
    mine, theirs = (dict(module.named_parameters(recurse=False)) for module in modules if module is not None)
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = mine[name].detach().cpu(), theirs[name].detach().cpu()
        if a.shape != b.shape:
            return f"{name} has shape {tuple(a.shape)} and {tuple(b.shape)}"
        types = f"{a.dtype} and {b.dtype}".replace("torch.", "")
        narrow = min(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        if bool((apart := a.to(narrow) != b.to(narrow)).any()):
            return f"{name} differs in {int(apart.sum())} of {a.numel()} numbers ({types})"
        if a.dtype != b.dtype:
            return f"{name} is {types}, and equal once rounded"
    return None


def _inside(operation: str, a: Tape, b: Tape) -> str | None:
    """The first tensor operation whose bits differ, if both sides ran the same ones."""
    if not a.steps or not b.steps:
        return None
    if a.steps != b.steps or len(a.steps) > 1:
        names = [{name for names in tape.steps for name in names} for tape in (a, b)]
        alone = [", ".join(sorted(mine - theirs)) for mine, theirs in (names, names[::-1])]
        sides = zip(("first", "second"), alone, strict=True)
        said = "; ".join(f"the {which} side alone runs {found}" for which, found in sides if found)
        return said or "the same tensor operations, in another order or number"
    for index, name in enumerate(next(iter(a.steps))):
        place = Place(step(operation, index), "output")
        if place in a.tracks and place in b.tracks and _apart(a.tracks[place], b.tracks[place])[1]:
            return f"{name}, number {index + 1} of {len(next(iter(a.steps)))}"
    return None
