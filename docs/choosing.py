"""Writes the list "which method when" into docs/choosing.md, and four rows into README: `python docs/choosing.py`.

The rows are those by which `trimtab diagnose` recommends (`diagnosis/advice/rules.py`).
"""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path

from trimtab.adapters.hooks import HOOKS
from trimtab.diagnosis.advice.rules import Choice, list_choices, load_map
from trimtab.objectives import keywords_of, objective

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- docs/choosing.py -->\n", "<!-- end -->\n"
COMMONEST = ("stale, short", "stale, long", "quantized", "precision")
"""The rows of README, by rule."""
REFUSALS = runpy.run_path(str(ROOT / "docs" / "adapters.py"))["refusals"]
RESULTS = {regime.description: regime.methods for regime in load_map()}
"""By the description of a regime, what each method reached there."""


def full(rows: list[Choice]) -> str:
    """Every row, for docs/choosing.md."""
    head = ["your run", "take", "bounds", "measured with", "accuracy", "`grpo`, no correction"]
    cells = [
        [row.when, taken(row, rows, "methods.md#"), bounds(row), measured_with(row), *accuracies(row)] for row in rows
    ]
    return table([head, *cells])


def short(rows: list[Choice]) -> str:
    """The commonest rows without what is in parentheses, for README."""
    own = ", bounds from your data"
    cells = [
        [row.when.partition(" (")[0], taken(row, rows) + own * row.bounds.startswith("from"), *accuracies(row)]
        for row in rows
        if row.rule in COMMONEST
    ]
    return table([["your run", "take", "accuracy", "`grpo`, no correction"], *cells])


def taken(row: Choice, rows: list[Choice], page: str = "") -> str:
    """The preset of a row, and where not every trainer carries it, which do, and what is next in the same regime."""
    if not row.preset:
        return "nothing: repair it first"
    names = [named(row.preset, page)]
    if refused := {trainer for trainers in REFUSALS(objective(row.preset)).values() for trainer in trainers}:
        carried = [hook.trainer for hook in HOOKS.values() if hook.trainer not in refused]
        elsewhere = " or ".join(named(name, page) for name in next_best(row, rows))
        names += [f" in Trimtab, {', '.join(carried[:-1])} and {carried[-1]}; elsewhere {elsewhere}"]
    return "".join(names)


def named(preset: str, page: str) -> str:
    return f"[`{preset}`]({page}{preset})" if page else f"`{preset}`"


def next_best(row: Choice, rows: list[Choice]) -> list[str]:
    """The two most accurate methods of the regime at published settings that all trainers carry and no row names."""
    results = RESULTS[row.regime]
    others = {other.preset for other in rows if other.regime == row.regime}
    free = [name for name, one in results.items() if one.best and not (one.settings or one.rate != 1)]
    free = [name for name in free if name not in others and not REFUSALS(objective(name))]
    return sorted(free, key=lambda name: -results[name].accuracy)[:2]


def bounds(row: Choice) -> str:
    """Where bounds are from, with the published ones that a measured setting replaced."""
    settings = RESULTS[row.regime][row.preset].settings if row.regime else {}
    published = ", ".join(f"{key}={keywords_of(row.preset)[key]:g}" for key in settings)
    return f"{row.bounds} ({published})" if published else row.bounds


def measured_with(row: Choice) -> str:
    return row.regime or "not compared" * bool(row.preset)


def accuracies(row: Choice) -> list[str]:
    """Of the preset, and of `grpo` beside it."""
    return [accuracy(row, preset) for preset in (row.preset, "grpo" if row.uncorrected else "")]


def accuracy(row: Choice, preset: str) -> str:
    """At published settings and the usual learning rate; then, where others were better, what they reached."""
    if not (row.regime and preset):
        return ""
    one = RESULTS[row.regime][preset]
    changes = [f"{name}={value:g}" for name, value in one.settings.items()]
    changes += [f"{one.rate:g} of the learning rate"] * (one.rate != 1)
    best = f"{one.accuracy:.2f} [{one.low:.2f}, {one.high:.2f}]"
    return f"{one.published:.2f}; {best} with {' and '.join(changes)}" if changes else best


def table(rows: list[list[str]]) -> str:
    head, *others = (f"| {' | '.join(cell or '-' for cell in row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others]) + "\n"


PAGES = {ROOT / "docs" / "choosing.md": full, ROOT / "README.md": short}
"""Each page with the function that writes its list."""


def written(path: Path) -> str:
    """A page with its list written anew."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", flags=re.DOTALL)
    rows = PAGES[path](list(list_choices()))
    return pattern.sub(lambda _: f"{BEGIN}\n{rows}\n{END}", path.read_text(encoding="utf-8"))


def with_data(page: str) -> str:
    """A page of docs/results on the site: the table of each file under the line that ends in the link to it."""

    def shown(link: re.Match[str]) -> str:
        with (ROOT / "docs" / "results" / "data" / link[1]).open(encoding="utf-8", newline="") as file:
            return f"{link[0]}\n{table(list(csv.reader(file)))}"

    return re.sub(r"\[([\w-]+\.csv)\]\(data/\1\)\.\n", shown, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
