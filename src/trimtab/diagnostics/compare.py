"""Several runs side by side: objectives as colors, seeds as thin lines, in one figure and one page."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trimtab.diagnostics.page import equation_of, render, short, write
from trimtab.diagnostics.plots import CYCLE, RC, STYLES, finish, log_scale, to_svg
from trimtab.diagnostics.read import Run, read_run
from trimtab.errors import TrimtabError

PICTURE = "comparison.png"
Series = tuple[np.ndarray, np.ndarray]


def group_runs(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Run directories by what they have in common: everything but seed and place.

    The label is the objective's name; where several groups share it, the first run's directory is added.
    """
    groups: list[tuple[Mapping[str, Any], list[Run]]] = []
    for run in map(read_run, paths):
        recipe = {key: value for key, value in run.config.items() if key not in ("seed", "out")}
        same = next((runs for known, runs in groups if known == recipe), None)
        if same is None:
            groups.append((recipe, [run]))
        else:
            same.append(run)
    names = [recipe.get("objective", {}).get("name", "run") for recipe, _ in groups]
    labelled = {}
    for name, (_, runs) in zip(names, groups, strict=True):
        label = name if names.count(name) == 1 else f"{name} ({runs[0].path})"
        labelled[label] = [run.path for run in runs]
    return labelled


