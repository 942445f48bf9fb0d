"""A pytest plugin that records how far each numeric comparison of the tests is from its limit.

`tests/roundings.py` loads it (`-p tests.margins`, folder in `TRIMTAB_MARGINS`); ordinary runs do not. It
records ordered comparisons inside an `assert` statement of a rewritten module (chains and generator expressions too,
which pytest's own `pytest_assertion_pass` does not distinguish), `pytest.approx`, and the closeness functions of torch
and NumPy. Every process writes one JSON line for each comparison and test: the one nearest to its limit.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import _pytest.approx
import _pytest.assertion.rewrite as rewrite
import numpy as np
import pytest
import torch

TESTS = Path(__file__).parent
HOOK = "__margins__"
ORDERED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


@dataclass(slots=True)
class Row:
    """The comparison nearest to its limit of one line in one test; a negative `slack` is past it.

    That is a failure, or what the test expects (`not allclose(...)`, or one of several alternatives).
    """

    where: str
    test: str
    kind: str
    text: str
    measured: float
    limit: float
    slack: float
    integer: bool = False
    count: int = 1


class Recorder:
    """Keeps the nearest comparison for each line and test until the test ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: dict[tuple[str, str, str], Row] = {}

    def add(self, kind: str, text: str, where: str, measured: float, limit: float, slack: float, **more: Any) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "import").rsplit(" (", 1)[0]
        nearest = self._rows.get((where, text, test))
        count = 1 if nearest is None else nearest.count + 1
        if nearest is None or slack < nearest.slack or math.isnan(slack):
            nearest = Row(where, test, kind, text, measured, limit, slack, **more)
            self._rows[where, text, test] = nearest
        nearest.count = count

    def flush(self) -> None:
        if self._rows:
            with self._file.open("a") as out:
                out.writelines(json.dumps(asdict(row)) + "\n" for row in self._rows.values())
            self._rows.clear()


_recorder: Recorder | None = None


def _record(*words: Any, **more: Any) -> None:
    if _recorder is not None:
        _recorder.add(*words, **more)


def _caller(depth: int) -> str | None:
    """Returns file and line of the nearest of the last `depth` callers that is in a test, or None."""
    frame = sys._getframe(2)
    for _ in range(depth):
        if frame is None:
            return None
        file = Path(frame.f_code.co_filename)
        if TESTS in file.parents and file != Path(__file__):
            return f"{file.relative_to(TESTS.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


# Ordered comparisons


def _array(value: Any) -> np.ndarray | None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, bool) or not isinstance(value, (Real, np.ndarray)):
        return None
    array = np.asarray(value)
    return array if array.size and array.dtype.kind in "fiu" else None


def _record_comparison(left: Any, sign: str, right: Any, where: str, text: str, constant: bool) -> None:
    """Records an ordered comparison. With `constant`, the left side is the limit and the right side was measured."""
    one, other = _array(left), _array(right)
    if one is None or other is None:
        return
    integer = one.dtype.kind in "iu" and other.dtype.kind in "iu"
    low, high = (one, other) if sign[0] == "<" else (other, one)
    low, high = np.broadcast_arrays(low.astype(float), high.astype(float))
    with np.errstate(invalid="ignore"):
        slack = (high - low).ravel()
    worst = int(np.argmin(slack))
    limit, measured = (low, high) if constant == (sign[0] == "<") else (high, low)
    pair = float(measured.ravel()[worst]), float(limit.ravel()[worst])
    _record("compare", text, where, *pair, float(slack[worst]), integer=integer)


def _chain(where: str, signs: str, texts: list[str], constants: list[bool], *values: Any) -> Any:
    """Records the comparison `values[0] signs[0] values[1] ...` and returns its value, as Python evaluates it."""
    result: Any = True
    for index, sign in enumerate(signs.split()):
        left, right = values[index : index + 2]
        if sign != "==":
            text = f"{texts[index]} {sign} {texts[index + 1]}"
            _record_comparison(left, sign, right, where, text, constants[index] and not constants[index + 1])
        result = COMPARE[sign](left, right)
        if index + 2 < len(values) and not result:
            return result
    return result


def _is_constant(node: ast.expr) -> bool:
    """Whether an expression is a number, arithmetic on numbers, or a name in capitals."""
    names = [inner for inner in ast.walk(node) if isinstance(inner, (ast.Name, ast.Call, ast.Attribute))]
    return all(isinstance(inner, ast.Name) and inner.id.isupper() for inner in names)


