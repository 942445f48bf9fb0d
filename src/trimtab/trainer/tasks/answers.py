"""Extracts gold answers from the columns of data sets: text, numbers, GSM8K solutions, boxed LaTeX results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

AnswerFormat = Literal["text", "number", "gsm8k", "boxed"]

_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?([eE][+-]?\d{1,3})?")
_FRACTION = re.compile(r"[+-]?\d+/0*[1-9]\d*")
_NO_WORDS = re.compile(r"(?:[^A-Za-z\\]|\\(?:[A-Za-z]+|[^A-Za-z])|(?:and|or)\b|[A-Za-z]\w*\s*=)*+")
_BOX = re.compile(r"\\(boxed|fbox|framebox)\s*\{")


def extract(value: Any, form: AnswerFormat, pattern: str | None = None) -> str:
    """Returns the gold answer as text.

    `pattern` is a regular expression with one group; if given, only the group of the first match is read.

    Raises:
        ValueError: `value` has no answer in the format `form`; the message suggests another format.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("there is no answer; fill it in or remove the row")
    if pattern is not None:
        match = re.search(pattern, text(value))
        if match is None or not (match[1] or "").strip():
            raise ValueError(
                f"answer_pattern {pattern!r} finds no answer in {_short(text(value))}; correct the pattern or the row"
            )
        value = match[1]
    return _FORMATS[form](value)


def text(value: Any) -> str:
    """Returns text without surrounding white space, and numbers in their shortest plain form."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ValueError(f"the answer is a {type(value).__name__}, not text or a number; name another column")
    return number(value)


def number(value: Any) -> str:
    """Returns a number in its shortest plain form: 14.0 -> "14", "025" -> "25", "1,200" -> "1200".

    3.33333 and 1/2 are returned unchanged.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"the answer is a {type(value).__name__}, not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the answer is {value}, not a finite number; remove the row")
    written = str(value).strip().replace("−", "-")
    if _FRACTION.fullmatch(written):
        return written
    match = _NUMBER.fullmatch(written)
    if not match or not (match.group(1) or match.group(3)):
        better = "'gsm8k'" if "####" in written else "'text', or cut the number out with answer_pattern"
        raise ValueError(f"the answer {_short(written)} is not a number; choose another answer_format, e.g. {better}")
    plain = format(Decimal(written.replace(",", "")), "f")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    return "0" if plain in ("-0", "") else plain


def gsm8k(value: Any) -> str:
    """Returns the number after the last "####" of a GSM8K solution."""
    _, mark, tail = str(value).rpartition("####")
    if not mark:
        raise ValueError(f"no '#### <number>' in {_short(str(value))}; choose another answer_format, e.g. 'number'")
    return number(tail)


def boxed(value: Any) -> str:
    """Returns the content of the last \\boxed{...} of a LaTeX solution, with balanced braces."""
    solution = str(value)
    starts = list(_BOX.finditer(solution))
    if not starts:
        raise ValueError(f"no \\boxed{{...}} in {_short(solution)}; choose another answer_format, e.g. 'text'")
    content = _balanced(solution, starts[-1].end())
    if content is None:
        raise ValueError(f"the last \\boxed{{ of {_short(solution)} is never closed; correct the row")
    if not content.strip():
        raise ValueError("the last \\boxed{} is empty; correct the row")
    return content.strip()


def last_box(text: str) -> str:
    """Returns the last outermost \\boxed{...} and those before it with no words between them but "and" and "or".

    Math-verify reads such boxes as one set: "$x = \\boxed{1}$ and $x = \\boxed{2}$". Empty if no box is closed.
    """
    start = end = 0
    for match in [*re.finditer(r"\\boxed\s*\{", text)][-50:]:  # a response may repeat it, each time unclosed
        if match.start() >= end and (content := _balanced(text, match.end())) is not None:
            start = start if end and _NO_WORDS.fullmatch(text[end : match.start()]) else match.start()
            end = match.end() + len(content) + 1
    return text[start:end]


def _balanced(solution: str, start: int) -> str | None:
    depth, position = 1, start
    while position < len(solution):
        mark = solution[position]
        if mark == "\\":
            position += 2  # an escaped brace is ordinary text
            continue
        depth += (mark == "{") - (mark == "}")
        if depth == 0:
            return solution[start:position]
        position += 1
    return None


def _short(text_: str) -> str:
    return repr(text_ if len(text_) <= 40 else "..." + text_[-37:])


_FORMATS: dict[str, Callable[[Any], str]] = {"text": text, "number": number, "gsm8k": gsm8k, "boxed": boxed}