def find_runs(path: Path) -> list[Path]:
    """`path` itself when it is a run, else the runs up to two folders below it (as a comparison leaves them)."""
    if (path / "config.toml").is_file():
        return [path]
    found = sorted({file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/config.toml")})
    if not found:
        raise TrimtabError(f"{path} holds no run (config.toml is missing): check the path")
    return found


def write_comparison(runs: Mapping[str, Sequence[Path]], path: Path) -> Path:
    """Write the page `path` and `comparison.png` beside it. `runs` maps a label to the run directories of its seeds.

    Raises `TrimtabError` when there is nothing to compare or a run's files are missing, empty or damaged.
    """
    read = {label: [read_run(Path(run)) for run in folders] for label, folders in runs.items() if folders}
    if not read:
        raise TrimtabError("nothing to compare: name at least one run directory")
    picture = path.parent / PICTURE
    write(picture, _png(read))
    first = next(iter(read.values()))[0]
    values = {
        "title": " against ".join(read),
        "description": first.config.get("description", ""),
        "facts": _facts(read),
        # Not escaped: matplotlib made them and escapes every label itself.
        "panels": list(zip(PANELS, map(Markup, _svgs(read)), strict=True)),
        "picture": PICTURE,
        "rows": [row for label, group in read.items() for row in _rows(label, group, path.parent)],
        "equations": [(label, equation_of(group[0].config, group[0].last)) for label, group in read.items()],
    }
    return write(path, render("comparison.html.j2", values).encode())


def held_out(runs: Mapping[str, Sequence[Path]]) -> dict[str, float | str]:
    """Held-out greedy accuracy after training, by label: each seed, and their mean where there are several."""
    summary: dict[str, float | str] = {}
    for label, folders in runs.items():
        values = [_numbers(read_run(Path(folder)))[1] for folder in folders]
        each = "  ".join("not measured" if math.isnan(value) else f"{value:.3f}" for value in values)
        mean = f"  (mean {np.mean(values):.3f})" if len(values) > 1 and not math.isnan(sum(values)) else ""
        summary[f"{label}, held-out accuracy after"] = each + mean
    return summary


def _facts(read: Mapping[str, Sequence[Run]]) -> list[tuple[str, str]]:
    """What all runs share; a fact that differs between them is left to the table."""
    configs = [run.config for group in read.values() for run in group]
    facts = [("runs", str(len(configs)))]
    for name, section, key in (
        ("model", "model", "path"),
        ("task", "task", "name"),
        ("lr", "optim", "lr"),
        ("sync_every", "trainer", "sync_every"),
    ):
        values = {str(config.get(section, {}).get(key)) for config in configs}
        if len(values) == 1 and values != {"None"}:
            facts.append((name, values.pop()))
    return facts


def _rows(label: str, group: Sequence[Run], folder: Path) -> list[dict[str, Any]]:
    numbers = [_numbers(run) for run in group]
    rows = []
    for index, (run, found) in enumerate(zip(group, numbers, strict=True)):
        report = run.path / "report.html"
        rows.append(
            {
                "label": label if index == 0 else "",
                "name": run.path.name,
                "link": os.path.relpath(report, folder) if report.exists() else "",
                "cells": [str(run.config.get("seed", "–")), *_cells(found), str(run.last["step"])],
                "mean": False,
            }
        )
    if len(group) > 1:
        means = _cells([float(np.mean(column)) for column in zip(*numbers, strict=True)])
        rows.append({"label": "", "name": f"mean of {len(group)}", "link": "", "cells": ["", *means, ""], "mean": True})
    return rows


def _numbers(run: Run) -> tuple[float, ...]:
    """Held-out accuracy before, after, best; reward over the last tenth; median k3; lowest ESS. NaN: not measured."""
    found = next(iter(run.accuracy().values()), None)
    before, after = (found.before, found.after) if found else (None, None)
    best = float(found.values.max()) if found and len(found.values) else None
    _, reward = run.series("reward/mean")
    _, k3 = run.series("mismatch/k3")
    _, ess = run.series("mismatch/ess_token")
    last = float(reward[-max(len(reward) // 10, 1) :].mean()) if len(reward) else None
    middle = float(np.median(k3)) if len(k3) else None
    lowest = float(ess.min()) if len(ess) else None
    return tuple(math.nan if value is None else value for value in (before, after, best, last, middle, lowest))


def _cells(numbers: Sequence[float]) -> list[str]:
    """Three digits for what lies in [0, 1]; k3, the fifth, spans decades."""
    return [
        "–" if math.isnan(value) else short(value) if index == 4 else f"{value:.3f}"
        for index, value in enumerate(numbers)
    ]


PANELS = ("Training reward", "Held-out greedy accuracy", "Mismatch k3, nats per token")


def _svgs(read: Mapping[str, Sequence[Run]]) -> list[str]:
    """The panels one by one, so that a phone can stack them."""
    drawn = []
    for panel, title in enumerate(PANELS):
        with mpl.rc_context(RC):
            figure = Figure(figsize=(4.2, 3.1), layout="constrained")
            axes = figure.add_subplot()
            _panel(axes, panel, read)
            finish(figure, axes)
            drawn.append(to_svg(figure, title))
    return drawn


def _png(read: Mapping[str, Sequence[Run]]) -> bytes:
    """All panels in one picture on white."""
    buffer = io.BytesIO()
    with mpl.rc_context({**RC, "figure.facecolor": "white", "savefig.facecolor": "white"}):
        figure = Figure(figsize=(11, 3.5), layout="constrained")
        axes = figure.subplots(1, len(PANELS))
        for panel, one in enumerate(axes):
            _panel(one, panel, read)
            one.set_title(PANELS[panel], fontsize=10, loc="left")
            one.set_xlabel("step")
            one.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 4), fontsize=9)
        figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _panel(axes: Axes, panel: int, read: Mapping[str, Sequence[Run]]) -> None:
    for index, (label, group) in enumerate(read.items()):
        color, style = CYCLE[index % len(CYCLE)], STYLES[index % len(STYLES)]
        series = [_series(run, panel) for run in group]
        _seeds(axes, series, color, style, label, marker="o" if panel == 1 else None)
    if panel == 1:
        axes.set_ylim(0, 1)
    elif panel == 2 and axes.lines:
        log_scale(axes)


def _series(run: Run, panel: int) -> Series:
    if panel == 0:
        return run.series("reward/mean")
    if panel == 1:
        found = next(iter(run.accuracy().values()), None)
        return (found.steps, found.values) if found else (np.empty(0), np.empty(0))
    # A logarithmic axis has no place for 0, which k3 reaches only when nothing was measured.
    steps, values = run.series("mismatch/k3")
    return steps[values > 0], values[values > 0]


def _seeds(axes: Axes, series: Sequence[Series], color: str, style: Any, label: str, marker: str | None = None) -> None:
    """Each seed as a thin line; over the steps all of them have, their mean and range."""
    series = [item for item in series if len(item[0])]
    if not series:
        return
    for steps, values in series:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.55 if len(series) > 1 else 0)
    common = series[0][0]
    for steps, _ in series[1:]:
        common = np.intersect1d(common, steps)
    table = np.stack([values[np.isin(steps, common)] for steps, values in series])
    if len(series) > 1:
        axes.fill_between(common, table.min(axis=0), table.max(axis=0), color=color, alpha=0.15, linewidth=0)
    axes.plot(
        common, table.mean(axis=0), color=color, linestyle=style, linewidth=2, marker=marker, markersize=4, label=label
    )
