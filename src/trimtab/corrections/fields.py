"""Fields of an objective's parts (ratios, weights, masks, ...) whose values are checked when a part is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any, cast

from trimtab.corrections.ratios import Number
from trimtab.errors import TrimtabError, did_you_mean


class CheckedFields:
    """The base class of parts, which are frozen dataclasses. It checks the fields made by `one_of` and `within`."""

    def __post_init__(self) -> None:
        self.check_fields()

    def check_fields(self) -> None:
        """Raises `TrimtabError` naming an invalid field. For subclasses that have their own `__post_init__`."""
        part = type(self).__name__
        for item in fields(cast(Any, self)):
            value, limits = getattr(self, item.name), item.metadata
            if "options" in limits and value not in limits["options"]:
                hint = did_you_mean(str(value), limits["options"])
                raise TrimtabError(f"{part}: unknown {item.name} {value!r}{hint}")
            if "interval" not in limits or (value is None and limits["optional"]):
                continue
            interval = limits["interval"]
            if value is None:
                raise TrimtabError(f"{part}: {item.name} is None: give a number in {interval}")
            if not _lies_in(value, interval):
                raise TrimtabError(f"{part}: {item.name} = {value:g} must lie in {interval}")


def _lies_in(value: Number, interval: str) -> bool:
    """Whether a number is in an interval such as "(0, inf]"; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    return low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")


def one_of(options: Iterable[str], default: Any = MISSING) -> Any:
    """Returns a dataclass field whose value must be one of the options."""
    return field(default=default, metadata={"options": options})


def within(interval: str, default: Any = MISSING, *, optional: bool = False) -> Any:
    """Returns a dataclass field whose value must be in an interval, such as "(0, inf)", or None if `optional`."""
    return field(default=default, metadata={"interval": interval, "optional": optional})


def check_bounds(low: Number, high: Number, part: str) -> None:
    """Raises `TrimtabError` if the bounds do not enclose 1."""
    if not 0.0 <= low <= 1.0 <= high:
        raise TrimtabError(f"{part}: [{low:g}, {high:g}] must enclose 1, since bounds are on the ratio itself")
