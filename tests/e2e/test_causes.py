"""Every cause of the zoo, planted in log-probs that were measured, is named first; of clean data the noise alone is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROUNDED = {"smollm2-int4", "smollm2-int8"}
"""Four bits outweigh most of what is planted; of eight bits the noise is no larger than that of bfloat16."""
BASES = sorted({file.name.partition(".")[0] for file in (BENCHMARKS / "zoo" / "bases").glob("*.parquet")} - ROUNDED)
PLANTED = {
    *("placeholder", "misaligned", "log-base", "copied", "non-finite", "unexplained"),
    *("misaligned + placeholder",),
}
"""What can be planted in any base."""
ALSO = {
    "laboratory-bfloat16": {"temperature", "wrong-token", "undelivered", "stale", "stale-cache", "stale + misaligned"},
    "laboratory-float32": {"raw-logprobs", "truncated-sampling", "truncated-sampling + misaligned"},
    "smollm2-bfloat16": {"temperature", "wrong-token", "retokenized", "undelivered", "stale", "stale-cache"},
}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Makes the modules of benchmarks/ importable here."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", BASES)
def test_what_is_planted_is_named_first(name: str, tmp_path: Path) -> None:
    from zoo.bases import measured_bases
    from zoo.cells import Cell, results
    from zoo.plants import NOTHING, PAIRS, SINGLE

    [base] = [one for one in measured_bases() if one.name == name]
    planted = [Cell(base, plant, 1, 5_000) for plant in (*SINGLE, *PAIRS)]
    clean = [Cell(base, NOTHING, 0, 600, seed) for seed in range(3)]
    found = list(results([*planted, *clean], tmp_path))
    wrong = {one.cell.plant.name: one.answer for one in found if not one.right}
    assert not wrong
    assert {one.cell.plant.cause for one in found} >= PLANTED | ALSO.get(name, set())
    if not base.noise:  # two float32 forwards: nothing at all is named
        assert {one.answer.names for one in found if one.cell.plant is NOTHING} == {()}
