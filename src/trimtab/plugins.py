"""Loads user functions that a recipe names as `module:function`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean


def load_function(path: str, what: str) -> Callable[..., Any]:
    """Returns the function named `module:function`. The module may also lie in the current directory.

    `what` is the subject of error messages, such as "reward". Raises `TrimtabError` when the module cannot be imported
    or has no such function.
    """
    module_name, _, function_name = path.partition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # the path of an installed command does not include the current directory
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TrimtabError(
            f"{what} {path!r}: cannot import {module_name!r} ({type(error).__name__}: {error}); "
            "write module:function, with the module installed or in the current directory"
        ) from None
    finally:
        sys.path.remove(folder)
    function = getattr(module, function_name, None)
    if function is None:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise TrimtabError(
            f"{what} {path!r}: no {function_name!r} in {module_name!r}{did_you_mean(function_name, public)}"
        )
    return function


def check_arguments(function: Any, what: str, arguments: dict[str, str]) -> None:
    """Check that `function` is callable with `arguments` (name -> type, as shown in error messages).

    Raises `TrimtabError` otherwise. Builtins without a signature are accepted.
    """
    signature = ", ".join(f"{name}: {kind}" for name, kind in arguments.items())
    if not callable(function):
        raise TrimtabError(f"{what} is {type(function).__name__}, not a function of ({signature})")
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:
        pass  # some builtins have no signature
    except TypeError:
        raise TrimtabError(f"{what}: it must take {len(arguments)} arguments, ({signature})") from None
