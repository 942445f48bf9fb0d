"""The progress of a grid: a panel that redraws itself on a terminal, one plain line per finished run elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.cli.display import duration

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.lab.result import Result

RECENT = 6


@contextmanager
def watch_grid(workers: int, *, to_stderr: bool = False) -> Iterator[PlainGrid]:
    """The display that fits where output goes. The terminal is given back as it was, whatever happens inside."""
    console = Console(stderr=to_stderr, highlight=False, soft_wrap=False)
    display = LiveGrid(console, workers) if console.is_terminal else PlainGrid(console, workers)
    try:
        yield display
    finally:
        display.close()


class Clock:
    """How long a grid takes: expected seconds of every run, corrected by how long the finished ones really took.

    `seconds` maps a cell to what it would take on the machine the expectation was measured on, `None` where there is no
    such measurement and only the proportions count: then nothing is said before the first run is done.
    """

    def __init__(self, seconds: Mapping[str, float], workers: int, *, measured: bool) -> None:
        self._expected, self._workers, self._measured = dict(seconds), workers, measured
        self._left = dict(seconds)
        self._spent = self._due = 0.0

    def progress(self, name: str, share: float) -> None:
        self._left[name] = self._expected[name] * (1 - share)

    def finished(self, name: str, seconds: float) -> None:
        self._left[name] = 0.0
        self._spent += seconds
        self._due += self._expected[name]

    def left(self) -> float | None:
        """Seconds of wall clock; None when there is nothing to go by."""
        if not self._measured and not self._due:
            return None
        pace = self._spent / self._due if self._due else 1.0
        rest = [seconds for seconds in self._left.values() if seconds]
        return pace * max(sum(rest) / self._workers, max(rest, default=0.0))


class PlainGrid:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console, workers: int) -> None:
        self.console, self.workers = console, workers
        self.total = self.done = self.failed = 0
        self.steps: dict[str, int] = {}
        self.recent: deque[str] = deque(maxlen=RECENT)
        self.running: dict[str, int] = {}
        self.clock = Clock({}, workers, measured=False)

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, Result]) -> None:
        from trimtab.lab.compare import cost
        from trimtab.lab.regimes import RECIPE

        self.total, self.done = len(cells), len(done)
        self.steps = {name: config.trainer.steps for name, config in cells.items()}
        todo = {name: cost(config) for name, config in cells.items() if name not in done}
        known = all(cells[name].model.path.startswith(RECIPE) for name in todo)
        self.clock = Clock(todo, min(self.workers, max(1, len(todo))), measured=known)
        kept = f", {len(done)} of them finished before" if done else ""
        left = self.clock.left()
        about = f", about {duration(left)}" if left else ""
        self.say(f"{self.total} runs{kept}; {self.workers} at a time, one thread each{about}")

    def progress(self, name: str, step: int) -> None:
        self.running[name] = step
        self.clock.progress(name, step / self.steps[name])

    def finished(self, name: str, result: Result) -> None:
        from trimtab.lab.grid import in_words

        self.running.pop(name, None)
        self.done += 1
        self.failed += result.status == "failed"
        self.clock.finished(name, result.seconds)
        self.ended(f"{name}  {in_words(result)}  ({duration(result.seconds)})")

    def ended(self, line: str) -> None:
        self.say(f"{self.done}/{self.total}  {line}  {self.remaining()}".rstrip())

    def remaining(self) -> str:
        left = self.clock.left()
        return f"{duration(left)} left" if left else ""

    def close(self) -> None:
        """Give the terminal back."""

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


class LiveGrid(PlainGrid):
    """Runs done, time left, what is running, and the last results."""

    def __init__(self, console: Console, workers: int) -> None:
        super().__init__(console, workers)
        self.started = time.monotonic()
        self._live = Live(get_renderable=self._panel, console=console, refresh_per_second=4, transient=True)

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, Result]) -> None:
        super().planned(cells, done)
        self._live.start()

    def ended(self, line: str) -> None:
        self.recent.append(line)

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self.total), completed=self.done, width=32)
        failed = f"{self.failed} failed" if self.failed else ""
        spent = f"{duration(time.monotonic() - self.started)} so far"
        head.add_row(f"runs {self.done}/{self.total}", bar, self.remaining(), spent, Text(failed, style="red"))
        now = [f"{name} {step}/{self.steps[name]}" for name, step in sorted(self.running.items())]
        rows: list[RenderableType] = [head, Text("\n".join(self.recent), overflow="ellipsis", no_wrap=True)]
        return Panel(
            Group(*rows, Text("  ".join(now), style="dim", overflow="ellipsis", no_wrap=True)), border_style="blue"
        )
