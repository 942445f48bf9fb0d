"""Loads a user's function named `module:function` in a recipe."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, nearest


def load_function(place: str, what: str) -> Callable[..., Any]:
    """The function named `module:function`; modules beside the current directory are found too.

    `what` begins error lines, such as "reward". Raises `TrimtabError` when there is no such module or function.
    """
    module_name, _, function_name = place.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # an installed command does not look where the user stands
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TrimtabError(
            f"{what} {place!r}: cannot import {module_name!r} ({type(error).__name__}: {error}); "
            "write module:function, with the module installed or in the current directory"
        ) from None
    finally:
        sys.path.remove(here)
    function = getattr(module, function_name, None)
    if function is None:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise TrimtabError(f"{what} {place!r}: no {function_name!r} in {module_name!r}{nearest(function_name, public)}")
    return function


def check_arguments(function: Any, what: str, arguments: dict[str, str]) -> None:
    """Refuse what is no function or cannot take `arguments` (name -> type, as an error line shows them)."""
    shown = ", ".join(f"{name}: {kind}" for name, kind in arguments.items())
    if not callable(function):
        raise TrimtabError(f"{what} is {type(function).__name__}, not a function of ({shown})")
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:
        pass  # some builtins have no signature to look at
    except TypeError:
        raise TrimtabError(f"{what}: it must take {len(arguments)} arguments, ({shown})") from None