class _Comparisons(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        kinds = {type(sign) for sign in node.ops}
        texts = [ast.unparse(value)[:100] for value in (node.left, *node.comparators)]
        constants = [_is_constant(value) for value in (node.left, *node.comparators)]
        self.generic_visit(node)
        if not kinds & ORDERED.keys() or kinds - ORDERED.keys() - {ast.Eq}:
            return node
        signs = " ".join(ORDERED.get(type(sign), "==") for sign in node.ops)
        operands = [node.left, *node.comparators]
        location = [ast.Constant(f"{self._file}:{node.lineno}"), ast.Constant(signs)]
        lists = [ast.parse(repr(item), mode="eval").body for item in (texts, constants)]
        call = ast.Call(ast.Name(HOOK, ast.Load()), [*location, *lists, *operands], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


class _Asserts(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._comparisons = _Comparisons(file)

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        node.test = self._comparisons.visit(node.test)
        return node


def _patch_asserts() -> None:
    original = rewrite.rewrite_asserts

    def instrumented(tree: ast.Module, source: bytes, path: str | None = None, config: Any = None) -> None:
        if path is not None and TESTS in Path(path).parents:
            _Asserts(str(Path(path).relative_to(TESTS.parent))).visit(tree)
        original(tree, source, path, config)

    rewrite.rewrite_asserts = instrumented
    rewrite._read_pyc = lambda *_words, **_more: None  # modules compiled by ordinary runs record nothing
    rewrite._write_pyc = lambda *_words, **_more: False
    setattr(builtins, HOOK, _chain)


# Closeness


def _patch_approx() -> None:
    scalar = _pytest.approx.ApproxScalar
    original = scalar.__eq__

    def recorded(self: Any, actual: Any) -> bool:
        where = _caller(depth=10)  # lists and mappings of pytest.approx call this once for each number
        numbers = (self.expected, actual)
        if where and all(isinstance(value, Real) and not isinstance(value, bool) for value in numbers):
            error, limit = abs(float(self.expected) - float(actual)), float(self.tolerance)
            _record("approx", "pytest.approx", where, error, limit, limit - error)
        return original(self, actual)

    scalar.__eq__ = recorded  # pyright: ignore[reportAttributeAccessIssue]


def _pairs(actual: Any, expected: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields all pairs of arrays of two possibly nested arguments of a closeness function."""
    if isinstance(actual, dict):
        for key in actual.keys() & expected.keys():
            yield from _pairs(actual[key], expected[key])
        return
    if isinstance(actual, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in actual):
        for one, other in zip(actual, expected, strict=False):
            yield from _pairs(one, other)
        return
    one, other = (
        _array(np.asarray(value) if isinstance(value, (list, tuple)) else value) for value in (actual, expected)
    )
    if one is not None and other is not None:
        yield one.astype(float), other.astype(float)


# Default tolerances of the closeness functions; that of torch.testing depends on the dtype.
DEFAULTS = {"allclose": (1e-5, 1e-8), "isclose": (1e-5, 1e-8), "assert_allclose": (1e-7, 0.0)}


def _tolerances(name: str, actual: Any, more: dict[str, Any]) -> tuple[float, float]:
    rtol, atol = more.get("rtol"), more.get("atol")
    if name == "assert_close":
        if rtol is None:
            types = {torch.float64: 1e-7, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
            kind = getattr(actual, "dtype", torch.float64 if isinstance(actual, float) else torch.float32)
            rtol, atol = types.get(kind, 1.3e-6), 1e-7 if kind == torch.float64 else 1e-5
        return float(rtol), float(atol or 0.0)
    default = DEFAULTS[name]
    return float(default[0] if rtol is None else rtol), float(default[1] if atol is None else atol)


def _patch_close(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def recorded(actual: Any, expected: Any, *words: Any, **more: Any) -> Any:
        where = _caller(depth=1)
        if where and not words:
            rtol, atol = _tolerances(name, actual, more)
            for one, other in _pairs(actual, expected):
                _record_closeness(name, where, one, other, rtol, atol)
        return original(actual, expected, *words, **more)

    setattr(owner, name, recorded)


def _record_closeness(name: str, where: str, one: np.ndarray, other: np.ndarray, rtol: float, atol: float) -> None:
    """Records the element whose error is the largest share of its tolerance."""
    if one.shape != other.shape and one.size != 1 and other.size != 1:
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.atleast_1d(np.where(one == other, 0.0, np.abs(one - other)))
        limit = np.broadcast_to(np.atleast_1d(atol + rtol * np.abs(other)), error.shape)
        share = np.where(error == 0, 0.0, error / limit)
    if np.isfinite(error).any() and limit.max() > 0:
        worst = np.unravel_index(int(np.nanargmax(share)), error.shape)
        measured, allowed = float(error[worst]), float(limit[worst])
        _record("close", name, where, measured, allowed, allowed - measured)


def pytest_configure(config: pytest.Config) -> None:
    """Starts recording."""
    global _recorder
    if _recorder is None and (folder := os.environ.get("TRIMTAB_MARGINS")):
        worker = getattr(config, "workerinput", {}).get("workerid", "main")
        _recorder = Recorder(Path(folder) / f"{worker}-{os.getpid()}.jsonl")
        _patch_asserts()
        _patch_approx()
        for owner, names in (
            (torch, ["allclose", "isclose"]),
            (torch.testing, ["assert_close"]),
            (np, ["allclose", "isclose"]),
            (np.testing, ["assert_allclose"]),
        ):
            for name in names:
                _patch_close(owner, name)


def pytest_runtest_logfinish() -> None:
    """Writes the comparisons of the test."""
    if _recorder is not None:
        _recorder.flush()


def pytest_unconfigure() -> None:
    """Writes the comparisons made after the last test."""
    if _recorder is not None:
        _recorder.flush()
