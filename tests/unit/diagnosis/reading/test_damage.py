"""Damaged files, and small files that stand for more than memory holds, end in data or in one clear line."""

from __future__ import annotations

import csv
import gzip
import io
import json
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.reading.layouts import ROLES
from trimtab.errors import TrimtabError
from trimtab.files import LIMITS, MAX_RESPONSE, MAX_UNPACKED_BYTES, limit
from trimtab.monitor.scalar_files import read_scalars

DATA = Path(__file__).parent / "data"
SOURCES = {
    "trl/completions_00001.parquet": 40,
    "verl/3.jsonl": 40,
    "prime-rl/token_exports/step_2/rank_0.jsonl": 40,
    "verl/3.pt": 30,
    "miles/train_data/7_0.pt": 30,
}


def check(path: Path) -> None:
    """Read it; whatever comes must keep the promises of a table, and every error must be one line."""
    message = ""
    try:
        source = open_log([path])
        for table in source.tables(8):
            assert table.starts[0] == 0
            assert (np.diff(table.starts) > 0).all()
            for values in (table.mask, table.behavior, table.trainer):
                assert len(values) == table.tokens
            assert np.isfinite(table.behavior).all()
            assert np.isfinite(table.trainer).all()
            assert np.add.reduceat(table.mask, table.starts[:-1]).all()
        origin = source.summary()
        assert origin.trained > 0
    except TrimtabError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000


def check_damaged(path: Path, whole: bytes, examples: int) -> None:
    """Checks copies of a file with bytes replaced and the end cut off."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=8)), max_size=4),
        st.one_of(st.none(), st.integers(0, len(whole))),
    )
    def damaged(changes: list[tuple[int, bytes]], end: int | None) -> None:
        data = bytearray(whole)
        for place, new in changes:
            data[place : place + len(new)] = new
        path.write_bytes(data[:end])
        check(path)

    damaged()


@pytest.mark.parametrize("name", SOURCES)
def test_damaged_bytes(name: str, tmp_path: Path) -> None:
    check_damaged(tmp_path / Path(name).name, (DATA / name).read_bytes(), SOURCES[name])


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl.gz"])
def test_damaged_text_of_other_kinds(name: str, tmp_path: Path) -> None:
    lines = (DATA / "verl/3.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    contents = {"a.json": json.dumps(rows, indent=1).encode(), "a.csv": text.getvalue().encode()}
    check_damaged(tmp_path / name, contents.get(name, gzip.compress(lines.encode())), examples=40)


_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
_names = st.sampled_from([*(role for role in ROLES if role != "sample_id"), "x"])


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.dictionaries(_names, _values, min_size=1), min_size=1, max_size=4))
def test_rows_of_anything(rows: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.jsonl"
    good = {"logp_behavior": [-1.0, -2.0], "logp_proximal": [-1.0, -2.0]}
    path.write_text("".join(json.dumps(row) + "\n" for row in [good, *({**good, **row} for row in rows)]))
    check(path)


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


@pytest.mark.filterwarnings("ignore")  # torch says that it may change or drop some of them
def test_a_tensor_that_is_no_plain_array_is_refused(tmp_path: Path) -> None:
    plain = torch.full((ROWS, TIME), -1.0)
    odd = [
        *(torch.empty(ROWS, TIME, device="meta"), plain.to_sparse(), plain.to(torch.complex64)),
        *(torch.nested.nested_tensor([plain[0]] * ROWS), torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)),
    ]
    for tensor in odd:
        assert "tensor, which is not read" in refused(saved(tmp_path / "a.pt", padded(rollout_log_probs=tensor)))


@pytest.mark.parametrize("versions", [["1" * 5000], ["²"], [], 3, torch.ones(2)])
def test_a_version_that_is_no_number_is_read_as_none(versions: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"samples": [SAMPLE | {"weight_versions": versions}] * 2})
    log = open_log([path])
    (table,) = log.tables()
    assert table.tokens == 2 * TIME
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
