"""Every number of a detector explains itself, and all of them are in one table (docs/detection.md)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "detection.py"))


def test_the_table_of_thresholds_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "detection.md").read_text(encoding="utf-8")
    assert SCRIPT["written"](page) == page, "run: python docs/detection.py"
    assert len(SCRIPT["thresholds"]()) > 130


def test_every_number_of_a_detector_is_in_the_table_or_has_a_docstring() -> None:
    for path in SCRIPT["FILES"]:
        source = path.read_text(encoding="utf-8")
        numbers = set(re.findall(r"^([A-Z][A-Z0-9_]*) = -?[\d.]", source, flags=re.MULTILINE))
        listed = {match[1] for match in SCRIPT["LINE"].finditer(source)}
        described = set(re.findall(r'^([A-Z][A-Z0-9_]*) = .*\n"""', source, flags=re.MULTILINE))
        assert numbers - listed - described == set(), path.name
