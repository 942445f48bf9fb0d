"""Two real processes: states reduce over data-parallel ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(300)
def test_two_ranks_agree_with_one_process(tmp_path):
    command = [sys.executable, str(Path(__file__).parents[1] / "programs" / "ranks_worker.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
