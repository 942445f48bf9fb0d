"""Runs a check in a process with limits of time and memory: it calls a function that somebody wrote."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.check_loss.answer import Answer, from_dict
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.sandbox.function_pool import Call, FunctionPool

MEMORY = 16 << 30  # bytes; torch and another trainer map several GB


def check_target(target: str, objective: Mapping[str, Any] | None, *, timeout: float, **options: Any) -> Answer:
    """Returns the answer for a function, FILE.py:NAME or module:NAME, whose name may have dots.

    objective: an `[objective]` section; None for which it is. options: `arguments` of `signatures.of_function`, and
        `spec` and `ignore` of `check`.
    Raises `TrimtabError` for a function that cannot be loaded or called, or takes longer than `timeout` seconds.
    """
    if not all(target.rpartition(":")[::2]):
        raise TrimtabError(f"{target!r} names no function: write FILE.py:FUNCTION")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "answer.json"
        request = {"target": target, "objective": objective, **options}
        pool = FunctionPool([_run], workers=1, memory=MEMORY)
        try:
            (outcome,) = pool.run([Call(0, {"request": request, "result": str(result)}, timeout)])
        finally:
            pool.close()
        if outcome.error is not None:
            raise TrimtabError(f"the check of {target} {outcome.error}")
        found = json.loads(result.read_text())
    if "error" in found:
        raise TrimtabError(found["error"])
    return from_dict(found)


def _run(request: Mapping[str, Any], result: str) -> float:
    """Runs in the process: writes the answer, or the error, to a file. What the function prints is not shown."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    try:
        found = _answer(**request).as_dict()
    except TrimtabError as error:
        found = {"error": str(error)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = {
            "error": f"{request['target']}: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        }
    Path(result).write_text(json.dumps(found))
    return 0.0


def _answer(
    target: str, objective: Mapping[str, Any] | None, spec: str, arguments: Mapping[str, Any], ignore: Sequence[str]
) -> Answer:
    from trimtab.check_loss.check import check
    from trimtab.check_loss.signatures import of_function
    from trimtab.objectives.lookup import from_section

    loss = of_function(_load(target), arguments, target)
    return check(loss, None if objective is None else from_section(objective), spec=spec, ignore=ignore)


def _load(target: str) -> Any:
    """Returns the function. Importing runs the file."""
    place, _, name = target.rpartition(":")
    try:
        if place.endswith(".py"):
            path = Path(place).resolve()
            sys.path.insert(0, str(path.parent))
            specification = importlib.util.spec_from_file_location(path.stem, path)
            assert specification is not None
            assert specification.loader is not None
            module = importlib.util.module_from_spec(specification)
            sys.modules[path.stem] = module
            specification.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except Exception as error:
        raise TrimtabError(f"{place} cannot be imported: {type(error).__name__}: {error}") from None
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("__")]
            raise TrimtabError(f"{place} has no {part!r}{did_you_mean(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise TrimtabError(f"{target} is {type(found).__name__}, not a function")
    return found


def parse_arguments(given: Sequence[str]) -> dict[str, Any]:
    """Returns `NAME=VALUE` as a mapping: numbers, true, false and null as such, anything else as text."""
    parsed: dict[str, Any] = {}
    for item in given:
        key, sign, value = item.partition("=")
        if not (key and sign):
            raise TrimtabError(f"--arguments {item}: write NAME=VALUE")
        try:
            parsed[key] = json.loads(value)
        except ValueError:
            parsed[key] = value
    return parsed
