"""`trimtab report`: the page of one run, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import Json, echo, print_result
from trimtab.runs.layout import REPORT


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory; several, or a folder of them, to compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the page goes. Default: into the run, or above the first of several."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write report.html: one page that needs nothing else. Runs that differ in seed only form one band."""
    from trimtab.report.groups import find_runs

    run_paths = [run for path in runs for run in find_runs(path)]
    if run_paths == runs and len(runs) == 1:
        from trimtab.report.health import as_data, health
        from trimtab.report.run_report import write_report
        from trimtab.runs.reader import read_run

        run = read_run(runs[0])
        data = {"report": write_report(run, out), "verdict": as_data(health(run)), "provenance": run.starts}
    else:
        from trimtab.report import comparison

        # One folder of runs: the page goes into it. Several paths: the page goes into the parent of the first one.
        folder = out or (runs[0] if len(runs) == 1 else runs[0].parent)
        found = comparison.compare(run_paths)
        data = {"report": comparison.write_page(found, folder / REPORT), **comparison.as_data(found)}
    verdict = data.get("verdict", {"text": "", "note": ""})
    lines = filter(None, (verdict["text"], verdict["note"], f"report: {data['report']}"))
    print_result(as_json, data, "\n".join(lines))
    for line in () if as_json else data.get("warnings", ()):
        echo(f"note: {line}", err=True)
