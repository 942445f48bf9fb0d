"""Parquet files whose few rows hold more values than memory does: refused by every reader before any is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab import diagnose
from trimtab.errors import TrimtabError
from trimtab.files import MAX_ROW_VALUES, open_parquet
from trimtab.runs import trajectories
from trimtab.runs.summary import read_table
from trimtab.trainer.tasks.data_sets import read_rows

LONG = MAX_ROW_VALUES + 1


def write(path: Path, lengths: list[int]) -> Path:
    """A file of lists of equal log-probs, of which parquet stores one and a count."""
    values = pa.array(np.full(sum(lengths), -1.0, np.float32))
    lists = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), values)
    short = pa.array([[-1.5]] * len(lengths), pa.list_(pa.float32()))
    pq.write_table(pa.table({"logp_behavior": lists, "logp_current": short}), path, compression="zstd")
    assert path.stat().st_size < LONG / 64
    return path


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bomb") / "step-000001.parquet", [LONG])


@pytest.mark.parametrize(
    "read",
    [diagnose, trajectories.read, read_table, lambda path: list(read_rows(path))],
    ids=["diagnose", "trajectories", "table", "task"],
)
def test_a_response_longer_than_any_real_one_is_refused(bomb: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(TrimtabError, match=r"column 'logp_behavior' holds 16,777,217 values in 1 rows") as error:
        read(bomb)
    assert "\n" not in str(error.value)


def test_a_long_response_among_short_ones_is_refused(tmp_path: Path) -> None:
    """On average 0.8 million values a row, which alone would be accepted."""
    path = write(tmp_path / "a.parquet", [*[1] * 20, LONG])
    with pytest.raises(TrimtabError, match=r"'logp_behavior' holds 16,777,237 values in 21 rows"):
        diagnose(path)


def test_the_longest_row_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [MAX_ROW_VALUES])
    with open_parquet(path) as file:
        assert file.metadata.row_group(0).column(0).num_values == MAX_ROW_VALUES
