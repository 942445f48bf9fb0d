"""docs/adapters.md is what its script prints, and every trainer has a page with its line."""

from __future__ import annotations

import runpy
from pathlib import Path

from trimtab.adapters.hooks import HOOKS

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_generated() -> None:
    script = runpy.run_path(str(DOCS / "adapters.py"))
    assert (DOCS / "adapters.md").read_text(encoding="utf-8") == script["markdown"]() + "\n", (
        "run: python docs/adapters.py > docs/adapters.md"
    )
    assert set(script["TRAINERS"]) == set(HOOKS)
    for name in HOOKS:
        assert (DOCS / "adapters" / f"{script['PAGES'].get(name, name)}.md").is_file()
