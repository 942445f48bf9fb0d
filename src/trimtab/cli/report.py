"""`trimtab report`: the page of one run, or several runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import Json, print_json


def register(app: typer.Typer) -> None:
    app.command("report", epilog="Example: [bold]trimtab report runs/quickstart[/bold]")(report)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory; several, or a folder of them, to compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where the page goes. Default: beside the run, or above the first of several."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write report.html: one page that needs nothing else. Runs that differ in seed only form one band."""
    from trimtab.diagnostics.compare import find_runs, group_runs, write_comparison

    found = [run for path in runs for run in find_runs(path)]
    if found == runs and len(runs) == 1:
        from trimtab.diagnostics.report import write_report

        page = write_report(runs[0], out)
    else:
        # A folder of runs (a comparison's own) keeps its page inside, runs named one by one get it above the first.
        folder = runs[0] if len(runs) == 1 else runs[0].parent
        page = write_comparison(group_runs(found), (out or folder) / "report.html")
    if as_json:
        print_json({"report": page})
    else:
        typer.echo(f"report: {page}")
