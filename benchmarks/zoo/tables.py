"""The tables of the zoo, as Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from zoo.answers import NONE, REFUSED
from zoo.bases import UNEXPLAINED
from zoo.cells import Result
from zoo.plants import NOTHING

CAUSES = (
    *("placeholder", "misaligned", "retokenized", "log-base", "wrong-token", "copied", "temperature", "raw-logprobs"),
    *("truncated-sampling", "undelivered", "stale", "stale-cache", "non-finite", "routing", "quantized", "precision"),
    *(UNEXPLAINED, NONE, REFUSED),
)
SURE = 0.7
LARGE = 5_000
"""Number of tokens from which the goals hold."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(results: Sequence[Result]) -> float:
    return sum(result.right for result in results) / max(len(results), 1)


def by(results: Sequence[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)
    return groups


def percent(value: float) -> str:
    return f"{100 * value:.1f}%" if 0 < value < 0.1 else f"{100 * value:.0f}%"


def confusion(results: Sequence[Result]) -> str:
    """What was planted, and the first causes named, in numbers of cells."""
    groups = by(results, lambda result: result.truth)
    order = sorted(groups, key=lambda name: (CAUSES.index(name) if name in CAUSES else len(CAUSES), name))
    rows = [[truth, percent(share(groups[truth])), counted(groups[truth])] for truth in order]
    return table(["planted", "right", "first cause named, in numbers of data sets"], rows)


def counted(results: Sequence[Result], most: int | None = None) -> str:
    """The first causes named, the most frequent first."""
    count = Counter(result.answer.first for result in results)
    return ", ".join(f"{cause} {number}" for cause, number in count.most_common(most))


def reliability(results: Sequence[Result]) -> str:
    """Stated confidence of the first cause against the share that is right, in ten bins."""
    named = [result for result in results if result.answer.first not in (NONE, REFUSED)]
    groups = by(named, lambda result: f"{min(int(10 * result.answer.confidence), 9) / 10:.1f}")
    rows = [
        [
            f"{key} to {float(key) + 0.1:.1f}",
            str(len(groups[key])),
            f"{sum(result.answer.confidence for result in groups[key]) / len(groups[key]):.2f}",
            f"{share(groups[key]):.2f}",
        ]
        for key in sorted(groups)
    ]
    return table(["confidence", "answers", "mean confidence", "share right"], rows)


def false_alarms(results: Sequence[Result]) -> str:
    """Data without a fault: bases and sizes in which anything but the noise is named first, and how often."""
    rows = []
    for name, group in by(results, lambda result: result.cell.base.name).items():
        for tokens in sorted({result.cell.tokens for result in group}):
            part = [result for result in group if result.cell.tokens == tokens]
            wrong = [result for result in part if not result.right]
            noise, alarms = part[0].cell.base.noise or "-", percent(1 - share(part))
            if wrong:
                rows.append([name, noise, f"{tokens:,}", str(len(part)), alarms, counted(wrong)])
    return table(["base", "its noise", "tokens", "data sets", "false alarms", "named"], rows)


def variants(results: Sequence[Result]) -> str:
    """Share right by fault and size, over bases and strengths.

    The last rows have the names of all that are right at every size.
    """
    sizes = sorted({result.cell.tokens for result in results})
    rows, right = [], defaultdict(list)
    for name, group in by(results, lambda result: result.cell.plant.name).items():
        shares = tuple(percent(share(part)) if (part := _of_size(group, size)) else "-" for size in sizes)
        if all(result.right for result in group):
            right[shares].append(name)
            continue
        rows.append([name, *shares])
    rows += [["; ".join(names), *shares] for shares, names in right.items()]
    return table(["planted", *(f"{size:,}" for size in sizes)], rows)


def _of_size(results: Sequence[Result], tokens: int) -> list[Result]:
    return [result for result in results if result.cell.tokens == tokens]


def left_out(results: Sequence[Result]) -> str:
    """The last row has all causes of which nothing else was named."""
    groups = by(results, lambda result: result.cell.without)
    right = [cause for cause, group in groups.items() if all(result.right for result in group)]
    rows = []
    for cause, group in groups.items():
        if cause not in right:
            wrong = [result for result in group if not result.right]
            rows.append([cause, str(len(group)), percent(share(group)), counted(wrong, 4)])
    if right:
        rows.append([", ".join(right), str(sum(len(groups[cause]) for cause in right)), "100%", ""])
    return table(["left out", "data sets", "unexplained or in doubt", "named with confidence 0.5 and more"], rows)


def goals(found: Sequence[Result], clean: Sequence[Result], without: Sequence[Result]) -> str:
    large = [result for result in (*found, *clean) if result.cell.tokens >= LARGE]
    single = by([result for result in large if not result.cell.plant.pair], lambda result: result.truth)
    worst = min(single, key=lambda cause: share(single[cause]))
    answers = [*found, *clean]
    sure = [one for one in answers if one.answer.confidence >= SURE and one.answer.first not in (NONE, REFUSED)]
    quiet = [result for result in clean if result.cell.base.noise in ("", "precision")]
    alarms = [result for result in quiet if result.answer.first not in (NONE, "precision")]
    planted = [one for one in (*found, *without) if one.cell.plant is not NOTHING]
    faults = [one for one in planted if one.truth != "stale" or one.cell.plant.pair]
    unseen = [one for one in faults if one.answer.step.startswith("No fault shows")]
    rows = [
        ["first cause right, 5,000 tokens and more", ">= 95%", percent(share(large))],
        ["the worst cause", ">= 85%", f"{percent(share(single[worst]))} ({worst})"],
        ["wrong with confidence 0.7 and more", "<= 1%", f"{percent(1 - share(sure))} of {len(sure)} answers"],
        [
            "clean data of bases whose noise is rounding or none, called anything but `precision` or nothing",
            "<= 1%",
            percent(len(alarms) / max(len(quiet), 1)),
        ],
        ["cause left out: `unexplained`, or wrong with confidence below 0.5", ">= 90%", percent(share(without))],
        [
            '"Nothing has to be repaired" for a planted fault other than a lag that the file states',
            "0",
            f"{sum('Nothing has to be repaired' in one.answer.step for one in faults)} of {len(faults)} data sets",
        ],
        [
            '"No fault shows" for one: too weak beside the noise, or left out of the diagnosis',
            "",
            f"{len(unseen)} data sets, {sum(bool(one.cell.without) for one in unseen)} of them left out",
        ],
    ]
    return table(["", "goal", "reached"], rows)
