"""For all output: makes text from outside (file names, model output) safe to print; formats numbers and settings."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Control characters except newline and tab could rewrite a terminal; direction marks could reorder the text after them;
# unpaired surrogates cannot be encoded.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_|[]#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def clean(text: str) -> str:
    """Returns the text with control characters escaped."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def without_credentials(text: str) -> str:
    """Returns the text without user names and passwords in URLs. A URL ends at the next white space."""
    return re.sub(r"://\S*@", "://***@", text)


def markdown_text(text: str) -> str:
    """Returns one line, escaped so that Markdown shows it unchanged, also in a table cell."""
    return one_line(text).translate(_MARKS)


def code_span(text: str, *, in_table: bool = False) -> str:
    """Returns one line as a Markdown code span, fenced by more backticks than it contains in a row.

    in_table: whether to escape |, which ends a table cell even inside code.
    """
    line = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line[:1] in ("`", " ") or line[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{line.replace('|', chr(92) + '|') if in_table else line}{pad}{fence}" if line else ""


def one_line(text: str) -> str:
    """Returns the text with unprintable characters, such as newlines, replaced by spaces."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def fold(lines: Sequence[tuple[str, str]], width: int | None) -> str:
    """Returns labels and texts as lines, wrapped at `width` columns if given; the texts begin at the same column."""
    start, result = max(10, *(len(label) + 2 for label, _ in lines)), []
    for label, text in lines:
        head, plain = f"{label:<{start}}", one_line(text)
        form = textwrap.TextWrapper(max(width or 0, 40), head, " " * start, break_on_hyphens=False)
        result += [head + plain] if width is None else form.wrap(plain)
    return "\n".join(result)


def json_value(value: Any) -> Any:
    """Returns the value as JSON can hold it: non-finite numbers become None, arrays lists, and paths strings."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a numpy value; this module does not import numpy
        return json_value(value.tolist())
    return str(value) if isinstance(value, Path) else value


def join_names(names: Sequence[str]) -> str:
    """Returns the names separated by commas; if more than four, the first three and the number of the rest."""
    return f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 4 else ", ".join(names)


def format_value(value: Any) -> str:
    """Returns a configured value as text; None stands for an absent key."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    return one_line(str(value))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values by dotted key; tables in a list are numbered from 0."""
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = [(f"{prefix}.{index}", item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    return {key: leaf for name, item in items for key, leaf in flatten(item, name).items()}


def differences(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the dotted keys whose values differ, with both values; a missing value is None."""
    before, now = flatten(old), flatten(new)
    for key in [*now, *(key for key in before if key not in now)]:
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)


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
    if size >= 999.95:  # 1,000 with four digits
        return f"{value:,.0f}"
    return short_exponent(f"{value:.2e}") if size < 9.9995e-4 else f"{value:.4g}"


def short(value: float) -> str:
    """Returns a number with two significant digits, such as 0.26 or 1.9e-3; integers from 100 to 1,000 with three.

    0 is "0", and NaN is "–".
    """
    if value == 0 or math.isnan(value):
        return "0" if value == 0 else "–"
    if 99.5 <= abs(value) < 999.5:
        return f"{value:.0f}"
    return f"{value:.2g}" if 0.00995 <= abs(value) < 100 else short_exponent(f"{value:.1e}")


def format_signed(value: float) -> str:
    """Formats a number as `short` does, with a typographic minus."""
    return f"−{short(-value)}" if value < 0 else short(value)


def format_percent(share: float) -> str:
    """Formats a share: 12%, 0.3%, 99.8%; 0% and 100% only for exact values."""
    if not math.isfinite(share):
        return "–"
    hundred = 100 * share
    if 0 < hundred < 0.1 or 99.9 < hundred < 100:
        return "<0.1%" if hundred < 1 else ">99.9%"
    whole = 9.95 <= hundred < 99.5 or hundred >= 100 or hundred == 0
    return f"{hundred:.0f}%" if whole else f"{hundred:.1f}%"


def format_count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def duration(seconds: float) -> str:
    """Returns a duration as `42 s`, `3 min 07 s` or `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def beside(value: float, bounds: Iterable[float], form: Callable[[float], str] = short) -> str:
    """Returns `form(value)`, with more digits if needed to show on which side of each bound the value lies."""
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


def short_exponent(text: str) -> str:
    """Returns numbers in scientific notation without padding of the exponent: 1e-5 for 1e-05."""
    return re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", text)
