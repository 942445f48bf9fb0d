"""The progress of a comparison: a live panel on a terminal, one line per finished run elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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
    from trimtab.lab.results import Result

RECENT = 6
ENOUGH = 0.02  # of the work; before that start-up and chance decide the pace


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
    """How much longer a grid takes, from how fast its runs have moved since the first step of any.

    `work` says how much each run has to do, in any unit; only the proportions count. Nothing is said before `ENOUGH` of
    it was done: how fast a machine is, alone and with so many runs beside each other, is measured and never assumed.
    """

    def __init__(self, work: Mapping[str, float], workers: int, now: Callable[[], float] = time.monotonic) -> None:
        self._work, self._workers, self._now = dict(work), workers, now
        self._left = dict(work)
        self._begun: tuple[float, float] | None = None  # when the first step was done, and the work that was left then

    def progress(self, name: str, share: float) -> None:
        self._moved(name, self._work[name] * (1 - share))

    def finished(self, name: str) -> None:
        self._moved(name, 0.0)

    def left(self) -> float | None:
        """Seconds of wall clock; None while there is too little to go by."""
        if self._begun is None:
            return None
        since, before = self._begun
        rest = [work for work in self._left.values() if work]
        done, seconds = before - sum(rest), self._now() - since
        if done < ENOUGH * sum(self._work.values()) or seconds <= 0:
            return None
        return seconds / done * max(sum(rest), self._workers * max(rest, default=0.0))

    def _moved(self, name: str, left: float) -> None:
        self._left[name] = left
        if self._begun is None:
            self._begun = (self._now(), sum(self._left.values()))


class PlainGrid:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console, workers: int) -> None:
        self.console, self.workers = console, workers
        self.total = self.done = self.failed = 0
        self.steps: dict[str, int] = {}
        self.recent: deque[str] = deque(maxlen=RECENT)
        self.running: dict[str, int] = {}
        self.clock = Clock({}, workers)
        self.estimated = False

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, Result]) -> None:
        from trimtab.lab.runner import cost

        self.total, self.done = len(cells), len(done)
        self.steps = {name: config.trainer.steps for name, config in cells.items()}
        todo = {name: cost(config) for name, config in cells.items() if name not in done}
        self.clock = Clock(todo, min(self.workers, max(1, len(todo))))
        kept = f", {len(done)} of them finished before" if done else ""
        when = "; the first steps will tell how long they take" if todo else ""
        self.say(f"{self.total} runs{kept}; {self.workers} at a time, one thread each{when}")

    def progress(self, name: str, step: int) -> None:
        self.running[name] = step
        self.clock.progress(name, step / self.steps[name])
        if not self.estimated and (left := self.clock.left()) is not None:
            self.estimated = True
            self.estimate(left)

    def finished(self, name: str, result: Result) -> None:
        from trimtab.lab.recipe_comparison import in_words

        self.running.pop(name, None)
        self.done += 1
        self.failed += result.status == "failed"
        self.clock.finished(name)
        self.ended(f"{name}  {in_words(result)}  ({duration(result.seconds)})")

    def ended(self, line: str) -> None:
        self.say(f"{self.done}/{self.total}  {line}  {self.remaining()}".rstrip())

    def estimate(self, left: float) -> None:
        self.say(f"about {duration(left)} to go at the pace of the first steps; corrected with every run that ends")

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

    def estimate(self, left: float) -> None:
        """The panel shows what is left all the time."""

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
