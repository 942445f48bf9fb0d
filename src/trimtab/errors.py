"""Exceptions, warnings and findings for users: one-line messages that state what is wrong and its remedy."""

from __future__ import annotations

import difflib
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pydantic import ValidationError

# Used in messages where it is not known whether the run has written a checkpoint.
RESUME = "continue with --resume (from the last checkpoint, or from the beginning if none was written)"

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
"""What an extra brings beyond torch, numpy and jaxtyping, by the names that are imported."""


class TrimtabError(ValueError):
    """An error that the user can correct. The command line prints it as one line and exits with code 2."""


class DivergedError(TrimtabError):
    """The trained policy is no longer finite. An error for a single run, a result for a run of an experiment."""


class EngineDeadError(TrimtabError):
    """An engine died or became unreachable during a call; `Engine.restart` restarts it."""


class Stopped(KeyboardInterrupt):
    """The process was stopped by Ctrl-C or SIGTERM; `signal` is the signal number."""

    def __init__(self, signal: int) -> None:
        super().__init__()
        self.signal = signal


Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, of an installation (`doctor`), of data (`diagnose`) or of a run."""

    status: Status  # ok, note (may matter) or fail (must be repaired)
    name: str  # what was checked
    detail: str  # what was found
    next_step: str = ""  # what to do about it; empty if nothing

    @property
    def text(self) -> str:
        return f"{self.detail}; {self.next_step}" if self.next_step else self.detail


class TrimtabWarning(UserWarning):
    """A problem that the user should know about and that does not stop the program."""


def did_you_mean(word: str, known: Iterable[str], listing: str = "") -> str:
    """Returns ` (did you mean ...?)` with up to three close words of `known`, or the whole list when none is close.

    listing: replaces the whole list, as "`trimtab recipes` lists them".
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f" (did you mean {' or '.join(repr(name) for name in close)}?)"
    return f" ({listing or 'known: ' + ', '.join(names)})"


def neighbors(path: Path) -> str:
    """Returns ` (did you mean ...?)` with files and folders beside a missing path that have a similar name, or ``."""
    names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, set(names) - {path.name}, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(str(path.parent / name) for name in close)}?)" if close else ""


def without_credentials(text: str) -> str:
    """Returns text without user names and passwords in its addresses, each of which ends at the next white space."""
    return re.sub(r"://\S*@", "://***@", text)


def address_problem(key: str, url: object, instead: str, *, path: bool = False) -> str | None:
    """Returns what is wrong with the address of a server that a recipe names, None if nothing or if it is not a text.

    instead: what to do where it holds a user name or a password. path: whether it may have a path.
    """
    if not isinstance(url, str):  # the owner of the key refuses it
        return None
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is not a number up to 65535, or half a bracket
        valid = False
    else:
        if "@" in parts.netloc:
            shown = re.sub("(?s)://.*@", "://***@", url)  # a password may hold white space
            return f"{key} holds a user name or a password ({shown}), which a run would write to its files: {instead}"
        valid = valid and (path or (parts.path in ("", "/") and not parts.query and not parts.fragment))
    if valid and url.isprintable() and " " not in url:
        return None
    return f"{key}: {without_credentials(url)!r} is not the base URL of a server: write it like http://127.0.0.1:8000"


def require_extra(extra: str, what: str, otherwise: str = "") -> None:
    """Raises `TrimtabError` with what installs it if a package of an extra is not installed or Python is too old.

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


def explain(error: ValidationError, known: Iterable[str]) -> str:
    """Returns the first pydantic error for the options of a named section in one line; `known` are its options."""
    # Unknown options come first: a misspelled required option would otherwise be reported as missing.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    option = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown option {option!r}{did_you_mean(option, known)}"
    if first["type"] == "missing":
        return f"option {option!r} is missing; give it a value"
    message = first["msg"].removeprefix("Value error, ")
    return f"{option}: {message}, got {first['input']!r}" if option else message
