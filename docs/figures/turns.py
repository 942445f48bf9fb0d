"""Mismatch over the turns of an episode, from the trajectories of runs of `laboratory-tools`.

    python docs/figures/turns.py turns.png int4=runs/int4-0,runs/int4-1 stale-8=runs/stale-8-0,runs/stale-8-1

A group is NAME=RUN,RUN,...; its runs differ in their seed. Prints a Markdown table of k3 and entropy (nats) by turn
and position of a call, as the mean over seeds with its interval (docs/laboratory.md), and draws k3.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from canvas import BLUE, GREEN, IMAGES, RC, VERMILLION, number, save, table

from trimtab.diagnosis.tokens import k3
from trimtab.intervals import seed_interval
from trimtab.runs.trajectories import read

PLACES = ("first position", "second position", "whole call")
TURNS = 3  # few episodes make a fourth call


def tokens(run: Path) -> np.ndarray:
    """Returns a row (turn, place in the turn, k3, entropy) of each position of a call, and of their sum."""
    rows = []
    for file in sorted((run / "trajectories").iterdir()):
        for one in read(file):
            completion = one.trajectory.completion
            assert one.logp_current is not None
            assert completion.entropy is not None
            log_ratio = np.asarray(one.logp_current, np.float64) - completion.logp_behavior
            for turn in range(int(completion.turn[-1])):  # those with a call
                here = np.flatnonzero((completion.turn == turn) & completion.sampled)
                values = np.stack([k3(log_ratio[here]), completion.entropy[here]])
                for place, value in enumerate([*values[:, :2].T, values.sum(1)]):
                    rows.append((turn, place, *value))
    return np.array(rows)


def cells(runs: list[np.ndarray], turn: int, place: int, column: int) -> list[float]:
    """Returns the mean of a column at a turn and place, for each run that has any."""
    chosen = [rows[(rows[:, 0] == turn) & (rows[:, 1] == place), column] for rows in runs]
    return [float(values.mean()) for values in chosen if len(values)]


def spread(values: list[float]) -> str:
    interval = seed_interval(values)
    assert interval is not None
    return f"{number(interval.mean)} [{number(interval.low)}, {number(interval.high)}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", help="file name in docs/images")
    parser.add_argument("groups", nargs="+", metavar="NAME=RUN,RUN,...")
    given = parser.parse_args()
    lines = []
    with plt.rc_context(RC):
        size = (4.2 * len(given.groups), 3.2)
        figure, panels = plt.subplots(1, len(given.groups), figsize=size, constrained_layout=True, squeeze=False)
        for axes, group in zip(panels[0], given.groups, strict=True):
            name, _, paths = group.partition("=")
            runs = [tokens(Path(path)) for path in paths.split(",")]
            for place, color in enumerate((BLUE, VERMILLION, GREEN)):
                k3 = [cells(runs, turn, place, 2) for turn in range(TURNS)]
                for turn, values in enumerate(k3):
                    axes.plot([turn + 1] * len(values), values, "o", color=color, alpha=0.35, markersize=4)
                    entropy = cells(runs, turn, place, 3)
                    count = sum(int(((rows[:, 0] == turn) & (rows[:, 1] == place)).sum()) for rows in runs)
                    lines.append([name, turn + 1, PLACES[place], count, spread(values), spread(entropy)])
                axes.plot(range(1, TURNS + 1), [np.mean(v) for v in k3], color=color, label=PLACES[place])
            axes.set(title=name, xlabel="turn", ylim=(0, None), xticks=range(1, TURNS + 1))
        panels[0, 0].set_ylabel("k3, nats")
        panels[0, -1].legend(fontsize=8)
        save(figure, IMAGES / given.image)
    print(table(["", "turn", "part of the call", "calls", "k3", "entropy"], lines))


if __name__ == "__main__":
    main()
