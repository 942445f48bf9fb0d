"""Small files that stand for more values than memory holds, and tensors that are no plain arrays: one clear line."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from trimtab.diagnosis.reading import open_log
from trimtab.errors import TrimtabError
from trimtab.files import LIMITS, MAX_RESPONSE, MAX_UNPACKED_BYTES, limit
from trimtab.monitor.scalar_files import read_scalars

ROWS, TIME = 4, 16
SAMPLE = {
    "tokens": [1] * 20,
    "response_length": TIME,
    "loss_mask": [1] * TIME,
    "rollout_log_probs": [-1.0] * TIME,
    "log_probs": [-1.1] * TIME,
    "weight_versions": ["3"],
}


def padded(**other: Any) -> dict[str, Any]:
    plain = {"rollout_log_probs": torch.full((ROWS, TIME), -1.0), "old_log_probs": torch.full((ROWS, TIME), -1.1)}
    whole = {"response_mask": torch.ones(ROWS, TIME, dtype=torch.bool), "responses": torch.ones(ROWS, TIME).long()}
    return plain | whole | other


def saved(path: Path, payload: Any) -> Path:
    torch.save(payload, path)
    return path


def tokens_of(path: Path) -> int:
    return sum(table.tokens for table in open_log([path]).tables())


def refused(path: Path) -> str:
    with pytest.raises(TrimtabError) as error:
        tokens_of(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_tensor_that_repeats_one_value_is_counted_and_not_written_out(tmp_path: Path) -> None:
    endless = torch.full((1,), -1.0).as_strided((ROWS, 1 << 34), (0, 0))
    path = saved(tmp_path / "a.pt", padded(rollout_log_probs=endless, old_log_probs=endless))
    assert path.stat().st_size < 4096
    assert "stands for 137,438,953," in refused(path)
    usual = torch.full((ROWS, 1), -1.0).expand(ROWS, TIME)  # an advantage of each response is often written so
    assert tokens_of(saved(path, padded(old_log_probs=usual))) == ROWS * TIME


def test_a_list_in_many_places_is_counted_each_time(tmp_path: Path) -> None:
    many: list[Any] = [-1.0] * 10
    for _ in range(30):
        many = [many] * 10
    assert "by repetition" in refused(saved(tmp_path / "a.pt", {"samples": [SAMPLE | {"rollout_log_probs": many}]}))
    inside: list[Any] = [-1.0]
    inside.append(inside)
    path = saved(tmp_path / "b.pt", {"samples": [SAMPLE | {"rollout_log_probs": inside}]})
    assert "inside itself" in refused(path)
    shared = [SAMPLE] * 8
    assert tokens_of(saved(tmp_path / "c.pt", {"samples": shared})) == 8 * TIME


def test_a_compressed_torch_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole.pt", padded(extra=torch.zeros(MAX_UNPACKED_BYTES // 4, dtype=torch.float32)))
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for part in source.infolist():
            target.writestr(part.filename, source.read(part))
    assert packed.stat().st_size < 200_000
    assert "unpacks to over 100 times its size" in refused(packed)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("meta", torch.empty(ROWS, TIME, device="meta")),
        ("sparse", torch.full((ROWS, TIME), -1.0).to_sparse()),
        ("complex", torch.full((ROWS, TIME), -1.0, dtype=torch.complex64)),
    ],
)
def test_a_tensor_that_is_no_plain_array_is_named(kind: str, tensor: Tensor, tmp_path: Path) -> None:
    assert f"holds a {kind} tensor" in refused(saved(tmp_path / "a.pt", padded(rollout_log_probs=tensor)))


@pytest.mark.filterwarnings("ignore")  # torch says that it may change or drop them
def test_a_nested_and_a_quantized_tensor_are_named(tmp_path: Path) -> None:
    tensor = torch.nested.nested_tensor([torch.full((TIME,), -1.0)] * ROWS)
    assert "save tensor.unbind()" in refused(saved(tmp_path / "a.pt", padded(rollout_log_probs=tensor)))
    tensor = torch.quantize_per_tensor(torch.full((ROWS, TIME), -1.0), 0.1, 0, torch.qint8)
    assert "save tensor.dequantize()" in refused(saved(tmp_path / "a.pt", padded(rollout_log_probs=tensor)))


@pytest.mark.parametrize("versions", [["1" * 5000], ["²"], [], 3, torch.ones(2)])
def test_a_version_that_is_no_number_is_read_as_none(versions: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"samples": [SAMPLE | {"weight_versions": versions}] * 2})
    log = open_log([path])
    (table,) = log.tables()
    assert table.tokens == 2 * TIME
    assert table.version is not None
    assert set(table.version.tolist()) == {0}
    assert log.summary().assumes_current


def test_a_gzipped_file_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"logp_behavior": [-1.0], "logp_proximal": [-1.0]}\n')
        for _ in range(2 + MAX_UNPACKED_BYTES // (1 << 20)):
            file.write(b" " * (1 << 20))
    assert path.stat().st_size < MAX_UNPACKED_BYTES // 100
    assert "unpacks to over 100 times its size" in refused(path)
    with pytest.raises(TrimtabError, match="unpacks to over 100 times its size"):
        read_scalars(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "torch"])
def test_a_response_beyond_any_real_one_is_refused(kind: str, tmp_path: Path) -> None:
    long = np.full(MAX_RESPONSE + 1, -1.0, np.float32)
    lists = pa.ListArray.from_arrays(pa.array([0, len(long)], pa.int32()), pa.array(long))
    table = pa.table({"logp_behavior": lists, "logp_proximal": lists})
    path = tmp_path / {"parquet": "a.parquet", "arrow": "a.arrow", "json": "a.jsonl", "torch": "a.pt"}[kind]
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        feather.write_feather(table, path, compression="uncompressed")
    elif kind == "json":
        numbers = ",".join(["-1"] * len(long))
        path.write_text(f'{{"logp_behavior": [{numbers}], "logp_proximal": [{numbers}]}}\n')
    else:
        whole = torch.from_numpy(long)[None]
        torch.save(padded(rollout_log_probs=whole, old_log_probs=whole) | {"response_mask": whole < 0}, path)
    assert "holds 4,194,305 values in 1 rows; a row may hold 4,194,304" in refused(path)


def test_one_variable_raises_every_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repeated = torch.full((1,), -1.0).expand(ROWS, MAX_RESPONSE // 2)
    path = saved(tmp_path / "a.pt", {"a": repeated})
    assert "TRIMTAB_FILE_LIMITS=4 in the environment" in refused(path)
    monkeypatch.setenv(LIMITS, "4")
    assert limit(10) == 40
    assert "stands for" not in refused(path)  # the next question is which columns these are
    for wrong in ("0.5", "many", "nan", "1e400"):
        monkeypatch.setenv(LIMITS, wrong)
        with pytest.raises(TrimtabError, match="is not a number from 1 to 1e6"):
            limit(10)


def test_a_digit_that_is_no_decimal_may_be_in_a_name(tmp_path: Path) -> None:
    for name in ("1²2.pt", "1²10.pt"):
        saved(tmp_path / name, padded())
    assert tokens_of(tmp_path) == 2 * ROWS * TIME


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    assert "it is not a regular file" in refused(tmp_path / "a.pt")
