"""Output shared by all commands: JSON, tables, and the default directory of a recipe's run."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the recipe; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """With `as_json`, what anybody else prints meanwhile, processes started here included, goes to standard error."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output; numbers JSON cannot hold (NaN, infinities) become null."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def print_pairs(pairs: Mapping[str, Any]) -> None:
    """`name  value` lines with aligned values."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        typer.echo(f"{name:<{width}}  {value}")


def run_directory(recipe: str, out: Path | None, configured: str | None) -> Path:
    """Where a run goes: `--out`, then the recipe's `out`, then `runs/<recipe>`."""
    if out is not None:
        return out
    if configured is not None:
        return Path(configured)
    path = Path(recipe)
    return Path("runs") / (path.parent.name if path.name == "config.toml" and path.parent.name else path.stem)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
