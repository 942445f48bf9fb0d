"""Prints tables, bars, and the progress of runs and experiments with rich, for `cli` and `api`.

Texts are printed literally, with control characters escaped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from trimtab.intervals import wilson
from trimtab.runs.reader import CLIPS
from trimtab.text import clean, duration, short

if TYPE_CHECKING:
    from trimtab.runs.summary import RunSummary
    from trimtab.trainer.config import Config
    from trimtab.trainer.observer import Moment

Display = TypeVar("Display")
PACE_SECONDS = 3600.0  # the remaining time follows the pace of the last hour


class PlainTextConsole(Console):
    """A rich console that prints texts literally: without markup, emoji codes or escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments come from rich itself and move the cursor of a live display.
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


def terminal_width() -> int | None:
    """Returns the width of the terminal; None for a file or a pipe, where lines are not wrapped."""
    console = PlainTextConsole()
    return console.width if console.is_terminal else None


def progress_bar(console: PlainTextConsole) -> Progress:
    """Returns a progress bar with the finished share and the remaining time. It is drawn on a terminal only."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    is_hidden = not console.is_terminal
    return Progress(*columns, console=console, disable=is_hidden, transient=True, speed_estimate_period=PACE_SECONDS)


@contextmanager
def progress(first: str) -> Iterator[Callable[..., None]]:
    """Yields `Progress.update` for a bar on standard error: call it with keywords. first: the first description."""
    with progress_bar(PlainTextConsole(stderr=True)) as bar:
        yield partial(bar.update, bar.add_task(first, total=None))


@contextmanager
def open_display(kind: Callable[[Progress], Display], *, to_stderr: bool = False) -> Iterator[Display]:
    """Yields a `RunDisplay` or `RunsDisplay`, which prints lines and, on a terminal, draws a bar below them."""
    with progress_bar(PlainTextConsole(stderr=to_stderr)) as bar:
        yield kind(bar)


class RunDisplay:
    """Shows the progress of a run: one line for each event, and a bar of its steps with the current phase."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("starting", total=None)
        self.total_steps = 0
        self._seconds: deque[float] = deque(maxlen=8)  # of each of the last steps

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        self.total_steps = total_steps
        self._bar.update(self._task, total=total_steps or None)
        self.message(f"run        {run}")
        self.message(f"model      {config.model.path}")
        self.message(f"task       {config.task.name}")
        self.message(f"objective  {config.objective.name}")
        self.message("\n".join(f"  {line}" for line in equation.splitlines()))

    def phase(self, name: str, done: int, total: int) -> None:
        if name == "collect":
            self.total_steps = total  # a guard makes a run longer
            self._bar.update(self._task, total=total or None)
        self._bar.update(self._task, description=f"{name} {done}/{total}" if total else name)

    def step(self, metrics: Mapping[str, float | str]) -> None:
        step, seconds = int(number(metrics, "step") or 0), number(metrics, "time/step")
        self._bar.update(self._task, completed=step)
        cells = [f"{name} {value}" for name, value in figures(metrics)]
        left = self.total_steps - step
        if seconds is not None:
            self._seconds.append(seconds)
            if left > 0:
                cells.append(f"eta {duration(left * sum(self._seconds) / len(self._seconds))}")
        self.message("  ".join([f"step {step}/{self.total_steps}", *cells]))

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        when = f"after step {moment}" if isinstance(moment, int) else f"{moment} training"
        self.message(f"held-out greedy accuracy on {task}, {when}: {value:.3f}")

    def message(self, text: str) -> None:
        self._bar.console.print(text, soft_wrap=True)  # not wrapped or cropped: paths must stay intact

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        for line in closing_lines(summary):
            self.message(line)
        if report is not None:
            self.message(f"report: {report}")


