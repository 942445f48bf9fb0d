"""A type checker, and so the completion of an editor, knows the keywords of `trimtab.objective`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
import trimtab

trimtab.objective("icepop", weight_max=4, clip_dual=None, mask=[{"kind": "veto"}])
trimtab.objective("icepop", weight_max="4")
trimtab.objective("icepop", weight_mx=4)
"""


def test_a_type_checker_knows_the_keywords(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "code.py").write_text(SOURCE)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "code.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [
        (row["range"]["start"]["line"] + 1, row["rule"]) for row in json.loads(result.stdout)["generalDiagnostics"]
    ]
    assert found == [(5, "reportArgumentType"), (6, "reportCallIssue")]
