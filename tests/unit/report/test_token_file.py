"""Reading tokens: rows that cannot be used are left out and counted, memory is bounded, damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab.errors import TrimtabError
from trimtab.report import token_file
from trimtab.report.token_file import read_tokens

NAN = float("nan")


def _file(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_rows_become_flat_arrays(tmp_path: Path) -> None:
    found = read_tokens(
        _file(
            tmp_path / "a.parquet",
            response_ids=[[1, 2], [], [3]],
            logp_behavior=[[-0.1, -0.2], [], [-0.3]],
            logp_current=[[-0.4, -0.5], [], [-0.6]],
            loss_mask=[[True, False], [], [True]],
            policy_version=[[4, 5], [], [6]],
            advantage=[1.0, 2.0, -3.0],
        )
    )
    assert found.starts.tolist() == [0, 2, 2, 3]
    assert found.ids.tolist() == [1, 2, 3]
    assert found.behavior.tolist() == [-0.1, -0.2, -0.3]
    assert found.clean is not None
    assert found.clean.tolist() == [-0.4, -0.5, -0.6]
    assert found.clean_name == "logp_current"
    assert found.trained.tolist() == [True, False, True]
    assert found.version is not None
    assert found.version.tolist() == [4, 5, 6]
    assert found.advantage is not None
    assert found.advantage.tolist() == [1.0, 1.0, -3.0]
    assert (found.perturbed, found.entropy) == (None, None)
    assert (found.rows, found.read, found.external, found.nonfinite) == (3, 3, 0, 0)


def test_the_proximal_policy_comes_before_the_current_one(tmp_path: Path) -> None:
    columns = {"response_ids": [[1]], "logp_behavior": [[-0.1]], "logp_current": [[-0.2]], "logp_proximal": [[-0.3]]}
    found = read_tokens(_file(tmp_path / "a.parquet", **columns))
    assert found.clean is not None
    assert (found.clean.tolist(), found.clean_name) == ([-0.3], "logp_proximal")


def test_external_traces_and_broken_rows_are_left_out_and_counted_apart(tmp_path: Path) -> None:
    found = read_tokens(
        _file(
            tmp_path / "a.parquet",
            response_ids=[[1, 2], [3, 4], [5], [6, 7], [8]],
            logp_behavior=[[NAN, NAN], [-0.1, -0.2], [-np.inf], [-0.3, NAN], [-0.4]],
            logp_current=[[-1.0, -1.0], [-0.1, -0.2], [-0.5], [-0.3, -0.3], [NAN]],
            # The last token of the fourth row is not trained: nobody reads what stands there.
            loss_mask=[[True, True], [True, True], [True], [True, False], [True]],
            off_policy=[True, False, None, False, False],
            advantage=[9.0, 1.0, 2.0, 3.0, 4.0],
        )
    )
    assert (found.external, found.nonfinite, found.read) == (1, 2, 5)
    assert found.ids.tolist() == [3, 4, 6, 7]
    assert found.starts.tolist() == [0, 2, 4]
    assert found.advantage is not None
    assert found.advantage.tolist() == [1.0, 1.0, 3.0, 3.0]


def test_a_file_of_external_traces_alone_has_no_tokens(tmp_path: Path) -> None:
    found = read_tokens(
        _file(tmp_path / "a.parquet", response_ids=[[1, 2]], logp_behavior=[[NAN, NAN]], off_policy=[True])
    )
    assert len(found.ids) == 0
    assert found.starts.tolist() == [0]
    assert found.external == 1


def test_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    kinds = {"response_ids": pa.list_(pa.int64()), "logp_behavior": pa.list_(pa.float32())}
    pq.write_table(pa.table({name: pa.array([], kind) for name, kind in kinds.items()}), path)
    assert read_tokens(path).starts.tolist() == [0]


def test_reading_ends_when_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "TOKENS_READ", 250)
    rows = 1000
    path = _file(tmp_path / "a.parquet", response_ids=[[1, 2, 3]] * rows, logp_behavior=[[-0.1] * 3] * rows)
    found = read_tokens(path)
    # Three batches of 32 responses hold 288 tokens.
    assert (found.read, found.rows, len(found.ids)) == (96, 1000, 288)


def test_a_column_of_another_length_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.parquet", response_ids=[[1, 2]], logp_behavior=[[-0.1, -0.2]], entropy=[[0.5]])
    with pytest.raises(TrimtabError, match=r"a\.parquet: entropy and response_ids differ in length"):
        read_tokens(path)


def test_a_file_without_log_probs_is_no_trajectory_file(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="no column 'logp_behavior'"):
        read_tokens(_file(tmp_path / "a.parquet", response_ids=[[1]]))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.parquet", response_ids=[[1]], logp_behavior=[[-0.1]])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrimtabError, match=r"a\.parquet is damaged"):
        read_tokens(path)
