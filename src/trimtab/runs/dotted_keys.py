"""Nested settings as dotted keys, to compare two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns values by dotted key; the tables of a list are numbered."""
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = [(f"{prefix}.{index}", item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    return {key: leaf for name, item in items for key, leaf in flatten(item, name).items()}


def differences(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the dotted keys whose values differ, with both values; a missing one is None."""
    before, now = flatten(old), flatten(new)
    for key in [*now, *(key for key in before if key not in now)]:
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)
