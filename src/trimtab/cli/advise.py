"""`trimtab compare --advise RUN`: the mismatch of a run, reproduced in the laboratory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.lab.match import Candidate, Kind, Level, Match

LABORATORY_LENGTH = 11
SURE = 0.5
SEARCH = "Looking for this level in the laboratory: up to ten runs of one step, and one of 96 where lag is possible."
# Causes that say by which mechanism a level should be reproduced; the others are faults to be mended first.
MECHANISMS: dict[str, tuple[Kind, ...]] = {
    "stale": ("staleness",),
    "quantized": ("rounding", "noise"),
    "precision": ("noise", "rounding"),
}


@dataclass(frozen=True)
class Measure:
    """The level of a run, its mean response length in tokens (None: unknown), the causes that were found, and whether
    its sampler lagged (None: unknown)."""

    level: Level
    length: float | None
    causes: tuple[str, ...] = ()
    lagged: bool | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """By which mechanisms to reproduce the level: those of the causes, all when nothing is known."""
        from trimtab.lab.match import KINDS

        named = [kind for cause in self.causes for kind in MECHANISMS.get(cause, ())]
        return tuple(
            kind
            for kind in KINDS
            if (not named or kind in named) and not (kind == "staleness" and self.lagged is False)
        )

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(cause for cause in self.causes if cause not in MECHANISMS)


def measure(path: Path) -> Measure:
    """From the trajectory files of a run, or from its metrics where it wrote none."""
    from trimtab.runs.reader import read_run

    run = read_run(path) if (path / "metrics.jsonl").is_file() else None
    lag = None if run is None else run.series("lag/max")[1]
    lagged = None if lag is None or not len(lag) else bool(lag.max() > 0)
    if run is not None and not any((path / "trajectories").glob("*.parquet")):
        _, lengths = run.series("length/mean")
        return Measure(_level(path, run.rows, "mismatch/"), float(lengths.mean()) if len(lengths) else None, (), lagged)
    from trimtab.diagnosis.pipeline import diagnose

    found = diagnose([path])
    origin, size = found.measured.origin, found.measured.size
    return Measure(
        level=_level(path, size.by_step or [size.mismatch]),
        length=origin.trained / origin.responses if origin.responses else None,
        causes=tuple(cause.name for cause in found.causes if cause.confidence >= SURE),
        lagged=lagged,
    )


def _level(path: Path, rows: Sequence[Mapping[str, Any]], prefix: str = "") -> Level:
    from trimtab.lab.match import Level

    try:
        return Level.of(rows, prefix)
    except TrimtabError as error:
        raise TrimtabError(f"{path}: {error}") from None


def before(path: Path, found: Measure) -> list[str]:
    """What was measured, in sentences."""
    level = found.level
    lines = [f"{path}: k3 {level.k3:.2g} nats per token, ratios out to a factor of {_factor(level)} (1% and 99%)"]
    if found.faults:
        lines.append(f"Mend first, no method repairs it: {', '.join(found.faults)} (see trimtab diagnose {path}).")
    return lines


def after(match: Match, length: float | None) -> list[str]:
    """How close the laboratory came and how far that carries, in sentences."""
    said = {
        "close": "close",
        "rough": "a rough match, read the ranking as a hint",
        "far": "no match, the laboratory has no such level and its ranking says little about this run",
    }
    lines = []
    for chosen in match.chosen:
        k3, tail = chosen.level.factors(match.target)
        fit = said[chosen.level.quality(match.target)]
        lines.append(f"{chosen.regime.name}: {chosen.words}; k3 {k3:.2f} and tail {tail:.2f} times the run's: {fit}.")
    if len(match.chosen) > 1:
        lines.append("Size and tail fit both; which one the run has decides: ask trimtab diagnose, or what its lag is.")
    if length is not None and length > 2 * LABORATORY_LENGTH:
        lines.append(
            f"Responses here have {LABORATORY_LENGTH} tokens, the run's {length:.0f} on average: "
            "methods with a ratio or a mask per sequence meet much larger products there."
        )
    return lines


def caution(match: Match, found: Measure) -> str:
    """What stands behind a recommendation, in one sentence; empty when the level was met and nothing is wrong."""
    if found.faults:
        return f"First mend what no method repairs: {', '.join(found.faults)}."
    worst = {chosen.level.quality(match.target) for chosen in match.chosen}
    if "far" in worst:
        return "The laboratory does not reach the level of this run: take it as a guess."
    return "The laboratory comes near the level of this run only: take it as a hint." if "rough" in worst else ""


def tried(candidate: Candidate) -> str:
    """One line for a probe."""
    return f"  tried {candidate.words}: k3 {candidate.level.k3:.2g}, factor {_factor(candidate.level)}"


def as_dict(match: Match, found: Measure) -> dict[str, Any]:
    """For `--json`."""
    return {
        "target": asdict(found.level),
        "causes": list(found.causes),
        "matches": [
            {
                "regime": item.regime.name,
                "words": item.words,
                "overrides": dict(item.regime.overrides),
                "quality": item.level.quality(match.target),
                **asdict(item.level),
            }
            for item in match.chosen
        ],
        "tried": [{"words": item.words, **asdict(item.level)} for item in match.tried],
    }


def _factor(level: Level) -> str:
    return f"{math.exp(level.tail):.3g}"
