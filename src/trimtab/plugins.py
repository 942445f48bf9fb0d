"""Code outside the core: users' functions, which a recipe names as `module:function`, and the packages of extras."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import platform
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean

_allowed: Set[str] | None = None
"""The functions that may be loaded besides `SHIPPED`; None allows all."""
SHIPPED = frozenset({"trimtab.trainer.environments.swap_environment:SwapFormat"})
"""Functions that recipes of this package name. Its others are refused: some run commands or import modules."""


@contextmanager
def only_named(functions: Set[str]) -> Iterator[None]:
    """Makes `load_function` refuse all but these functions, each as `module:function`, unless `allow_code` is called.

    For commands that read files of unknown origin: a configuration must not decide which code runs.
    """
    global _allowed
    before, _allowed = _allowed, functions
    try:
        yield
    finally:
        _allowed = before


def allow_code() -> None:
    """Lets `load_function` load every function, until `only_named` ends."""
    global _allowed
    _allowed = None


def load_function(path: str, what: str) -> Callable[..., Any]:
    """Returns the function named `module:function`. The module may also lie in the current directory.

    `what` is the subject of error messages, such as "reward". Raises `TrimtabError` if the module cannot be imported
    or has no such function, or if `only_named` refuses it.
    """
    module_name, _, function_name = path.partition(":")
    folder = str(Path.cwd())
    if _allowed is not None and path not in _allowed | SHIPPED:
        raise TrimtabError(
            f"{what} {path!r} is code that a recipe or run names and this command line does not: it would import "
            f"{_source(module_name, folder)}; read that first, then add --allow-code"
        )
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


def _source(module: str, folder: str) -> str:
    """Returns the file that importing the module would run first, or its name if none is found. Runs nothing."""
    first = module.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(first, [folder, *sys.path])
    return str(spec.origin) if spec is not None and spec.origin else f"the module {first!r}"


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


_DIAGNOSE = ("jinja2", "matplotlib", "pyarrow", "pydantic", "rich", "tokenizers", "tomli_w", "typer")
EXTRAS: dict[str, tuple[str, ...]] = {
    "diagnose": _DIAGNOSE,
    "train": (
        *_DIAGNOSE,
        *("anyio", "datasets", "filelock", "gguf", "httpx2", "math_verify", "peft", "pydantic_monty"),
        *("reasoning_gym", "safetensors", "transformers"),
    ),
    "openenv": ("websockets",),
    "ray": ("ray",),
    "tensorboard": ("tensorboard",),
    "vllm": ("vllm",),
    "wandb": ("wandb",),
}
"""The packages of each extra besides torch, numpy and jaxtyping, by import name."""


def require_extra(extra: str, what: str, otherwise: str = "") -> None:
    """Raises `TrimtabError` with the install command if Python is too old or a package of an extra is missing.

    what: what needs the extra, the beginning of the message. otherwise: what the user can do instead.
    """
    if sys.version_info < (3, 11):
        raise TrimtabError(f"{what} needs Python 3.11 or newer, this is {platform.python_version()}: use a newer one")
    missing = [name for name in EXTRAS[extra] if not _installed(name)]
    if missing:
        some = ", ".join([*missing[:3], "..."] if len(missing) > 4 else missing)
        raise TrimtabError(
            f"{what} needs what is not installed ({some}): {install_hint(extra)}{otherwise and f', {otherwise}'}"
        )


def install_hint(extra: str = "") -> str:
    """Returns the command that installs an extra, or the core: from a checkout, since no registry has the package."""
    target = f"'.[{extra}]'" if extra else "."
    return f"pip install {target} in a checkout of Trimtab"


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    spec = importlib.util.find_spec(name)
    # A folder of that name, such as ./ray beside a script, is a namespace package without an origin.
    return spec is not None and spec.origin is not None
