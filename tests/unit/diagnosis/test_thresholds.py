"""Every number of a detector explains itself, and all of them are in one table (docs/reference-detection.md)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "detection.py"))


def test_the_table_has_every_threshold_with_its_meaning() -> None:
    rows = SCRIPT["thresholds"]()
    assert len(rows) > 130
    assert all(meaning for _, _, _, meaning, _ in rows)
    assert SCRIPT["markdown"]().count("\n") == len(rows) + 1


def test_every_number_of_a_detector_is_in_the_table_or_has_a_docstring() -> None:
    for path in SCRIPT["FILES"]:
        source = path.read_text(encoding="utf-8")
        numbers = set(re.findall(r"^([A-Z][A-Z0-9_]*) = -?[\d.]", source, flags=re.MULTILINE))
        listed = {match[1] for match in SCRIPT["LINE"].finditer(source)}
        described = set(re.findall(r'^([A-Z][A-Z0-9_]*) = .*\n"""', source, flags=re.MULTILINE))
        assert numbers - listed - described == set(), path.name
