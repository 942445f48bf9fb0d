"""Commands of the command line: in this process, which has imported everything already, or in one of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trimtab.cli import main

Done = subprocess.CompletedProcess[str]
Printed = Callable[..., str]
"""What the fixture `printed` returns: runs a command in this process that must end with `code`; its text."""
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def here(*words: str | Path, cwd: Path) -> Done:
    """Runs `trimtab` with these words in this process; a start of its own costs four seconds of imports."""
    arguments = [str(word) for word in words]
    streams = _captured("stdout", 1), _captured("stderr", 2)
    with contextlib.chdir(cwd), _modules_forgotten(cwd), streams[0] as output, streams[1] as errors:
        code = main.run(arguments)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt  # the person who runs the tests has stopped them
    return Done(arguments, code, output(), errors())


def process(*words: str | Path, cwd: Path, **variables: str) -> Done:
    """Runs it in a process of its own, with no terminal and no network."""
    return subprocess.run(
        command(*words), cwd=cwd, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=300, check=False
    )


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "trimtab", *map(str, words)]


def begin(words: Sequence[object], until: str, **options: Any) -> subprocess.Popen[str]:
    """Starts `python WORDS` with options of Popen; returns when it has printed a line that begins with `until`."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT} | options
    started = subprocess.Popen([sys.executable, *map(str, words)], text=True, **streams)
    assert started.stdout is not None
    lines = []
    for line in started.stdout:
        lines.append(line)
        if line.startswith(until):
            return started
    raise AssertionError("".join([*lines, started.communicate()[1] or ""]))


@contextlib.contextmanager
def _modules_forgotten(folder: Path) -> Iterator[None]:
    """Another test may have a module of the same name in another folder."""
    yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


@contextlib.contextmanager
def _captured(stream: str, number: int) -> Iterator[Callable[[], str]]:
    """Yields a function that returns what was written, by Python and by others that share the descriptor."""
    text, kept, before = "", os.dup(number), getattr(sys, stream)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), number)
        try:
            with open(number, "w", encoding="utf-8", buffering=1, closefd=False) as writer:
                setattr(sys, stream, writer)
                yield lambda: text
        finally:
            setattr(sys, stream, before)
            os.dup2(kept, number)
            os.close(kept)
            file.seek(0)
            text = file.read().decode()
