"""docs/adapters.md has every trainer, and says what the hooks refuse."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from trimtab.adapters.hooks import HOOKS

DOCS = Path(__file__).parents[3] / "docs"
PAGE, REFERENCE, *GUIDES = ((DOCS / f"{x}.md").read_text() for x in ("adapters", "reference-adapters", "trl", "verl"))


def test_every_trainer_has_a_section_and_a_row() -> None:
    named = re.findall(r"^\| \[(.+?)\]\(", PAGE, flags=re.MULTILINE)
    trainers = {hook.trainer for hook in HOOKS.values()}
    assert {name for row in named for name in row.split(", ")} == trainers
    titles = {name for title in re.findall(r"^## (.+)$", REFERENCE, re.MULTILINE) for name in title.split(" and ")}
    assert titles == {"Every trainer", *trainers} - {"AsyncGRPO"}
    assert "## AsyncGRPO" in GUIDES[0]
    tables = runpy.run_path(str(DOCS / "adapters.py"))["markdown"]()
    carried = tables.partition("## What is refused")[0]
    assert {line.split(" | ")[0].removeprefix("| ") for line in carried.splitlines()[7:] if line} == trainers


def test_what_the_pages_say_is_carried_by_none_or_few_is_what_the_hooks_refuse() -> None:
    tables = runpy.run_path(str(DOCS / "adapters.py"))["markdown"]().partition("## What is refused")[2]
    refused = re.findall(r"^\| `(.+)` \| (.+?) \|", tables, flags=re.MULTILINE)
    few, _, own = " ".join(PAGE.partition("## What a trainer cannot train")[2].split()).partition(" only. ")
    assert {name for name, where in refused if where == "all"} == {*re.findall(r"`([a-z-]+)`", own)}
    assert {name for name, where in refused if where != "all"} == {"a3po", "m2po"}
    assert few == "`m2po` is carried by TRL, AsyncGRPO and tinker only, `a3po` by AReaL and AsyncGRPO"
    for guide, carried in zip(GUIDES, ({"m2po"}, set()), strict=True):
        limits = guide.partition("## Limits")[2]
        assert {name for name, _ in refused if f"`{name}`" not in limits} == carried
