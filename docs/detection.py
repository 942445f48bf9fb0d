"""Writes the table of thresholds in docs/detection.md: `python docs/detection.py`.

A threshold is a line `NAME = value  # meaning [what it was set on]` of a detector.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
PACKAGE = Path(__file__).parents[1] / "src" / "trimtab" / "diagnosis"
FILES = (PACKAGE / "measure" / "placeholders.py", *sorted((PACKAGE / "causes").glob("*.py")))
BEGIN, END = "<!-- thresholds: written by docs/detection.py -->\n", "<!-- end of thresholds -->\n"
LINE = re.compile(r"^([A-Z][A-Z0-9_]*) = (-?[\d.e-]+)  # (.*?)(?: \[(.*)\])?$", flags=re.MULTILINE)


def thresholds() -> list[tuple[str, str, str, str, str]]:
    """File, name, value, meaning and calibration of every threshold."""
    names = [path.parent.name + ".py" if path.stem == "__init__" else path.name for path in FILES]
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    return [(name, *row) for name, source in zip(names, sources, strict=True) for row in LINE.findall(source)]


def written(page: str) -> str:
    """The page with its table of thresholds written anew."""
    rows = [
        f"| `{file}` | `{name}` | {value} | {meaning.replace('|', chr(92) + '|')} | {calibrated} |"
        for file, name, value, meaning, calibrated in thresholds()
    ]
    table = "\n".join(["| file | name | value | meaning | set on |", "|---|---|---|---|---|", *rows])
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", flags=re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{table}\n\n{END}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