class RunsDisplay:
    """Shows the progress of an experiment, weighted by the cost of its runs."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("runs", total=None)
        self._steps: dict[str, int] = {}
        self._cost: dict[str, float] = {}
        self._share: dict[str, float] = {}  # finished share of each run that is not done

    def planned(self, recipes: Mapping[str, Config], done: Mapping[str, RunSummary]) -> None:
        self._steps = {name: config.trainer.steps for name, config in recipes.items()}
        self._cost = {name: _cost(config) for name, config in recipes.items()}
        self._share = {name: 0.0 for name in recipes if name not in done}
        self._bar.update(self._task, total=sum(self._cost[name] for name in self._share))
        finished = f"; {len(done)} of them finished before" if done else ""
        self._print(f"{len(recipes)} runs, one thread each{finished}")

    def progress(self, name: str, step: int) -> None:
        self._advance(name, min(step / self._steps[name], 1.0))  # a guard makes a run longer

    def finished(self, name: str, result: RunSummary) -> None:
        self._advance(name, 1.0)
        del self._share[name]
        remaining = self._bar.tasks[0].time_remaining
        left = "" if remaining is None else f"  about {duration(remaining)} left"
        count = f"{len(self._steps) - len(self._share)}/{len(self._steps)}"
        values = (("reward", result.reward), ("held-out", result.accuracy))
        text = ", ".join(f"{key} {value:.2f}" for key, value in values if value is not None)
        text = text if result.status == "done" else f"{result.status}: {result.error}"
        self._print(f"{count}  {name}  {text}  ({duration(result.seconds)}){left}")

    def _advance(self, name: str, share: float) -> None:
        self._bar.advance(self._task, (share - self._share[name]) * self._cost[name])
        self._share[name] = share

    def _print(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)


def _cost(config: Config) -> float:
    """Returns the cost of a run relative to other runs of its experiment."""
    trainer = config.trainer
    # Measured with the laboratory model: an update on a response takes twice as long as sampling it.
    return trainer.steps * trainer.prompts * trainer.samples * (1 + 2 * trainer.epochs)


FIGURES = (
    ("reward", "reward/mean", "{:.3f}".format),
    ("calls", "episode/calls", "{:.2f}".format),
    ("tool errors", "episode/tool_errors", "{:.1%}".format),
    ("void", "episode/void", "{:.1%}".format),
    ("loss", "sft/loss", "{:.4f}".format),
    ("k3", "mismatch/k3", short),
    ("ESS", "mismatch/ess_token", "{:.3f}".format),
    ("clipped", "clipped", "{:.2%}".format),
    ("rejected", "rejected", "{:.2%}".format),
    ("roll tok/s", "tokens_per_second/rollout", "{:,.0f}".format),
    ("train tok/s", "tokens_per_second/train", "{:,.0f}".format),
    ("s/step", "time/step", "{:.1f}".format),
)
"""What a line shows of a step: name, key of the metric, and format."""


def figures(metrics: Mapping[str, float | str]) -> list[tuple[str, str]]:
    """Returns (name, text) of each metric that the line of a step shows; missing metrics are left out."""
    values = dict(metrics)
    if clips := [clip for key in CLIPS if (clip := number(metrics, key)) is not None]:
        values["clipped"] = sum(clips)
    if "mismatch/k3" in metrics:  # a reinforcement learning step; without rejection rules the share is 0
        values["rejected"] = number(metrics, "reject/tokens") or 0.0
    shown = ((name, number(values, key), style) for name, key, style in FIGURES)
    return [(name, style(value)) for name, value, style in shown if value is not None]


def number(metrics: Mapping[str, float | str], key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) else None


def closing_lines(summary: Mapping[str, float | str]) -> list[str]:
    """Returns one line per task with the accuracy before and after training, then all other entries of `summary`."""
    lines: list[str] = []
    for key, after in summary.items():
        task = key.removeprefix("eval/").removesuffix("/after")
        if key == f"eval/{task}/after" and isinstance(after, int | float):
            before, count = (number(summary, f"eval/{task}/{name}") for name in ("before", "problems"))
            values = [after] if before is None else [before, after]
            change = " -> ".join(f"{value:.3f}" for value in values)
            of, interval = task, ""
            if count is not None:
                intervals = " -> ".join("[{:.3f}, {:.3f}]".format(*wilson(value, count)) for value in values)
                of, interval = f"{task}, {count:.0f} problems", f", 95% interval {intervals}"
            lines.append(f"held-out greedy accuracy ({of}): {change}{interval}")
    for key, value in summary.items():
        if not (key.startswith("eval/") and key.endswith(("/before", "/after", "/problems"))):
            lines.append(f"{key}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines
