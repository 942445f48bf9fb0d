"""Pages that docs/site.py writes for the site; navigation is checked by `make docs`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from trimtab.objectives import objectives

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of the site, generated ones included."""
    site, folder = runpy.run_path(str(ROOT / "docs" / "site.py")), tmp_path_factory.mktemp("site") / "pages"
    site["collect"].__globals__["PAGES"] = folder
    site["collect"]()
    return folder


def headings(page: Path) -> set[str]:
    """The anchors of a page: each heading in small letters, without punctuation, hyphens for blanks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "]", title)).strip().replace(" ", "-").lower() for title in titles
    }


def dead_links(folder: Path) -> list[str]:
    """Links of pages in a folder to files or headings that are not in it."""
    dead = []
    for page in sorted(folder.rglob("*.md")):
        text = re.sub(
            r"^ *```.*?^ *```$|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", text):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            known = file.is_file() and file.is_relative_to(folder.resolve() if path else folder)
            if not known or (anchor and file.suffix == ".md" and anchor not in headings(file)):
                dead.append(f"{page.relative_to(folder)}: {target}")
    return dead


def test_every_link_of_the_site_leads_to_one_of_its_files_and_headings(pages: Path) -> None:
    assert dead_links(pages) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n[b](b.md) [gone](gone.md) [c](b.md#c-d) [e](b.md#e) [a](#a) [f](../f.md)\n")
    (tmp_path / "b.md").write_text("# B\n## C `d`\n```\n# e\n[x](x.md)\n```\n")
    (tmp_path.parent / "f.md").write_text("not of the site")
    assert dead_links(tmp_path) == ["a.md: gone.md", "a.md: b.md#e", "a.md: ../f.md"]


def test_make_docs_fails_at_what_mkdocs_warns_of() -> None:
    """With `--quiet`, `--strict` counts no warning."""
    [command] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line]
    assert "--strict" in command
    assert "--quiet" not in command
    assert " -q" not in command


def test_pages_of_the_interface_name_what_exists() -> None:
    for _, *members in runpy.run_path(str(ROOT / "docs" / "site.py"))["API"].values():
        for member in members:
            module, _, name = member.rpartition(".")
            assert hasattr(__import__(f"trimtab.{module}", fromlist=[name]), name), member


def test_the_site_has_the_pages_that_are_not_committed(pages: Path) -> None:
    docs = pages / "docs"
    assert "| `mismatch/k3` |" in (docs / "metrics.md").read_text(encoding="utf-8")
    assert "## `[trainer]`" in (docs / "recipes.md").read_text(encoding="utf-8")
    assert "## What is refused" in (docs / "reference-adapters.md").read_text(encoding="utf-8")
    assert "(../docs/metrics.md)" in (docs / "evaluation.md").read_text(encoding="utf-8")
    methods = (docs / "methods.md").read_text(encoding="utf-8")
    for name in objectives():
        assert f"\n    def {name.replace('-', '_')}_loss(current, " in methods, name
    assert "_loss(" not in (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    shown = (("presets", "seq-bypass | - | 0.806 |"), ("presets", "m2po, mask | 0.841 ["), ("losses", "TRL `dapo` | e"))
    assert all(f"\n| {row}" in (docs / "results" / f"{page}.md").read_text(encoding="utf-8") for page, row in shown)
    for page in ("metrics", "recipes"):
        assert not (ROOT / "docs" / f"{page}.md").exists()
