"""`trimtab export`: writes a run's model as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import Json, print_json


def register(app: typer.Typer) -> None:
    app.command("export", epilog="Example: [bold]trimtab export runs/quickstart my-model[/bold]")(export)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the model.")],
    which: Annotated[str, typer.Option("--which", help="`last` or `best` checkpoint.")] = "last",
    as_json: Json = False,
) -> None:
    """Write the trained model as a folder that transformers loads (config, tokenizer, safetensors)."""
    from trimtab.training.export import export as write

    write(run, folder, which)
    if as_json:
        print_json({"model": folder})
    else:
        typer.echo(f"model: {folder}")
