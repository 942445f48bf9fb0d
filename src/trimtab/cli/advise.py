"""`trimtab compare --advise RUN`: measures the mismatch of a run and reproduces it in the laboratory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.trainer.lab.match import Candidate, Kind, MismatchLevel, MismatchMatch

LABORATORY_LENGTH = 11
MIN_CONFIDENCE = 0.5
SEARCH_MESSAGE = (
    "Looking for this level in the laboratory: up to ten runs of one step, and one of 96 where lag is possible."
)
# Causes and the mechanisms that reproduce them; other causes are faults that must be fixed first.
MECHANISMS: dict[str, tuple[Kind, ...]] = {
    "stale": ("staleness",),
    "quantized": ("rounding", "noise"),
    "precision": ("noise", "rounding"),
}


@dataclass(frozen=True)
class Measure:
    """The mismatch of a run.

    length: mean response length in tokens. causes: those diagnosed with sufficient confidence. lagged: whether its
    sampler ever lagged. None: unknown.
    """

    level: MismatchLevel
    length: float | None
    causes: tuple[str, ...] = ()
    lagged: bool | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The mechanisms by which to reproduce the mismatch: those of the causes, or all if there is no cause."""
        from trimtab.trainer.lab.match import KINDS

        named = [kind for cause in self.causes for kind in MECHANISMS.get(cause, ())]
        return tuple(
            kind
            for kind in KINDS
            if (not named or kind in named) and not (kind == "staleness" and self.lagged is False)
        )

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(cause for cause in self.causes if cause not in MECHANISMS)


def measure(path: Path, columns: Mapping[str, str] | None = None) -> Measure:
    """Measures the mismatch of a run from its trajectory files, or from its metrics if it has none.

    columns: names in the files of another trainer by the names used here, as for `trimtab.diagnose`.
    """
    from trimtab.runs.reader import read_run

    run = read_run(path) if (path / "metrics.jsonl").is_file() else None
    lag = None if run is None else run.series("lag/max")[1]
    lagged = None if lag is None or not len(lag) else bool(lag.max() > 0)
    if run is not None and not columns and not any((path / "trajectories").glob("*.parquet")):
        _, lengths = run.series("length/mean")
        return Measure(_level(path, run.rows, "mismatch/"), float(lengths.mean()) if len(lengths) else None, (), lagged)
    from trimtab.diagnosis.pipeline import diagnose

    diagnosis = diagnose([path], columns=columns)
    origin, size = diagnosis.measured.origin, diagnosis.measured.size
    return Measure(
        level=_level(path, size.by_step or [size.mismatch]),
        length=origin.trained / origin.responses if origin.responses else None,
        causes=tuple(cause.name for cause in diagnosis.causes if cause.confidence >= MIN_CONFIDENCE),
        lagged=lagged,
    )


def _level(path: Path, rows: Sequence[Mapping[str, Any]], prefix: str = "") -> MismatchLevel:
    from trimtab.trainer.lab.match import MismatchLevel

    try:
        return MismatchLevel.of(rows, prefix)
    except TrimtabError as error:
        raise TrimtabError(f"{path}: {error}") from None


def describe_run(path: Path, measured: Measure) -> list[str]:
    """Returns lines that describe the measured mismatch."""
    level = measured.level
    lines = [f"{path}: k3 {level.k3:.2g} nats per token, ratios out to a factor of {_factor(level)} (1% and 99%)"]
    if measured.faults:
        lines.append(f"Fix first, no method corrects it: {', '.join(measured.faults)} (see trimtab diagnose {path}).")
    return lines


def describe_match(match: MismatchMatch, length: float | None) -> list[str]:
    """Returns lines that describe how close the laboratory is to the run, and the limits of the analogy."""
    lines = []
    for chosen in match.chosen:
        k3, tail = chosen.level.factors(match.target)
        fit, regime = chosen.level.quality(match.target), chosen.regime
        lines.append(f"{regime.name}: {regime.description}; k3 {k3:.2f} and tail {tail:.2f} times the run's: {fit}.")
    if len(match.chosen) > 1:
        lines.append("Both mechanisms fit in k3 and tail; trimtab diagnose or the run's lag tells which one applies.")
    if length is not None and length > 2 * LABORATORY_LENGTH:
        lines.append(
            f"Responses here have {LABORATORY_LENGTH} tokens, the run's {length:.0f} on average: "
            "methods with a ratio or a mask per sequence have much larger products there."
        )
    return lines


def caution(match: MismatchMatch, measured: Measure) -> str:
    """Returns the reservation about a recommendation; empty if the mismatch was matched and nothing must be fixed."""
    if measured.faults:
        return f"First fix what no method corrects: {', '.join(measured.faults)}."
    found = {chosen.level.quality(match.target) for chosen in match.chosen}
    worst = next((word for word in ("far", "rough") if word in found), None)
    return f"The match with the run is {worst}: take the ranking as a hint." if worst else ""


def describe_probe(candidate: Candidate) -> str:
    """Returns one line about a probe."""
    return f"  tried {candidate.regime.description}: k3 {candidate.level.k3:.2g}, factor {_factor(candidate.level)}"


def as_dict(match: MismatchMatch, measured: Measure) -> dict[str, Any]:
    """Returns target, causes, matches and probes for `--json`."""
    return {
        "target": asdict(measured.level),
        "causes": list(measured.causes),
        "matches": [
            {
                "regime": item.regime.name,
                "words": item.regime.description,
                "overrides": dict(item.regime.overrides),
                "quality": item.level.quality(match.target),
                **asdict(item.level),
            }
            for item in match.chosen
        ],
        "tried": [{"words": item.regime.description, **asdict(item.level)} for item in match.tried],
    }


def _factor(level: MismatchLevel) -> str:
    return f"{math.exp(level.tail):.3g}"
