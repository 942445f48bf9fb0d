"""Finds the first operation whose bits differ between two implementations of a model.

Each side is run once with digests of all inputs and outputs (`forward_recorder.py`), which are compared in the order of
the second side. The first tensor that differs belongs to the operation at fault, because everything before it is equal.
Both sides are then run again, to record the values of that tensor and the tensor operations inside that operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.trainer.bitwise.forward_recorder import (
    ForwardRecording,
    Half,
    RecordedTensor,
    TensorName,
    record_forward,
    step_name,
)

INPUTS, RESULT = "(inputs)", "(result)"
"""Names of operations whose outputs are the arguments and the result of a side."""

Implementation = Callable[[ForwardRecording], None]
"""Runs one side under a recording; every run must give the same bits."""


@dataclass(frozen=True)
class Difference:
    """The first operation that differs.

    `half`: "output" if the operation computes different bits from equal inputs; "input" if its inputs differ although
    everything before it is equal, so that the fault lies between `after` and it, in no recorded operation. `largest` is
    the largest absolute difference, None if the two sides have different shapes.
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
    """The result of a comparison of `tokens` and `operations`; `only` names the operations that one side alone ran."""

    tokens: int
    operations: int
    first: Difference | None
    only: tuple[tuple[str, ...], tuple[str, ...]]


def compare_implementations(a: Implementation, b: Implementation) -> Comparison:
    """Runs both sides and finds the first operation, in the order of `b`, whose bits differ.

    Raises:
        TrimtabError: no operation ran on both sides, or they share no token.
    """
    recordings = _run(a), _run(b)
    shared = [name for name in recordings[1].tensors if name in recordings[0].tensors]
    counts = {name: _count_differing(*(recording.tensors[name] for recording in recordings)) for name in shared}
    tokens = max((common for common, _ in counts.values()), default=0)
    if tokens == 0:
        raise TrimtabError(
            "the two sides have no operation with equal tokens in common: compare modules of one structure, and say "
            "which rows of one are which of the other"
        )
    ran = [list(dict.fromkeys(name.operation for name in recording.tensors)) for recording in recordings]
    only = tuple(tuple(name for name in ran[i] if name not in ran[1 - i]) for i in (0, 1))
    first = next((name for name in shared if counts[name][1]), None)
    difference = None if first is None else _describe_difference(first, shared, counts[first], recordings, (a, b))
    return Comparison(tokens, len(_names(shared)), difference, (only[0], only[1]))


def compare_pair(
    a: Callable[..., Any],
    inputs_a: Any,
    b: Callable[..., Any],
    inputs_b: Any,
    rows: Sequence[tuple[int, int]] | None = None,
) -> Comparison:
    """Compares `a(*inputs_a)` with `b(*inputs_b)`; submodules are matched by their names.

    Tokens are counted over the leading dimensions of the first tensor among the inputs: all of them for ids, all but
    the last for floats. `rows` holds pairs (i, j): token i of `a` is token j of `b` (others are not compared). Without
    it both have the same tokens in the same order.

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
        # Tokens without a match get keys that no token of the other side has.
        keys = -1 - 2 * keys[0], -2 - 2 * keys[1]
        for number, (i, j) in enumerate(rows):
            keys[0][i] = keys[1][j] = number
    return compare_implementations(_implementation(a, inputs_a, keys[0]), _implementation(b, inputs_b, keys[1]))


def _implementation(work: Callable[..., Any], inputs: Any, keys: Tensor) -> Implementation:
    module = work if isinstance(work, nn.Module) else nn.Module()

    def run(recording: ForwardRecording) -> None:
        with record_forward(module, recording):
            recording.begin(keys)
            recording.add(recording.call(INPUTS, "inputs"), "output", inputs)
            arguments, keywords = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
            result = recording.run(RESULT, lambda: work(*arguments, **keywords))
            recording.add(recording.call(RESULT, "result"), "output", result)

    return run


def _tokens(inputs: Any, which: str) -> int:
    values = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None:
        raise TrimtabError(f"the inputs of the {which} side hold no tensor: give its arguments, or keywords by name")
    return first.numel() if not first.is_floating_point() or first.ndim < 2 else first.numel() // first.shape[-1]


def _run(side: Implementation, full: TensorName | None = None, inside: str | None = None) -> ForwardRecording:
    recording = ForwardRecording(full, inside)
    side(recording)
    return recording


def _names(names: Any) -> set[str]:
    return {name.operation for name in names}


def _count_differing(a: RecordedTensor, b: RecordedTensor) -> tuple[int, int]:
    """Returns the number of common tokens and the number of those whose bits differ. Tokens may occur repeatedly."""
    (keys_a, values_a), (keys_b, values_b) = a.joined(), b.joined()
    common, differing = set[int](), set[int]()
    for keys, values, others, other_values in (
        (keys_a, values_a, keys_b, values_b),
        (keys_b, values_b, keys_a, values_a),
    ):
        index, other_index = _match_keys(keys, others)
        common.update(keys[index].tolist())
        differing.update(keys[index][values[index] != other_values[other_index]].tolist())
    return len(common), len(differing)


def _match_keys(keys: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices of `keys` that occur in `others`, and the index of their first occurrence there."""
    order = others.argsort(stable=True)
    index = torch.searchsorted(others[order], keys).clamp(max=len(others) - 1)
    matches = others[order[index]] == keys
    return matches.nonzero()[:, 0], order[index[matches]]


def _describe_difference(
    first: TensorName,
    shared: list[TensorName],
    counts: tuple[int, int],
    recordings: tuple[ForwardRecording, ForwardRecording],
    sides: tuple[Implementation, Implementation],
) -> Difference:
    name, position = first.operation, shared.index(first)
    before = [tensor_name.operation for tensor_name in shared[:position] if tensor_name.half == "output"]
    inside = name if first.half == "output" else None
    rerun = [_run(side, first, inside) for side in sides]
    tensors = [recording.tensors[first] for recording in rerun]
    types = tuple("/".join(sorted(tensor.types)) for tensor in tensors)
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return Difference(
        operation=name,
        kind=recordings[1].kinds[name] if first.half == "output" else _between(first, before, recordings[1]),
        layer=None if number is None else int(number.group(1)),
        half=first.half,
        after=before[-1] if before else None,
        tokens=counts[1],
        compared=counts[0],
        largest=_largest(*tensors),
        types=(types[0], types[1]),
        weights=_weights(name, recordings) if first.half == "output" else None,
        inside=None if inside is None else _inside(name, rerun[0], rerun[1]),
    )


def _between(first: TensorName, before: Sequence[str], recording: ForwardRecording) -> str:
    """Returns in one word what the model computes outside of modules before this input."""
    kind, previous = recording.kinds[first.operation], recording.kinds[before[-1]] if before else ""
    if kind == "norm":
        return "residual sum"
    if kind == "linear" and previous in ("linear", "activation"):
        return "activation"
    return previous or kind


def _largest(a: RecordedTensor, b: RecordedTensor) -> float | None:
    (keys_a, values_a), (keys_b, values_b) = a.joined(), b.joined()
    if values_a.shape[1:] != values_b.shape[1:]:
        return None
    largest = 0.0
    for keys, values, others, other_values in (
        (keys_a, values_a, keys_b, values_b),
        (keys_b, values_b, keys_a, values_a),
    ):
        index, other_index = _match_keys(keys, others)
        largest = max(largest, float((values[index] - other_values[other_index]).abs().max()))
    return largest


def _weights(operation: str, recordings: tuple[ForwardRecording, ForwardRecording]) -> str | None:
    """Returns how the parameters of an operation differ between the sides, or None."""
    modules = [recording.modules.get(operation) for recording in recordings]
    if modules[0] is None or modules[1] is None:
        return None
    parameters, other_parameters = (
        dict(module.named_parameters(recurse=False)) for module in modules if module is not None
    )
    for name in sorted(parameters.keys() & other_parameters.keys()):
        a, b = parameters[name].detach().cpu(), other_parameters[name].detach().cpu()
        if a.shape != b.shape:
            return f"{name} has shape {tuple(a.shape)} and {tuple(b.shape)}"
        types = f"{a.dtype} and {b.dtype}".replace("torch.", "")
        narrow = min(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        if bool((differs := a.to(narrow) != b.to(narrow)).any()):
            return f"{name} differs in {int(differs.sum())} of {a.numel()} numbers ({types})"
        if a.dtype != b.dtype:
            return f"{name} is {types}, and equal once rounded"
    return None


def _inside(operation: str, a: ForwardRecording, b: ForwardRecording) -> str | None:
    """Returns the first tensor operation whose bits differ, if both sides ran the same ones."""
    if not a.steps or not b.steps:
        return None
    if a.steps != b.steps or len(a.steps) > 1:
        names = [{name for names in recording.steps for name in names} for recording in (a, b)]
        alone = [", ".join(sorted(first - second)) for first, second in (names, names[::-1])]
        sides = zip(("first", "second"), alone, strict=True)
        message = "; ".join(f"the {which} side alone runs {names}" for which, names in sides if names)
        return message or "the same tensor operations, in another order or number"
    for index, name in enumerate(next(iter(a.steps))):
        tensor_name = TensorName(step_name(operation, index), "output")
        if (
            tensor_name in a.tensors
            and tensor_name in b.tensors
            and _count_differing(a.tensors[tensor_name], b.tensors[tensor_name])[1]
        ):
            return f"{name}, number {index + 1} of {len(next(iter(a.steps)))}"
    return None
