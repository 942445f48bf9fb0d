"""Checks of what callers pass: tensors, and options and bounds of parts.

Each error names the argument, what it is and what it must be, in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from trimtab.corrections.ratios import Number
from trimtab.errors import TrimtabError, did_you_mean

TOKENS = "(batch, time)"
_KINDS = {"sequence_ids": "integer", "turn": "integer", "age": "integer", "response_ids": "integer"}
_KINDS |= {"mask": "bool", "off_policy": "bool"}
"""Kinds of the arguments that are not floating-point."""


def check_batch(mask: object, **tensors: object) -> None:
    """Raises `ValueError` unless mask is (batch, time) bool and the other given tensors have its shape and device.

    Unchecked, a float mask would select nothing and a shorter tensor would be broadcast, both silently.
    """
    shape = mask.shape if isinstance(mask, Tensor) and mask.ndim == 2 else None
    check_tensor("mask", mask, mask, *([] if shape is None else [shape]))
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor, mask, *([] if shape is None else [shape]))


def check_tensor(
    name: str, value: object, mask: object, *shapes: tuple[int, ...], kind: str = "", words: str = TOKENS
) -> None:
    """Raises `ValueError` unless `value` is a dense tensor with one of the shapes, the kind, and the mask's device.

    kind: bool, integer, float, number (integer or float) or real (also bool); by default the kind of arguments with
    this name. words: the shapes in words.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, not a tensor {words}")
    if value.shape not in shapes:
        beside = f", mask {tuple(mask.shape)}" if isinstance(mask, Tensor) and name != "mask" else ""
        raise ValueError(f"{name} has shape {tuple(value.shape)}{beside}: it must be {words}")
    kind = kind or _KINDS.get(name, "float")
    if not _is(kind, value.dtype):
        raise ValueError(f"{name} must be {kind}, not {value.dtype}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, not {value.layout}")
    if isinstance(mask, Tensor) and value.device != mask.device:
        raise ValueError(f"{name} is on {value.device}, mask on {mask.device}: move it there")


def check_advantage(advantage: object, mask: Tensor) -> None:
    """Raises `ValueError` unless the advantages are numbers (batch, 1) or (batch, time) on the mask's device."""
    shapes = ((len(mask), 1), tuple(mask.shape))
    check_tensor("advantage", advantage, mask, *shapes, kind="number", words="(batch, 1) or (batch, time)")


def _is(kind: str, dtype: torch.dtype) -> bool:
    if kind == "bool":
        return dtype == torch.bool
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    number = whole or dtype.is_floating_point
    return {"integer": whole, "float": dtype.is_floating_point, "number": number, "real": not dtype.is_complex}[kind]


def check_option(part: object, name: str, options: Iterable[str]) -> None:
    """Raises `TrimtabError` if the field `name` of a part is none of the options."""
    value = getattr(part, name)
    if value not in options:
        raise TrimtabError(f"{type(part).__name__}: unknown {name} {value!r}{did_you_mean(str(value), options)}")


def check_range(part: object, name: str, interval: str, optional: bool = False) -> None:
    """Raises `TrimtabError` if the field `name` of a part is outside an interval, such as "(0, inf)".

    optional: whether None is allowed.
    """
    low, high = map(float, interval[1:-1].split(","))
    value = getattr(part, name)
    if value is None and not optional:
        raise TrimtabError(f"{type(part).__name__}: {name} is None: give a number in {interval}")
    if value is None or low < value < high:
        return
    if not ((value == low and interval[0] == "[") or (value == high and interval[-1] == "]")):
        raise TrimtabError(f"{type(part).__name__}: {name} = {value:g} must lie in {interval}")


class CheckedFields:
    """The base class of parts, which are frozen dataclasses. It checks the fields made by `one_of` and `within`."""

    def __post_init__(self) -> None:
        self.check_fields()

    def check_fields(self) -> None:
        """Raises `TrimtabError` naming an invalid field. For subclasses that have their own `__post_init__`."""
        for item in fields(cast(Any, self)):
            if "check" in item.metadata:
                check, *what = item.metadata["check"]
                check(self, item.name, *what)


def one_of(options: Iterable[str], default: Any = MISSING) -> Any:
    """Returns a dataclass field whose value must be one of the options."""
    return field(default=default, metadata={"check": (check_option, options)})


def within(interval: str, default: Any = MISSING, *, optional: bool = False) -> Any:
    """Returns a dataclass field whose value must be in an interval, such as "(0, inf)", or None if `optional`."""
    return field(default=default, metadata={"check": (check_range, interval, optional)})


def check_bounds(low: Number, high: Number, part: str) -> None:
    """Raises `TrimtabError` if the bounds do not enclose 1."""
    if not 0.0 <= low <= 1.0 <= high:
        raise TrimtabError(f"{part}: [{low:g}, {high:g}] must enclose 1, since bounds are on the ratio itself")
