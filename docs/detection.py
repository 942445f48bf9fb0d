"""Prints the thresholds of all detectors, which the site appends to docs/detection.md (docs/site.py).

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
    names = [path.parent.name + ".py" if path.stem == "__init__" else path.name for path in FILES]
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    return [(name, *row) for name, source in zip(names, sources, strict=True) for row in LINE.findall(source)]


def markdown() -> str:
    """The table."""
    rows = [
        f"| `{file}` | `{name}` | {value} | {meaning.replace('|', chr(92) + '|')} | {calibrated} |"
        for file, name, value, meaning, calibrated in thresholds()
    ]
    return "\n".join(["| file | name | value | meaning | set on |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(markdown())
