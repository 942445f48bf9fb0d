"""Watches a folder beside a running training: the mismatch of each new step, and an alarm where a bound is crossed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trimtab.diagnosis.measure.size import SizeSums
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.reading.counts import UNFINISHED
from trimtab.diagnosis.reading.file_formats import ALARM_FILE, find_files
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.runs.atomic import write_text
from trimtab.runs.metric_catalog import metric
from trimtab.text import format_count, format_number, json_value, number

UPPER, LOWER = ("k3", "ratio_q99"), ("ess_token", "ess_seq", "pearson", "ratio_q01")
"""Figures of a step that a bound may be set for, by the side on which they are unhealthy."""
DEFAULT_BOUNDS = ("k3", "ess_token")
PATIENCE = 10
"""Number of polls after which a file with an unfinished last line is read as it is: its writer was killed."""
_RANK = re.compile(r"(?P<step>.+)_rank_?\d+$")


@dataclass(frozen=True)
class Bound:
    """The largest (`is_upper`) or smallest healthy value of a figure, and what to do beyond it."""

    name: str
    value: float
    is_upper: bool
    action: str

    @property
    def side(self) -> str:
        """The side of the bound on which values are unhealthy."""
        return "above" if self.is_upper else "below"

    def crossed_by(self, value: float) -> bool:
        """Returns whether a value lies beyond the bound; one that is not a number does."""
        return not (value <= self.value if self.is_upper else value >= self.value)


@dataclass(frozen=True)
class StepReport:
    """The figures of one step, with the bounds they cross.

    left_out: responses and tokens of its files, by reason. unit: what is numbered, "step", or "call" for the files of a
    loss that knows no step and is called for each micro-batch.
    """

    figures: Mapping[str, float]
    crossed: tuple[Bound, ...]
    left_out: str = ""
    unit: str = "step"

    @property
    def step(self) -> str:
        first, last = int(self.figures["step"]), int(self.figures["step_last"])
        return str(first) if first == last else f"{first}-{last}"

    def as_dict(self) -> dict[str, object]:
        """Returns plain values, for JSON."""
        alarms = [
            {"figure": of.name, "value": self.figures[of.name], "bound": of.value, "side": of.side, "action": of.action}
            for of in self.crossed
        ]
        return {**self.figures, "unit": self.unit, "left_out": self.left_out, "alarms": alarms}


def parse_bounds(given: Sequence[str]) -> tuple[Bound, ...]:
    """Returns the bounds of `NAME=VALUE` texts added to the default ones; `NAME` takes the value of the metrics' table.

    `NAME=` removes a bound. Raises `TrimtabError` for an unknown name or a value that is not a number.
    """
    values: dict[str, float | None] = dict.fromkeys(DEFAULT_BOUNDS)
    for text in (part.strip() for word in given for part in word.split(",")):
        name, equals, value = (part.strip() for part in text.partition("="))
        if name not in UPPER + LOWER:
            raise TrimtabError(f"--bound: unknown figure {name!r}{did_you_mean(name, UPPER + LOWER)}")
        if equals and not value:
            values.pop(name, None)
            continue
        try:
            values[name] = float(value) if value else None
        except ValueError:
            raise TrimtabError(
                f"--bound {text!r}: {value!r} is not a number; write NAME=VALUE, for example k3=0.02"
            ) from None
    return tuple(_bound(name, value) for name, value in values.items())


def _bound(name: str, value: float | None) -> Bound:
    row, is_upper = metric(f"mismatch/{name}"), name in UPPER
    healthy = None if row is None else row.high if is_upper else row.low
    assert row is not None and healthy is not None  # noqa: PT018
    return Bound(name, healthy if value is None else value, is_upper, row.action)


@dataclass(eq=False)
class _StepFiles:
    """The files of one step: their state at the last poll, for how many polls it lasts, and that of the last report."""

    state: tuple[tuple[str, int, int], ...] = ()
    unchanged: int = 0
    reported: tuple[tuple[str, int, int], ...] = ()


@dataclass(eq=False)
class Watch:
    """A folder that is read again and again while a training writes into it; `poll` yields what is new.

    A file is read once it is the same at two polls and has no unfinished last line, so that files may be watched while
    they are written. A step is reported again when its files and figures change; `steps`, `calls` and `alarms` count it
    once.
    """

    folder: Path
    bounds: Sequence[Bound]
    framework: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    calls: int = 0
    alarms: int = 0
    _files: dict[str, _StepFiles] = field(default_factory=dict)
    _printed: dict[tuple[str, float], list[str]] = field(default_factory=dict)
    _crossed: set[tuple[str, float]] = field(default_factory=set)

    def poll(self) -> Iterator[StepReport | str]:
        """Yields a report of each step that is complete and new, or the reason why files cannot be read.

        `ALARM.json` is written before the report of a step that crosses a bound is yielded.
        """
        for name, files in self._by_step().items():
            known = self._files.setdefault(name, _StepFiles())
            state = tuple(_state(file) for file in files)
            known.unchanged = known.unchanged + 1 if state == known.state else 0
            known.state = state
            if not known.unchanged or state == known.reported:
                continue
            try:
                reports = self._read(files, is_last_try=known.unchanged >= PATIENCE)
            except TrimtabError as error:
                known.reported = state
                yield f"not read: {error}"
                continue
            if reports is None:
                continue
            known.reported = state
            for report in reports:
                key = (name, report.figures["step"])
                # Sums of a file that grows are rounded elsewhere than before.
                figures = [f"{value:.6g}" for value in report.figures.values()]
                if self._printed.get(key) == figures:
                    continue
                is_new = key not in self._printed
                self._printed[key] = figures
                self.steps += is_new and report.unit == "step"
                self.calls += is_new and report.unit == "call"
                if report.crossed:
                    self._crossed.add(key)
                    self.alarms = len(self._crossed)
                    content = json_value({"alarms_so_far": self.alarms, "latest": report.as_dict()})
                    write_text(self.folder / ALARM_FILE, json.dumps(content, indent=2) + "\n")
                yield report

    def _by_step(self) -> dict[str, list[Path]]:
        """Returns the files of the folder by step, in the order of their names; empty while there are none."""
        result: dict[str, list[Path]] = {}
        with suppress(TrimtabError):  # nothing has been written yet
            for file in find_files([self.folder]) if self.folder.is_dir() else ():
                result.setdefault(_step_name(file), []).append(file)
        return result

    def _read(self, files: Sequence[Path], *, is_last_try: bool) -> list[StepReport] | None:
        """Returns a report for each step in the files; None where they are still being written."""
        log = open_log(files, framework=self.framework, columns=self.columns)
        sums, responses, has_no_step = SizeSums(), 0, False
        digits = re.search(r"\d+", Path(_step_name(files[0])).name)
        step = int(digits[0]) if digits else len(self._files)
        for table in log.tables():
            has_no_step = table.step is None
            stepped = replace(table, step=np.full(table.responses, step)) if has_no_step else table
            sums.add(TrainedTokens.of(stepped, responses))
            responses += table.responses
        if log.counts.dropped[UNFINISHED] and not is_last_try:
            return None
        origin = log.summary()
        left_out = [f"{count} x {why}" for why, count in (*origin.dropped.items(), *origin.nonfinite.items())]
        rows = sorted(sums.by_step(), key=lambda row: row["step"])
        unit = "call" if has_no_step and files[0].name.startswith("call_") else "step"
        crossed = [tuple(bound for bound in self.bounds if bound.crossed_by(row[bound.name])) for row in rows]
        return [StepReport(row, of, "; ".join(left_out), unit) for row, of in zip(rows, crossed, strict=True)]


def _state(file: Path) -> tuple[str, int, int]:
    try:
        status = file.stat()
    except OSError:  # removed since it was listed
        return str(file), -1, -1
    return str(file), status.st_size, status.st_mtime_ns


def _step_name(file: Path) -> str:
    """Returns what the files of one step have in common: a folder, a name without its rank, or the file itself.

    `step_2/rank_0.jsonl`, `step_000002_rank_0.jsonl`, `call_000002_rank_0.jsonl`, `7_0.pt`.
    """
    if re.fullmatch(r"step[_-]?\d+", file.parent.name):
        return str(file.parent)
    if ranked := _RANK.match(file.stem):
        return str(file.parent / ranked["step"])
    ranked = re.fullmatch(r"(\d+)_\d+\.pt", file.name)
    return str(file.parent / ranked[1]) if ranked else str(file)


def opening_line(watch: Watch, every: float) -> str:
    """Returns the line before the first step: what is watched, which bounds hold, how to end it."""
    bounds = ", ".join(f"{bound.name} {bound.side} {bound.value:g}" for bound in watch.bounds) or "none"
    absent = "" if watch.folder.is_dir() else ", which does not exist yet"
    return f"watching {watch.folder}{absent}, every {every:g} s; alarm at: {bounds}; end with Ctrl-C"


def event_lines(event: StepReport | str) -> list[str]:
    """Returns the line of a step, then one for each bound it crosses; or the text of another event."""
    if isinstance(event, str):
        return [event]
    figures = event.figures
    left_out = f"; left out: {event.left_out}" if event.left_out else ""
    line = (
        f"{event.unit} {event.step}: k3 {format_number(figures['k3'])}, ratio {figures['ratio_q01']:.3g} to "
        f"{figures['ratio_q99']:.3g} (1% to 99%), mean {figures['ratio_mean']:.4f}, ESS {number(figures['ess_token'])} "
        f"of tokens, {number(figures['ess_seq'])} of sequences; {format_count(int(figures['sequences']), 'response')}, "
        f"{format_count(int(figures['tokens']), 'token')}{left_out}"
    )
    alarms = [
        f"ALARM {event.unit} {event.step}: {bound.name} {format_number(figures[bound.name])} is {bound.side} "
        f"{bound.value:g}: {bound.action}"
        for bound in event.crossed
    ]
    return [line, *alarms]


def last_line(watch: Watch) -> str:
    """Returns the line after the last step."""
    calls = f", {format_count(watch.calls, 'call')}" if watch.calls else ""
    return f"watched {format_count(watch.steps, 'step')}{calls}, {format_count(watch.alarms, 'alarm')}"
