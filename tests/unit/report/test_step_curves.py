"""The figures of a comparison, by numbers: bands over seeds, and what is drawn of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trimtab.report.step_curves import (
    PANELS,
    Curve,
    Series,
    Spread,
    _draw_panel,
    combine_seeds,
    draw_curves,
    draw_swatch,
    line_style,
    smooth,
    thin_band,
)
from trimtab.runs.reader import Run


def series(steps: list[float], values: list[float]) -> Series:
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def test_a_band_covers_the_steps_all_seeds_have() -> None:
    result = combine_seeds([series([1, 2, 3, 4], [1, 2, 3, 4]), series([2, 4, 6], [4, 0, 9])])
    assert result.steps.tolist() == [2, 4]
    assert result.mean.tolist() == [3, 2]
    assert result.low.tolist() == [2, 0]
    assert result.high.tolist() == [4, 4]
    assert combine_seeds([series([1], [1]), series([2], [2])]) is None
    assert combine_seeds([]) is None


def test_a_thinned_band_contains_all_values() -> None:
    """1201 points in threes: the spike at step 500 and the dip at step 700 stay in the area."""
    steps = np.arange(1.0, 1202.0)
    low, high = np.zeros(1201), np.ones(1201)
    low[699], high[499] = -5.0, 7.0
    at, lowest, highest = thin_band(Spread(steps, np.arange(1201.0), low, high))
    assert at.tolist() == list(range(1, 1202, 3))
    assert (lowest.min(), highest.max()) == (-5.0, 7.0)
    assert thin_band(Spread(steps[:480], steps[:480], low[:480], high[:480]))[0].tolist() == steps[:480].tolist()


def test_a_moving_average_uses_no_later_values() -> None:
    """A step from 0 to 1 at point 501 of 1000 is not seen before it, and in full 50 points later."""
    short = series(list(range(399)), list(range(399)))
    assert smooth(short) is short
    jump = [0.0] * 500 + [1.0] * 500
    steps, values = smooth(series(list(range(1, 1001)), jump))
    assert len(steps) == 1000
    # The window at index i is values[i - 49 .. i]: a twentieth of 1000 are 50 points.
    assert values[:500].tolist() == [0.0] * 500
    assert values[500:503] == pytest.approx([1 / 50, 2 / 50, 3 / 50])
    assert values[549:] == pytest.approx(1.0)
    _, line = smooth(series(list(range(1, 401)), [2.0 * step for step in range(1, 401)]))
    assert line[:3] == pytest.approx([2, 3, 4]), "fewer points at the start"
    assert line[19:] == pytest.approx([2 * step - 19 for step in range(20, 401)]), "twenty points, so 9.5 steps late"


def draw_axes(series: list[tuple[np.ndarray, np.ndarray]], *, crowded: bool = False, averaged: bool = False):
    axes = Figure().add_subplot()
    draw_curves(axes, [Curve("_", series)], bands=not crowded, averaged=averaged)
    return axes


def values_of(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata(), dtype=np.float64)


def test_an_event_is_drawn_at_its_step_and_what_was_logged_beneath_the_average() -> None:
    """A reward that collapses at step 201 of 400, one seed and five."""
    steps = np.arange(1.0, 401.0)
    collapse = np.where(steps <= 200, 0.5, 0.0)
    for seeds in (1, 5):
        raw, average = draw_axes([(steps, collapse)] * seeds, averaged=True).lines
        assert values_of(raw).tolist() == collapse.tolist()
        assert values_of(average)[:200] == pytest.approx(0.5)
        assert raw.get_linewidth() < average.get_linewidth()
    for crowded in (False, True):
        axes = draw_axes([(steps, collapse)] * 2, crowded=crowded)
        assert (len(axes.lines), len(axes.collections)) == (1, not crowded)


def test_a_logarithmic_panel_shows_the_drop_of_a_single_step() -> None:
    """k3 right after a refresh: 1e-13 among values near 1."""
    steps = np.arange(1.0, 401.0)
    rows = [{"step": int(step), "mismatch/k3": 1e-13 if step == 33 else 0.5, "mismatch/tokens": 9} for step in steps]
    panel = next(panel for panel in PANELS if panel.title.startswith("Mismatch k3"))
    axes = Figure().add_subplot()
    _draw_panel(axes, panel, [[panel.read(Run(Path("a"), {}, rows))]])
    (line,) = axes.lines
    assert values_of(line)[32] == 1e-13


def test_twenty_groups_have_different_styles_also_in_the_legend() -> None:
    assert len({(color, str(style)) for color, style in map(line_style, range(36))}) == 36
    assert len({draw_swatch(index) for index in range(36)}) == 36
