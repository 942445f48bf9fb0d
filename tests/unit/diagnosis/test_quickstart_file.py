"""A whole run of `trimtab train quickstart`, without its recipe: the file of a healthy run of 135 million parameters.

`data/quickstart.parquet` has the columns that decide of `--set log.trajectories_every=1`, all 30 steps. The policy
becomes certain, so that logits move 22 times as far at step 14 as at step 27 (geometric means), in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trimtab.diagnosis.output.as_text import terminal_text
from trimtab.diagnosis.pipeline import diagnose

FILE = Path(__file__).parent / "data" / "quickstart.parquet"


@pytest.mark.parametrize("without", [(), ("policy_version", "proximal_version")])
def test_a_healthy_run_without_its_recipe_is_rounding(without: tuple[str, ...], tmp_path: Path) -> None:
    pq.write_table(pq.read_table(FILE).drop_columns(list(without)), tmp_path / "run.parquet")
    found = diagnose(tmp_path / "run.parquet")
    assert {cause.name for cause in found.causes} == {"precision"}
    assert found.measured.size.mismatch["k3"] < 2e-3
    text = terminal_text(found)
    assert "First: No fault shows: use the correction token-tis" in text
    assert "may apply" not in text
