"""Shared by the benchmarks: options by their defaults, sides that take turns, medians, and this process's memory."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def options_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with an option for each default, of its type; a list takes several values, False is a switch."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        settings: dict[str, Any] = {"default": default}
        if default is False:
            settings["action"] = "store_true"
        elif isinstance(default, list | tuple):
            settings |= {"nargs": "+", "type": type(default[0])}
        else:
            settings["type"] = type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    return parser


def alternate(
    sides: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Returns the seconds of each side in each round, in which all take turns; a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            begin = clock()
            run()
            seconds[name].append(clock() - begin)
    return {name: taken[1:] for name, taken in seconds.items()}


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def quartiles(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Returns the quartiles of the ratio, round by round: lower, median, upper."""
    low, middle, high = np.quantile(np.divide(ours, theirs), [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def median_interval(values: np.ndarray, reference: np.ndarray | None = None) -> tuple[float, float]:
    """Returns the 95 % bootstrap interval of the median over rounds, or of its ratio to that of `reference`."""
    picks = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    medians = np.median(values[picks], -1)
    if reference is not None:
        medians = medians / np.median(reference[picks], -1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def resident(*, peak: bool = False) -> int:
    """Returns the resident bytes of this process, now or at most since `reset_peak` (Linux)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
