"""Every test that docs/results/presets.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_named_on_the_page_exist() -> None:
    """A name is `path::test`; `::test` continues the path before it in the same row."""
    text = (ROOT / "docs/results/presets.md").read_text()
    named = []
    for row in text.splitlines():
        path = ""
        for start, test in re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", row):
            path = start or path
            named.append((path, test))
    assert len(named) > 25
    missing = [(path, test) for path, test in named if f"def {test}(" not in (ROOT / path).read_text()]
    assert missing == []
