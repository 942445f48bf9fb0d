"""Prints the thresholds of all detectors, which the site appends to docs/reference-detection.md (docs/site.py).

A threshold is a line `NAME = value  # meaning [what it was set on]` of a detector.
"""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "trimtab" / "diagnosis"
FILES = (PACKAGE / "measure" / "placeholders.py", *sorted((PACKAGE / "causes").glob("*.py")))
LINE = re.compile(r"^([A-Z][A-Z0-9_]*) = (-?[\d.e-]+)  # (.*?)(?: \[(.*)\])?$", flags=re.MULTILINE)


def thresholds() -> list[tuple[str, str, str, str, str]]:
    """File, name, value, meaning and calibration of every threshold."""
    return [(path.name, *row) for path in FILES for row in LINE.findall(path.read_text(encoding="utf-8"))]


def markdown() -> str:
    """The table."""
    rows = [
        f"| `{file}` | `{name}` | {value} | {meaning.replace('|', chr(92) + '|')} | {calibrated} |"
        for file, name, value, meaning, calibrated in thresholds()
    ]
    return "\n".join(["| file | name | value | meaning | set on |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(markdown())
