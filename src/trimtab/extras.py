"""For what needs optional packages: which ones each extra brings, and the error where they are missing."""

from __future__ import annotations

import importlib.util
import platform
import sys

from trimtab.errors import TrimtabError

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
