"""A user's own reward: `module:function` or any callable `(completion: str, problem: Problem) -> float`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, nearest
from trimtab.rewards.base import Built
from trimtab.rewards.response import Response
from trimtab.types import Problem


def load(place: str) -> Callable[..., Any]:
    """The function named `module:function`; modules beside the current directory are found too."""
    module_name, _, function_name = place.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # an installed command does not look where the user stands
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TrimtabError(
            f"reward {place!r}: cannot import {module_name!r} ({type(error).__name__}: {error}); "
            "write module:function, with the module installed or in the current directory"
        ) from None
    finally:
        sys.path.remove(here)
    function = getattr(module, function_name, None)
    if function is None:
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise TrimtabError(f"reward {place!r}: no {function_name!r} in {module_name!r}{nearest(function_name, public)}")
    return function


def build(function: Callable[..., Any], name: str) -> Built:
    """Wrap a checked function; it will run in a worker process."""
    if not callable(function):
        raise TrimtabError(
            f"reward {name!r} is {type(function).__name__}, not a function (completion, problem) -> float"
        )
    try:
        inspect.signature(function).bind("completion", "problem")
    except ValueError:
        pass  # some builtins have no signature to look at
    except TypeError:
        raise TrimtabError(
            f"reward {name!r}: it must take two arguments, (completion: str, problem: Problem)"
        ) from None

    def user(response: Response, problem: Problem) -> Any:
        return function(response.text, problem)

    return Built(user, isolated=True)
