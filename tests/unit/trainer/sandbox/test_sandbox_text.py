"""Text that goes into a sandbox and comes out of it."""

from __future__ import annotations

import ast
import contextlib
import io
import socket

import pytest

from trimtab.text import clean
from trimtab.trainer.sandbox.bubblewrap import Container, ContainerError
from trimtab.trainer.sandbox.code_result import shorten
from trimtab.trainer.sandbox.monty_worker import showing_value


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


@pytest.mark.parametrize(
    ("said", "shown"),
    [("bwrap: No such file", r"^bwrap: No such file$"), ("setting up uid map: Invalid", r"namespaces|rights\)$")],
)
def test_a_kernel_that_refuses_containers_is_explained(said: str, shown: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(f"a line before\n{said}\n".encode())
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ContainerError, match=shown):
            Container(ours, 1, lambda: None).wait_until_ready()
