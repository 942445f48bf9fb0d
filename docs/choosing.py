"""Writes the list "which method when" into docs/choosing.md, and three rows into README: `python docs/choosing.py`.

The rows are those by which `trimtab diagnose` recommends (`diagnosis/advice/rules.py`).
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from trimtab.diagnosis.advice.rules import Choice, choices

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- docs/choosing.py -->\n", "<!-- end -->\n"
COMMONEST = ("stale, short", "quantized", "precision")
"""The rows of README, by rule."""


def full(rows: list[Choice]) -> str:
    """Every row, for docs/choosing.md."""
    head = ["your run", "take", "bounds", "measured with", "accuracy", "`grpo`, no correction"]
    names = [f"[`{row.preset}`](methods.md#{row.preset})" if row.preset else "nothing: repair it first" for row in rows]
    cells = [
        [row.when, name, row.bounds, row.regime or "not compared" * bool(row.preset), row.accuracy, row.uncorrected]
        for row, name in zip(rows, names, strict=True)
    ]
    return table([head, *cells])


def short(rows: list[Choice]) -> str:
    """The commonest rows without what is in parentheses, for README."""
    chosen = [row for row in rows if row.rule in COMMONEST]
    cells = [[row.when.partition(" (")[0], f"`{row.preset}`", row.accuracy, row.uncorrected] for row in chosen]
    return table([["your run", "take", "accuracy", "`grpo`, no correction"], *cells])


def table(rows: list[list[str]]) -> str:
    head, *others = (f"| {' | '.join(cell or '-' for cell in row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others]) + "\n"


PAGES = {ROOT / "docs" / "choosing.md": full, ROOT / "README.md": short}
"""Each page with the function that writes its list."""


def written(path: Path) -> str:
    """A page with its list written anew."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", flags=re.DOTALL)
    rows = PAGES[path](list(choices()))
    return pattern.sub(lambda _: f"{BEGIN}\n{rows}\n{END}", path.read_text(encoding="utf-8"))


def with_data(page: str) -> str:
    """docs/results/presets.md on the site: the tables of accuracies under the links to their files."""
    for name in ("presets", "methods"):
        link = f"[{name}.csv](data/{name}.csv).\n"
        with (ROOT / "docs" / "results" / "data" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            page = page.replace(link, f"{link}\n{table(list(csv.reader(file)))}")
    return page


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
