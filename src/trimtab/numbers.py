"""For all output: formats numbers for pages, figures and the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any


def number(value: Any) -> str:
    """Returns a number with four significant digits and thousands separators; below 1e-3 as a power of ten.

    None and numbers that are not finite become "–" (a NaN metric is null in JSON); strings are returned unchanged.
    """
    if isinstance(value, str):
        return value
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.3g}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return power(value, 2) if size < 1e-3 else f"{value:.4g}"


def short(value: float) -> str:
    """Returns a number with two significant digits, such as 0.26 or 1.9e-3."""
    if value == 0:
        return "0"
    return f"{value:.2g}" if 0.01 <= abs(value) < 1000 else power(value, 1)


def beside(value: float, bounds: Iterable[float], form: Callable[[float], str] = short) -> str:
    """Returns `form(value)`, with more digits where these would not show on which side of a bound the value lies."""
    text = form(value)
    if not math.isfinite(value):
        return text
    for digits in range(3, 17):
        if all(_side(float(text.replace(",", "")), bound) == _side(value, bound) for bound in bounds):
            break
        text = short_exponent(f"{value:.{digits}g}")
    return text


def _side(value: float, bound: float) -> int:
    return (value > bound) - (value < bound)


def power(value: float, digits: int) -> str:
    """Returns scientific notation without padding of the exponent: 1.9e-3 instead of 1.9e-03."""
    return short_exponent(f"{value:.{digits}e}")


def short_exponent(text: str) -> str:
    """Returns numbers in scientific notation without padding of the exponent: 1e-5 for 1e-05."""
    return re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", text)
