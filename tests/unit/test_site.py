"""Pages that docs/site.py writes for the site; links and navigation are checked by `make docs`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from trimtab.objectives import objective, objectives

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "docs" / "site.py"))
RESULTS = SITE["measured"]((ROOT / "docs" / "results" / "presets.md").read_text(encoding="utf-8"))


def test_every_preset_has_a_page_and_a_result() -> None:
    navigation = re.findall(
        r"^          - docs/methods/(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE
    )
    assert navigation == objectives()
    assert set(RESULTS) == set(objectives())
    index = SITE["index_page"]()
    assert all(f"[`{name}`]({name}.md)" in index for name in objectives())


@pytest.mark.parametrize("name", objectives())
def test_the_page_of_a_preset_says_what_when_and_whence(name: str) -> None:
    page = SITE["preset_page"](name, RESULTS[name])
    assert objective(name, **SITE["REQUIRED"].get(name, {})).equation() in page
    for part in ("When", "Source"):
        (text,) = re.findall(rf"^\*\*{part}\.\*\* (.+)$", page, flags=re.MULTILINE)
        assert len(text) > 20, part
    assert dict(RESULTS[name])["on-policy"] in page


def test_pages_of_the_interface_name_what_exists() -> None:
    for _, *members in SITE["API"].values():
        for member in members:
            module, _, name = member.rpartition(".")
            assert hasattr(__import__(f"trimtab.{module}", fromlist=[name]), name), member
