"""The progress of a comparison: a live panel on a terminal, one line per finished run elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.cli.console import PlainTextConsole
from trimtab.cli.display import duration

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.runs.summary import RunSummary

RECENT = 6
MIN_SHARE = 0.02  # of the work that must be done before an estimate is shown


@contextmanager
def show_progress(workers: int, *, to_stderr: bool = False) -> Iterator[PlainProgress]:
    """Yields a live display on a terminal and a plain one otherwise; restores the terminal at the end."""
    console = PlainTextConsole(stderr=to_stderr)
    display = LiveProgress(console, workers) if console.is_terminal else PlainProgress(console, workers)
    try:
        yield display
    finally:
        display.close()


class RemainingTime:
    """Estimates the remaining time of an experiment from its progress since the first step of any run.

    `work` is the amount of work of each run in any unit; only the proportions matter. There is no estimate before
    `MIN_SHARE` of the work is done: the speed of the machine under this load is measured, not assumed.
    """

    def __init__(self, work: Mapping[str, float], workers: int, now: Callable[[], float] = time.monotonic) -> None:
        self._work, self._workers, self._now = dict(work), workers, now
        self._left = dict(work)
        self._start: tuple[float, float] | None = None  # time of the first step, and the work that remained then

    def progress(self, name: str, share: float) -> None:
        self._update(name, self._work[name] * (1 - share))

    def finished(self, name: str) -> None:
        self._update(name, 0.0)

    def left(self) -> float | None:
        """Returns the remaining seconds of wall-clock time; None before there is an estimate."""
        if self._start is None:
            return None
        start_time, start_work = self._start
        remaining = [work for work in self._left.values() if work]
        finished, seconds = start_work - sum(remaining), self._now() - start_time
        if finished < MIN_SHARE * sum(self._work.values()) or seconds <= 0:
            return None
        return seconds / finished * max(sum(remaining), self._workers * max(remaining, default=0.0))

    def _update(self, name: str, left: float) -> None:
        self._left[name] = left
        if self._start is None:
            self._start = (self._now(), sum(self._left.values()))


class PlainProgress:
    """One line per event, for logs and pipes."""

    def __init__(self, console: PlainTextConsole, workers: int) -> None:
        self.console, self.workers = console, workers
        self.total = self.done = self.failed = 0
        self.steps: dict[str, int] = {}
        self.recent: deque[str] = deque(maxlen=RECENT)
        self.running: dict[str, int] = {}
        self.clock = RemainingTime({}, workers)
        self.estimated = False

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, RunSummary]) -> None:
        from trimtab.lab.runner import cost

        self.total, self.done = len(cells), len(done)
        self.steps = {name: config.trainer.steps for name, config in cells.items()}
        todo = {name: cost(config) for name, config in cells.items() if name not in done}
        self.clock = RemainingTime(todo, min(self.workers, max(1, len(todo))))
        finished_before = f", {len(done)} of them finished before" if done else ""
        when = "; the time left is estimated after the first steps" if todo else ""
        self.write_line(f"{self.total} runs{finished_before}; {self.workers} at a time, one thread each{when}")

    def progress(self, name: str, step: int) -> None:
        self.running[name] = step
        self.clock.progress(name, step / self.steps[name])
        if not self.estimated and (left := self.clock.left()) is not None:
            self.estimated = True
            self.estimate(left)

    def finished(self, name: str, result: RunSummary) -> None:
        from trimtab.lab.recipe_comparison import summary_line

        self.running.pop(name, None)
        self.done += 1
        self.failed += result.status == "failed"
        self.clock.finished(name)
        self.ended(f"{name}  {summary_line(result)}  ({duration(result.seconds)})")

    def ended(self, line: str) -> None:
        self.write_line(f"{self.done}/{self.total}  {line}  {self.remaining()}".rstrip())

    def estimate(self, left: float) -> None:
        self.write_line(
            f"about {duration(left)} to go at the pace of the first steps; corrected with every run that ends"
        )

    def remaining(self) -> str:
        left = self.clock.left()
        return f"{duration(left)} left" if left else ""

    def close(self) -> None:
        """Restore the terminal."""

    def write_line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


class LiveProgress(PlainProgress):
    """A panel with finished runs, remaining time, current steps, and the last results."""

    def __init__(self, console: PlainTextConsole, workers: int) -> None:
        super().__init__(console, workers)
        self.started = time.monotonic()
        self._live = Live(get_renderable=self._panel, console=console, refresh_per_second=4, transient=True)

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, RunSummary]) -> None:
        super().planned(cells, done)
        self._live.start()

    def ended(self, line: str) -> None:
        self.recent.append(line)

    def estimate(self, left: float) -> None:
        """The panel always shows the remaining time."""

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> RenderableType:
        header = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self.total), completed=self.done, width=32)
        failed = f"{self.failed} failed" if self.failed else ""
        elapsed = f"{duration(time.monotonic() - self.started)} so far"
        header.add_row(f"runs {self.done}/{self.total}", bar, self.remaining(), elapsed, Text(failed, style="red"))
        current = [f"{name} {step}/{self.steps[name]}" for name, step in sorted(self.running.items())]
        rows: list[RenderableType] = [header, Text("\n".join(self.recent), overflow="ellipsis", no_wrap=True)]
        return Panel(
            Group(*rows, Text("  ".join(current), style="dim", overflow="ellipsis", no_wrap=True)), border_style="blue"
        )
