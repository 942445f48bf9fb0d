"""Renders the events of `trimtab diagnose --watch` as lines of text."""

from __future__ import annotations

from trimtab.diagnosis.output.words import format_count, format_number
from trimtab.diagnosis.watch import StepReport, Watch
from trimtab.pages.numbers import number


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
