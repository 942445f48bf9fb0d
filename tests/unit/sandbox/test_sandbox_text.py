"""Text that goes into a sandbox and comes out of it."""

from __future__ import annotations

import ast
import contextlib
import io
import struct

import pytest

from trimtab.sandbox.code_result import clean, shorten
from trimtab.sandbox.monty_worker import showing_value
from trimtab.sandbox.seccomp import ARCHITECTURES, DENIED, STARTS, code_filter, container_filter

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\n\ttext é 日本", "plain\n\ttext é 日本"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("\x9b1m\x7f", "\\x9b1m\\x7f"),
        ("a\ud800b", "a\\ud800b"),
        ("\u202ea\u2069", "\\u202ea\\u2069"),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str) -> None:
    assert clean(text) == expected
    assert clean(text).encode().decode() == expected


def test_the_middle_of_a_long_text_is_cut_out() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefghij", 4) == "ab\n[... 6 characters ...]\nij"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"),
        ("x = 1", ""),
        ("x = 5; x", "5\n"),
        ("x = 5; x;", "5\n"),
        ("'é' + 'ü'; ('日本'\n * 2)  # why", "'日本日本'\n"),
        ("1,\\\n2", "(1, 2)\n"),
        ("'''a\nb'''", "'a\\nb'\n"),
        ("x = 1\r\nx\r\n", "1\n"),
        ("None", ""),
        ("*[1], 2", "(1, 2)\n"),
        ("lambda: 0; 3", "3\n"),
        ("# only a comment", ""),
        ("", ""),
    ],
)
def test_a_last_expression_is_shown_and_lines_stay_where_they_are(code: str, shown: str) -> None:
    written = io.StringIO()
    changed = compile(showing_value(code), "<test>", "exec")
    with contextlib.redirect_stdout(written):
        exec(changed, {})  # noqa: S102
    assert written.getvalue() == shown
    before = [node.lineno for node in ast.parse(code).body]
    assert [node.lineno for node in ast.parse(showing_value(code)).body][: len(before)] == before


@pytest.mark.parametrize("code", ["1 +", "x = '\0'", "(" * 500, "-" * 100_000 + "1"])
def test_code_that_cannot_be_read_is_passed_on(code: str) -> None:
    assert showing_value(code) == f"{code}\nNone"


def verdict(program: bytes, number: int, *, argument: int = 0, architecture: int) -> int:
    """What the kernel would answer: an interpreter of the few instructions that the filters use."""
    steps = list(struct.iter_unpack("HBBI", program))
    data = {0: number, 4: architecture, 16: argument}
    loaded, position = 0, 0
    while True:
        operation, yes, no, value = steps[position]
        position += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            loaded = data[value]
            continue
        holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[operation]
        position += yes if holds else no


@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_the_filters_deny_what_they_list_and_nothing_else(machine: str) -> None:
    column, here = ARCHITECTURES[machine]
    denied = {row[column] for row in DENIED.values()}
    for number in range(500):
        expected = EPERM if number in denied else ALLOW
        assert verdict(container_filter(machine), number, architecture=here) == expected, number
    assert verdict(container_filter(machine), 0x40000000, architecture=here) == EPERM
    assert verdict(container_filter(machine), 1, architecture=0x40000003) == KILL  # i386
    clone, clone3, *forks = (row[column] for row in STARTS)
    for number in range(500):
        expected = {clone: EPERM, clone3: ENOSYS, **dict.fromkeys(forks, EPERM)}.get(number, ALLOW)
        assert verdict(code_filter(machine), number, architecture=here) == expected, number
    assert verdict(code_filter(machine), clone, argument=0x3D0F00, architecture=here) == ALLOW  # a thread
