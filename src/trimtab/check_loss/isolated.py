"""Runs a check in a process with limits of time and memory, because it calls a function of anybody."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.plugins import allow_code, load_function, only_named
from trimtab.trainer.sandbox.function_pool import FunctionCall, FunctionPool

MEMORY = 16 << 30  # bytes; torch and another trainer map several GB


def check_target(target: str, timeout: float, **request: Any) -> dict[str, Any]:
    """Returns the answer for a function: FILE.py:NAME or module:NAME; NAME may have dots.

    request: the other arguments of `_answer`. Raises `TrimtabError` if the function cannot be loaded or called, or if
    the check takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer.json"
        pool = FunctionPool([_run], workers=1, memory=MEMORY)
        try:
            call = FunctionCall(0, {"request": {"target": target, **request}, "result": str(result)}, timeout)
            (outcome,) = pool.run([call])
        finally:
            pool.close()
        if outcome.error is not None:
            raise TrimtabError(f"the check of {target} {outcome.error}")
        found = json.loads(result.read_text(encoding="utf-8"))
    if "error" in found:
        raise TrimtabError(found["error"])
    return found


def _run(request: Mapping[str, Any], result: str) -> float:
    """Writes the answer, or the error, to a file. It runs in the process, and hides what the function prints."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    try:
        found = _answer(**request)
    except TrimtabError as error:
        found = {"error": str(error)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = {"error": f"{request['target']}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"}
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    return 0.0


def _answer(
    target: str,
    objective: Mapping[str, Any] | None,
    spec: str,
    arguments: Mapping[str, Any],
    ignore: Sequence[str],
    trusted: bool = False,
    command: str = "",
) -> dict[str, Any]:
    """Returns the answer as values, as "text" and, if `command` is given, as "html": a page with this command line.

    objective: an `[objective]` section; None: find which one it is. trusted: whether it may name functions to load.
    """
    from trimtab.check_loss.check import check
    from trimtab.check_loss.signatures import of_function
    from trimtab.objectives.lookup import from_section

    with nullcontext() if trusted else only_named(frozenset()):
        expected = None if objective is None else from_section(objective)
    loss = of_function(_load(target), arguments, target)
    answer = check(loss, expected, spec=spec, ignore=ignore)
    found = {**answer.as_dict(), "text": answer.text()}
    if command:
        from trimtab.check_loss.loss_page import page

        found["html"] = page(answer, loss, expected or from_section(dict(answer.nearest[0].settings)), command)
    return found


def _load(target: str) -> Any:
    """Returns the function of a target, and imports (runs) its file."""
    place, _, name = target.rpartition(":")
    outer, *inner = name.split(".")
    if place.endswith(".py"):
        file = Path(place).resolve()
        if file.stem in sys.modules:
            raise TrimtabError(f"{file.name} has the name of a module that is loaded already: rename it")
        os.chdir(file.parent)  # where `load_function` looks first
        sys.path.insert(0, str(file.parent))  # what the function imports when it runs
        place = file.stem
    allow_code()
    found: Any = load_function(f"{place}:{outer}", "loss")
    for part in inner:
        if not hasattr(found, part):
            raise TrimtabError(f"loss {target!r}: no {part!r} in {outer!r}{did_you_mean(part, vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise TrimtabError(f"loss {target!r} is {type(found).__name__}: name a function, or a method of a TRL trainer")
    return found
