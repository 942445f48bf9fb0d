"""The progress display of a run: a live panel on a terminal, one plain line per step otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.cli.console import PlainTextConsole
from trimtab.config import Config
from trimtab.intervals import wilson
from trimtab.training.observer import Moment, Observer

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48


@contextmanager
def observe(*, to_stderr: bool = False) -> Iterator[Observer]:
    """Yields a live display on a terminal and a plain one otherwise; restores the terminal at the end."""
    console = PlainTextConsole(stderr=to_stderr)
    display = LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
    try:
        yield display
    finally:
        display.close()


class PlainDisplay:
    """One line per event, for logs and pipes."""

    def __init__(self, console: PlainTextConsole) -> None:
        self.console = console
        self.total_steps = 0
        self.rewards: list[float] = []
        self.seconds: list[float] = []

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        self.total_steps = total_steps
        self.write_line(f"run        {run}")
        self.write_line(f"model      {config.model.path}")
        self.write_line(f"task       {config.task.name}")
        self.write_line(f"objective  {config.objective.name}")
        self.write_line("\n".join(f"  {line}" for line in equation.splitlines()))

    def phase(self, name: str, done: int, total: int) -> None:
        pass

    def step(self, metrics: Mapping[str, float | str]) -> None:
        self._add_values(metrics)
        cells = [f"{name} {value}" for name, value in figures(metrics)]
        self.write_line(
            "  ".join([f"step {int(number(metrics, 'step') or 0)}/{self.total_steps}", *cells, self._eta(metrics)])
        )

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        when = f"after step {moment}" if isinstance(moment, int) else f"{moment} training"
        self.write_line(f"held-out greedy accuracy on {task}, {when}: {value:.3f}")

    def message(self, text: str) -> None:
        self.write_line(text)

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        for line in closing_lines(summary):
            self.write_line(line)
        if report is not None:
            self.write_line(f"report: {report}")

    def close(self) -> None:
        """Restore the terminal."""

    def write_line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)  # not wrapped or cropped: paths must stay intact

    def _add_values(self, metrics: Mapping[str, float | str]) -> None:
        for key, history in (("reward/mean", self.rewards), ("time/step", self.seconds)):
            value = number(metrics, key)
            if value is not None:
                history.append(value)

    def _eta(self, metrics: Mapping[str, float | str]) -> str:
        """Returns the remaining time at the speed of the last eight steps; empty before the first step."""
        left, recent = self.total_steps - int(number(metrics, "step") or 0), self.seconds[-8:]
        return f"eta {duration(left * sum(recent) / len(recent))}" if left > 0 and recent else ""


class LiveDisplay(PlainDisplay):
    """A panel that is redrawn at every step; only messages scroll."""

    def __init__(self, console: PlainTextConsole) -> None:
        super().__init__(console)
        self._metrics: Mapping[str, float | str] = {}
        self._phase: tuple[str, int, int] = ("starting", 0, 0)
        self._live = Live(get_renderable=self._panel, console=console, refresh_per_second=4, transient=False)

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        self.total_steps = total_steps
        title = f"{config.objective.name} · {config.task.name} · {config.model.path}"
        body = Group(Text(equation), Text(f"\nrun directory: {run}", style="dim", overflow="fold"))
        self.console.print(Panel(body, title=Text(title), title_align="left", border_style="cyan"))
        self._live.start()

    def phase(self, name: str, done: int, total: int) -> None:
        self._phase = (name, done, total)
        self._live.start()

    def step(self, metrics: Mapping[str, float | str]) -> None:
        self._add_values(metrics)
        self._metrics = dict(metrics)
        self._live.refresh()

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        self._phase = ("done", 0, 0)
        self.close()
        lines = closing_lines(summary)
        if lines:
            self.console.print(Panel(Text("\n".join(lines)), title="result", title_align="left", border_style="green"))
        if report is not None:
            self.write_line(f"report: {report}")

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> RenderableType:
        name, done, total = self._phase
        step = int(number(self._metrics, "step") or 0)
        progress = Table.grid(padding=(0, 1))
        phase_text = f"{name} {done}/{total}" if total else name
        if self.total_steps:
            bar = ProgressBar(total=self.total_steps, completed=step, width=32)
            progress.add_row(f"step {step}/{self.total_steps}", bar, self._eta(self._metrics))
        rows: list[RenderableType] = [progress, Text(phase_text, style="dim")]
        if self.rewards:
            rows.append(Text.assemble(("reward ", "bold"), (sparkline(self.rewards, SPARK_WIDTH), "green")))
            rows.append(self._table())
        return Panel(Group(*rows), border_style="blue")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        shown = figures(self._metrics)
        for name, _ in shown:
            table.add_column(name, header_style="dim", justify="right", no_wrap=True)
        table.add_row(*(value for _, value in shown))
        return table


def figures(metrics: Mapping[str, float | str]) -> list[tuple[str, str]]:
    """Returns the metrics shown in the display as pairs of name and text; absent ones are left out."""
    shown: list[tuple[str, str]] = []
    for name, key, style in (
        ("reward", "reward/mean", "{:.3f}"),
        ("calls", "episode/calls", "{:.2f}"),
        ("tool errors", "episode/tool_errors", "{:.1%}"),
        ("void", "episode/void", "{:.1%}"),
        ("loss", "sft/loss", "{:.4f}"),
        ("k3", "mismatch/k3", "{:.1e}"),
        ("ESS", "mismatch/ess_token", "{:.3f}"),
    ):
        value = number(metrics, key)
        if value is not None:
            shown.append((name, style.format(value)))
    clips = [number(metrics, f"clip/{side}") for side in ("low", "high", "dual")]
    if any(value is not None for value in clips):
        shown.append(("clipped", f"{sum(value or 0.0 for value in clips):.2%}"))
    if "mismatch/k3" in metrics:  # a reinforcement learning step; without rejection rules the share is 0
        shown.append(("rejected", f"{number(metrics, 'reject/tokens') or 0.0:.2%}"))
    for name, phase in (("roll", "rollout"), ("train", "train")):
        speed = number(metrics, f"tokens_per_second/{phase}")
        if speed is not None:
            shown.append((f"{name} tok/s", f"{speed:,.0f}"))
    seconds = number(metrics, "time/step")
    if seconds is not None:
        shown.append(("s/step", f"{seconds:.1f}"))
    return shown


def number(metrics: Mapping[str, float | str], key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) else None


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the history as `width` bar characters, consecutive steps averaged, scaled to the range of the values."""
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Returns a duration as `42s`, `3m07s` or `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def closing_lines(summary: Mapping[str, float | str]) -> list[str]:
    """Returns one line per task with the accuracy before and after training, then all other entries of `summary`."""
    lines: list[str] = []
    for key, after in summary.items():
        task = key.removeprefix("eval/").removesuffix("/after")
        if key == f"eval/{task}/after" and isinstance(after, int | float):
            before, count = (number(summary, f"eval/{task}/{name}") for name in ("before", "problems"))
            values = [after] if before is None else [before, after]
            change = " -> ".join(f"{value:.3f}" for value in values)
            if count is None:
                lines.append(f"held-out greedy accuracy ({task}): {change}")
            else:
                intervals = " -> ".join("[{:.3f}, {:.3f}]".format(*wilson(value, count)) for value in values)
                lines.append(
                    f"held-out greedy accuracy ({task}, {count:.0f} problems): {change}, 95% interval {intervals}"
                )
    for key, value in summary.items():
        if not (key.startswith("eval/") and key.endswith(("/before", "/after", "/problems"))):
            lines.append(f"{key}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines
