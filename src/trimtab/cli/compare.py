"""`trimtab compare`: trains methods x regimes x seeds in the laboratory and ranks them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from trimtab.cli.diagnose import Columns, parse_columns
from trimtab.cli.output import Json, Sets, echo, print_json, usable_cores
from trimtab.errors import TrimtabError, require_extra

if TYPE_CHECKING:
    from trimtab.report.comparison_table import ComparisonTable
    from trimtab.runs.summary import RunSummary
    from trimtab.trainer.lab.experiment import ExperimentPlan
    from trimtab.trainer.lab.regimes import Regime
    from trimtab.trainer.lab.tuning import Choice

EXIT_RUNS_FAILED = 1
ADVICE_SEEDS = 3


class MultiValueCommand(TyperCommand):
    """Accepts `--methods a b` for `--methods a --methods b`, for the options of `MULTI_VALUE_OPTIONS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option, word in itertools.pairwise([*args, "-"]):
            # Without a value the defaults would apply.
            if option in MULTI_VALUE_OPTIONS and (not word or word.startswith("-")):
                raise TrimtabError(f"{option} names nothing: name at least one, or leave {option} out")
        expanded: list[str] = []
        option = ""
        for word in args:
            if word.startswith("-"):
                option = word if word in MULTI_VALUE_OPTIONS else ""
                expanded += [] if option else [word]
            else:
                expanded += [option, word] if option else [word]
        return super().parse_args(ctx, expanded)


MULTI_VALUE_OPTIONS = ("--methods", "--regimes", "--lengths")
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        metavar="METHOD...",
        help="Objectives, with keywords as in icepop:weight_max=3; your own as module:function.",
    ),
]
Regimes = Annotated[
    list[str] | None,
    typer.Option("--regimes", metavar="REGIME...", help="Kinds of mismatch; a + joins several: stale-32+int3."),
]

Tune = Annotated[
    int | None,
    typer.Option(
        "--tune",
        metavar="N",
        min=1,
        help="First tune each method in each regime with six settings and N other seeds; adds rows.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command(
        "compare",
        cls=MultiValueCommand,
        epilog="Example: [bold]trimtab compare --methods dapo token-tis --regimes on-policy stale-32 --seeds 3[/bold]",
    )(compare)


def compare(
    methods: Methods = None,
    regimes: Regimes = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Runs of each pair. Default: 5, with --advise 3.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where runs and results go. Default: runs/compare or runs/advise."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="`laboratory-long`, `laboratory-tools`, or a real model on quickstart's task. Default: laboratory.",
        ),
    ] = None,
    sets: Sets = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Runs at a time, one thread each. Default: all cores.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints of all runs.")] = False,
    advise: Annotated[
        Path | None,
        typer.Option("--advise", metavar="RUN", help="Rank methods at the mismatch of this run or trajectory file."),
    ] = None,
    tune: Tune = None,
    columns: Columns = None,
    page: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table there too.")] = None,
    as_json: Json = False,
) -> None:
    """Train methods under controlled mismatch, several seeds each, and rank them.

    The same command goes on where a stopped one ended.
    """
    require_extra("train", "trimtab compare")
    from trimtab.trainer.lab import experiment as lab
    from trimtab.trainer.lab.regimes import regime

    if page is not None and not page.absolute().parent.is_dir():
        raise TrimtabError(f"--markdown {page}: there is no folder {page.parent}; make it first")
    if advise is not None and (regimes or model):
        raise TrimtabError("--advise finds the regime for the laboratory model: leave --regimes and --model out")
    if advise is not None and tune:
        raise TrimtabError("--advise trains published settings: leave --tune out")
    if advise is None and columns:
        raise TrimtabError("--columns names columns of the file that --advise reads: leave it out")
    if advise is None:
        chosen, advice = [regime(name) for name in regimes or lab.REGIMES], None
    else:
        lab.plan_experiment(
            methods or lab.METHODS, [regime("on-policy")], 1, Path("unused"), sets=sets or ()
        )  # before the probes
        advice = _advice(advise, parse_columns(columns or []), as_json)
        chosen = advice.regimes
    folder = out or Path("runs/compare" if advise is None else "runs/advise")
    count = seeds or (lab.SEEDS if advise is None else ADVICE_SEEDS)
    plan = lab.plan_experiment(methods or lab.METHODS, chosen, count, folder, model=model, sets=sets or ())
    train = partial(_train, workers=workers or usable_cores(), keep=keep, as_json=as_json)
    tuned = None
    if tune is not None:
        plan, tuned = _tune(plan, tune, folder, train, model, sets or ())
    train(plan, folder)
    _show(plan, folder, page, as_json, advice, tuned)


@dataclass(frozen=True)
class Tuned:
    """The settings that were chosen, and lines that describe them and their budget."""

    choices: list[Choice]
    lines: list[str]


def _tune(
    plan: ExperimentPlan,
    seeds: int,
    out: Path,
    train: Callable[[ExperimentPlan, Path], dict[str, RunSummary]],
    model: str | None,
    sets: Sequence[str],
) -> tuple[ExperimentPlan, Tuned]:
    """Tunes the methods of a plan; returns it with the chosen settings as further rows."""
    from trimtab.trainer.lab import tuning

    candidates = tuning.plan_tuning(plan, seeds, out, model=model, sets=sets)
    choices = tuning.choose(candidates, train(candidates.plan, out / tuning.FOLDER))
    lines = tuning.describe(choices, candidates)
    return tuning.plan_comparison(plan, choices, out, model=model, sets=sets), Tuned(choices, lines)


@dataclass(frozen=True)
class Advice:
    """The regimes closest to a run, lines that describe them, a reservation, and the values for `--json`."""

    regimes: list[Regime]
    lines: list[str]
    caution: str
    values: dict[str, Any]


def _advice(run: Path, columns: dict[str, str], as_json: bool) -> Advice:
    from trimtab.cli import advise
    from trimtab.trainer.lab.match import match_mismatch

    measured = advise.measure(run, columns)
    run_lines = advise.describe_run(run, measured)

    def print_line(line: str) -> None:
        echo(line, err=as_json)

    for line in (*run_lines, advise.SEARCH_MESSAGE):
        print_line(line)
    match = match_mismatch(
        measured.level, measured.kinds, lambda candidate: print_line(advise.describe_probe(candidate))
    )
    match_lines = advise.describe_match(match, measured.length)
    for line in match_lines:
        print_line(line)
    regimes, caution = [item.regime for item in match.chosen], advise.caution(match, measured)
    return Advice(regimes, run_lines + match_lines, caution, advise.as_dict(match, measured))


def _train(plan: ExperimentPlan, out: Path, *, workers: int, keep: bool, as_json: bool) -> dict[str, RunSummary]:
    from trimtab.cli.display import show_runs
    from trimtab.trainer.lab.runner import run_experiment

    try:
        with show_runs(to_stderr=as_json) as observer:
            return run_experiment(plan, out, workers=workers, observer=observer, keep=keep)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("finished runs are kept; the same command goes on") from None


def _show(
    plan: ExperimentPlan, out: Path, page: Path | None, as_json: bool, advice: Advice | None, tuned: Tuned | None
) -> None:
    from trimtab.report.comparison_table import Recommendation, by_accuracy, legend, markdown, recommend, summarize
    from trimtab.report.experiment_page import write_experiment_page
    from trimtab.report.figure_files import accuracy_figure, write_figures
    from trimtab.runs.summary import read_table

    grid, order, verdict = summarize(read_table(out)), None, None
    page_texts: dict[str, Any] = {}
    if advice is not None:
        order, recommended = by_accuracy(grid), recommend(grid)
        verdict = Recommendation(recommended.method, " ".join(filter(None, [recommended.text, advice.caution])))
        page_texts = {"title": "Methods at the mismatch of a run", "notes": advice.lines, "verdict": verdict.text}
    if tuned is not None:
        page_texts = {"notes": tuned.lines}
    report = write_experiment_page(grid, out / "report.html", methods=order, **page_texts)
    figures = write_figures(lambda: accuracy_figure(grid, order or grid.methods), out / "accuracy")
    text = f"{markdown(grid, order)}\n\n{legend(grid)}\n"
    if tuned is not None:
        text += "\n" + "".join(f"- {line}\n" for line in tuned.lines)
    if page is not None:
        try:
            page.write_text(text if verdict is None else f"{verdict.text}\n\n{text}")
        except OSError as error:
            raise TrimtabError(f"cannot write {page}: {error.strerror}; choose another file") from None
    failed = [f"{row['regime']}/{row['method']} seed {row['seed']}: {row['error']}" for row in grid.failed]
    if as_json:
        recommendation = {} if verdict is None else {"recommendation": {"method": verdict.method, "text": verdict.text}}
        settings = {} if tuned is None else {"tuned": [_choice(choice) for choice in tuned.choices]}
        values = {} if advice is None else {"advice": advice.values}
        print_json(_json(grid, out, report) | {"figures": figures} | values | recommendation | settings)
    else:
        echo(text)
        for item in plan.skipped:
            echo(f"not trained: {item.method.spec} in {item.regime.name}: {item.reason}")
        echo(f"report: {report}\nfigures: {figures[0]}, {figures[1].name}\nresults: {out / 'results.parquet'}")
        if verdict is not None:
            echo(f"\n{verdict.text}")
    for line in failed:
        echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(EXIT_RUNS_FAILED)


def _choice(choice: Choice) -> dict[str, Any]:
    return {**asdict(choice), "settings": choice.settings}


def _json(grid: ComparisonTable, out: Path, report: Path) -> dict[str, Any]:
    scores = [
        {
            "method": method,
            "regime": regime,
            "accuracy": score.accuracy.mean,
            "low": score.accuracy.low,
            "high": score.accuracy.high,
            "rank": score.rank,
            "tied_with_best": score.is_best,
            "behind": score.behind.mean,
            "behind_low": score.behind.low,
            "behind_high": score.behind.high,
            "detectable": score.detectable,
            "collapsed": score.collapsed,
            "diverged": score.diverged,
            "seeds": score.seeds,
            "values": score.values,
        }
        for (method, regime), score in grid.scores.items()
    ]
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
