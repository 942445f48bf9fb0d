"""States reduce over data-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import forked

pytestmark = pytest.mark.slow


def test_two_ranks_agree_with_one_process(python: forked.Run) -> None:
    run = python(Path(__file__).parents[1] / "programs" / "ranks_worker.py", ranks=2)
    assert run.returncode == 0, run.stderr
