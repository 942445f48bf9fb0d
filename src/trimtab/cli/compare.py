"""`trimtab compare`: trains methods x regimes x seeds in the laboratory and ranks them."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.output import Json, Sets, echo, print_json
from trimtab.runs.layout import REPORT

if TYPE_CHECKING:
    from trimtab.report.experiment_page import ComparisonTable
    from trimtab.runs.summary import RunSummary
    from trimtab.trainer.lab.experiment import ExperimentPlan
    from trimtab.trainer.lab.tuning import Choice

Methods = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METHOD...", help="Objectives, with keywords as in icepop:weight_max=3; your own as module:function."
    ),
]
Regimes = Annotated[
    list[str] | None, typer.Option(metavar="REGIME...", help="Kinds of mismatch; a + joins several: stale-32+int3.")
]

Tune = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="First tune each method in each regime with six settings and N other seeds; adds rows."
    ),
]


def compare(
    methods: Methods = None,
    regimes: Regimes = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each pair. Default: 5.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where runs and results go.")] = Path("runs/compare"),
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="`laboratory-long`, `laboratory-tools`, or a real model on quickstart's task. Default: laboratory.",
        ),
    ] = None,
    sets: Sets = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time, one thread each. Default: all cores.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints of all runs.")] = False,
    tune: Tune = None,
    as_json: Json = False,
) -> None:
    """Train methods under controlled mismatch, several seeds each, and rank them.

    The same command goes on where a stopped one ended.
    """
    from trimtab.runs.provenance import usable_cores
    from trimtab.trainer.lab import experiment as lab
    from trimtab.trainer.lab.regimes import regime

    chosen = [regime(name) for name in regimes or lab.REGIMES]
    plan = lab.plan_experiment(methods or lab.METHODS, chosen, seeds or lab.SEEDS, out, model=model, sets=sets or ())
    train = partial(_train, workers=workers or usable_cores(), keep=keep, as_json=as_json)
    choices: list[Choice] | None = None
    notes: list[str] = []
    if tune is not None:
        from trimtab.trainer.lab import tuning

        candidates = tuning.plan_tuning(plan, tune)
        choices = tuning.choose(candidates, train(candidates.plan))
        notes = tuning.describe(choices, candidates)
        plan = tuning.plan_comparison(plan, choices)
    train(plan)
    _show(plan, as_json, choices, notes)


def _train(plan: ExperimentPlan, *, workers: int, keep: bool, as_json: bool) -> dict[str, RunSummary]:
    from trimtab.trainer.display import RunsDisplay, open_display
    from trimtab.trainer.lab.runner import run_experiment

    try:
        with open_display(RunsDisplay, to_stderr=as_json) as observer:
            return run_experiment(plan, workers=workers, observer=observer, keep=keep)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("finished runs are kept; the same command goes on") from None


def _show(plan: ExperimentPlan, as_json: bool, choices: list[Choice] | None, notes: list[str]) -> None:
    from trimtab.report import experiment_page as page
    from trimtab.runs.summary import read_table

    out = plan.out
    grid = page.rank_methods(read_table(out))
    report = page.write_experiment_page(grid, out / REPORT, notes=notes)
    figures = page.write_accuracy_figure(grid, out / "accuracy")
    if as_json:
        data = _json(grid, out, report) | {"figures": figures}
        if choices is not None:
            data["tuned"] = [{**asdict(choice), "settings": choice.settings} for choice in choices]
        print_json(data)
    else:
        listed = "".join(f"- {line}\n" for line in notes)
        echo(f"{page.format_markdown(grid)}\n\n{page.describe_marks(grid)}\n" + (f"\n{listed}" if notes else ""))
        for item in plan.skipped:
            echo(f"not trained: {item.method.spec} in {item.regime.name}: {item.reason}")
        echo(f"report: {report}\nfigures: {figures[0]}, {figures[1].name}\nresults: {out / 'results.parquet'}")
    for row in grid.failed:
        echo(f"failed: {row['regime']}/{row['method']} seed {row['seed']}: {row['error']}", err=True)
    if grid.failed:
        raise typer.Exit(1)


def _json(grid: ComparisonTable, out: Path, report: Path) -> dict[str, Any]:
    scores = [{"method": m, "regime": r, **asdict(score)} for (m, r), score in grid.scores.items()]
    for score in scores:
        del score["rows"]
    refused = [{"method": m, "regime": r, "reason": reason} for (m, r), reason in grid.refused.items()]
    failed = [{key: row[key] for key in ("method", "regime", "seed", "error")} for row in grid.failed]
    return {
        "out": out,
        "results": out / "results.parquet",
        "report": report,
        "before": grid.before,
        "scores": scores,
        "refused": refused,
        "failed": failed,
    }
