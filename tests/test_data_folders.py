"""Tests read files of the repository, and others only from folders that an environment variable names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import named_folder

ROOT = Path(__file__).parents[1]


def test_no_file_reaches_outside_the_repository() -> None:
    outside = [
        f"{path.relative_to(ROOT)}: parents[{number}]"
        for folder in ("tests", "benchmarks", "docs", "examples", "tools", "src")
        for path in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"__file__\)(?:\.resolve\(\))?\.parents\[(\d+)\]", path.read_text(encoding="utf-8"))
        if int(number) >= len(path.relative_to(ROOT).parts)
    ]
    assert outside == []


def test_a_folder_that_no_variable_names_is_a_skipped_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in (None, ""):
        monkeypatch.delenv("FOLDER", raising=False) if value is None else monkeypatch.setenv("FOLDER", value)
        with pytest.raises(pytest.skip.Exception, match="has no rows: set FOLDER to a folder that holds them"):
            named_folder("FOLDER", "rows")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    assert named_folder("FOLDER", "rows") == tmp_path
    monkeypatch.setenv("FOLDER", str(tmp_path / "absent"))
    with pytest.raises(pytest.fail.Exception, match="absent is not a folder"):
        named_folder("FOLDER", "rows")
