"""docs/adapters.md has every trainer, and its reference says what the hooks refuse."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from trimtab.adapters.hooks import HOOKS

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference-adapters.md").read_text(encoding="utf-8")


def test_every_trainer_has_a_section_and_a_row() -> None:
    named = re.findall(r"^\| \[(.+?)\]\(", (DOCS / "adapters.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    trainers = {hook.trainer for hook in HOOKS.values()}
    assert {name for row in named for name in row.split(", ")} == trainers
    titles = {name for title in re.findall(r"^## (.+)$", REFERENCE, re.MULTILINE) for name in title.split(" and ")}
    assert titles == {"Every trainer", *trainers}
    tables = runpy.run_path(str(DOCS / "adapters.py"))["markdown"]()
    carried = tables.partition("## What is refused")[0]
    assert {line.split(" | ")[0].removeprefix("| ") for line in carried.splitlines()[7:] if line} == trainers


def test_what_the_page_says_is_carried_by_none_or_few_is_what_the_hooks_refuse() -> None:
    tables = runpy.run_path(str(DOCS / "adapters.py"))["markdown"]().partition("## What is refused")[2]
    refused = re.findall(r"^\| `(.+)` \| (.+?) \|", tables, flags=re.MULTILINE)
    [none] = re.findall(r"^\| carried by none \| (.+?) \|", REFERENCE, flags=re.MULTILINE)
    assert {name for name, where in refused if where == "all"} == {*re.findall(r"`([a-z-]+)`", none)}
    assert {name for name, where in refused if where != "all"} == {"a3po", "m2po"}
    assert "`a3po` by AReaL and AsyncGRPO only; `m2po` by TRL, AsyncGRPO and tinker only" in REFERENCE
