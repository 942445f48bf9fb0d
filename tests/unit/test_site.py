"""Pages that docs/site.py writes for the site; links and navigation are checked by `make docs`."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pages_of_the_interface_name_what_exists() -> None:
    for _, *members in runpy.run_path(str(ROOT / "docs" / "site.py"))["API"].values():
        for member in members:
            module, _, name = member.rpartition(".")
            assert hasattr(__import__(f"trimtab.{module}", fromlist=[name]), name), member


def test_the_site_has_the_pages_that_are_not_committed(tmp_path: Path) -> None:
    site = runpy.run_path(str(ROOT / "docs" / "site.py"))
    site["collect"].__globals__["PAGES"] = tmp_path
    site["collect"]()
    docs = tmp_path / "docs"
    assert "| `mismatch/k3` |" in (docs / "metrics.md").read_text(encoding="utf-8")
    assert "## `[trainer]`" in (docs / "recipes.md").read_text(encoding="utf-8")
    assert "## What is refused" in (docs / "adapters.md").read_text(encoding="utf-8")
    assert "(../docs/metrics.md)" in (docs / "evaluation.md").read_text(encoding="utf-8")
    for page in ("metrics", "recipes"):
        assert not (ROOT / "docs" / f"{page}.md").exists()
