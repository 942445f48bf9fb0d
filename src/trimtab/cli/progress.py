"""The progress of work in equal units: a bar on a terminal, and a line per finished run everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trimtab.cli.console import PlainTextConsole
from trimtab.cli.display import duration

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.runs.summary import RunSummary

PACE_SECONDS = 3600.0  # the remaining time follows the pace of the last hour


def progress_bar(console: PlainTextConsole) -> Progress:
    """Returns a bar with the share that is done and the remaining time; it is only drawn on a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    is_hidden = not console.is_terminal
    return Progress(*columns, console=console, disable=is_hidden, transient=True, speed_estimate_period=PACE_SECONDS)


@contextmanager
def show_runs(*, to_stderr: bool = False) -> Iterator[RunsProgress]:
    """Yields an observer of an experiment."""
    with progress_bar(PlainTextConsole(stderr=to_stderr)) as bar:
        yield RunsProgress(bar)


class RunsProgress:
    """The progress of an experiment, weighted by the cost of its runs."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("runs", total=None)
        self._steps: dict[str, int] = {}
        self._cost: dict[str, float] = {}
        self._share: dict[str, float] = {}  # of each run that is not finished

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, RunSummary]) -> None:
        from trimtab.lab.runner import cost

        self._steps = {name: config.trainer.steps for name, config in cells.items()}
        self._cost = {name: cost(config) for name, config in cells.items()}
        self._share = {name: 0.0 for name in cells if name not in done}
        self._bar.update(self._task, total=sum(self._cost[name] for name in self._share))
        self._print(f"{len(cells)} runs, one thread each" + (f"; {len(done)} of them finished before" if done else ""))

    def progress(self, name: str, step: int) -> None:
        self._advance(name, step / self._steps[name])

    def finished(self, name: str, result: RunSummary) -> None:
        from trimtab.lab.recipe_comparison import summary_line

        self._advance(name, 1.0)
        del self._share[name]
        left = self._bar.tasks[0].time_remaining
        count = f"{len(self._steps) - len(self._share)}/{len(self._steps)}"
        line = f"{count}  {name}  {summary_line(result)}  ({duration(result.seconds)})"
        self._print(line if left is None else f"{line}  about {duration(left)} left")

    def _advance(self, name: str, share: float) -> None:
        self._bar.advance(self._task, (share - self._share[name]) * self._cost[name])
        self._share[name] = share

    def _print(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)
