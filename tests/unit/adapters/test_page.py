"""docs/adapters.md has every trainer, and says what the hooks refuse."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from trimtab.adapters.hooks import HOOKS

DOCS = Path(__file__).parents[3] / "docs"
PAGE, REFERENCE, *GUIDES = (
    (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("adapters", "reference-adapters", "trl", "verl")
)


def test_every_trainer_has_a_section_and_a_row() -> None:
    named = re.findall(r"^\| \[(.+?)\]\(", PAGE, flags=re.MULTILINE)
    trainers = {hook.trainer for hook in HOOKS.values()}
    assert {name for row in named for name in row.split(", ")} == trainers
    titles = {name for title in re.findall(r"^## (.+)$", REFERENCE, re.MULTILINE) for name in title.split(" and ")}
    titles |= {
        title for guide in GUIDES for title in re.findall(r"^##? (.+)$", guide, re.MULTILINE) if title in trainers
    }
    assert titles == {"Every trainer", *trainers}
    tables = runpy.run_path(str(DOCS / "adapters.py"))["markdown"]()
    carried = tables.partition("## What is refused")[0]
    assert {line.split(" | ")[0].removeprefix("| ") for line in carried.splitlines()[7:] if line} == trainers


def test_what_the_pages_say_is_carried_by_none_or_few_is_what_the_hooks_refuse() -> None:
    tables = runpy.run_path(str(DOCS / "adapters.py"))["markdown"]().partition("## What is refused")[2]
    refused = re.findall(r"^\| `(.+)` \| (.+?) \|", tables, flags=re.MULTILINE)
    own = "".join(re.findall(r"^\| (`.+?) \| Trimtab", PAGE, flags=re.MULTILINE))
    assert {name for name, where in refused if where == "all"} == {*re.findall(r"`([a-z-]+)`", own)}
    assert {name for name, where in refused if where != "all"} == {"a3po", "m2po"}
    for few in ("`m2po` | TRL, AsyncGRPO and tinker", "`a3po` | AReaL and AsyncGRPO"):
        assert f"| {few} |" in PAGE
    trl, verl = (guide.partition("## Limits")[2] for guide in GUIDES)
    assert {name for name, _ in refused if f"`{name}`" in verl} == {name for name, where in refused}
    assert {name for name, _ in refused if f"`{name}`" in trl} == {name for name, _ in refused} - {"m2po"}
