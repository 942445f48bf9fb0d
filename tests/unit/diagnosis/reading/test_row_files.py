"""The same rows as lines, as one array and as CSV, gzipped or not, with or without a byte-order mark."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.token_tables import values
from tests.unit.diagnosis.reading.test_bad_input import GOOD, read, refused, row
from tests.unit.diagnosis.reading.test_log_source import arrays, rows, write_lines

from trimtab.diagnosis.reading import open_log

BOM = b"\xef\xbb\xbf"


def as_csv(data: list[dict[str, Any]]) -> bytes:
    """As pandas and csv.DictWriter write it: lists as Python prints them."""
    text = io.StringIO()
    writer = csv.DictWriter(text, data[0])
    writer.writeheader()
    writer.writerows(item | {"sampling": json.dumps(item["sampling"])} for item in data)
    return text.getvalue().encode()


WRITTEN = {
    "a.jsonl": lambda data: "".join(json.dumps(item) + "\n" for item in data).encode(),
    "a.json": lambda data: json.dumps(data).encode(),
    "b.json": lambda data: json.dumps(data, indent=2).encode(),
    "a.csv": as_csv,
}


@pytest.mark.parametrize("mark", [b"", BOM])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_kind_gives_the_same_chunks(tmp_path: Path, name: str, packed: bool, mark: bytes) -> None:
    data = rows(40)
    plain = list(open_log([write_lines(tmp_path / "plain.jsonl", data)]).tables(30))
    content = mark + WRITTEN[name](data)
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content) if packed else content)
    source = open_log([path])
    result = list(source.tables(30))
    assert len(result) == len(plain) > 3
    for one, other in zip(result, plain, strict=True):
        assert arrays(one).keys() == arrays(other).keys()
        for column, expected in arrays(other).items():
            np.testing.assert_array_equal(arrays(one)[column], expected, err_msg=column)
    assert source.summary().findings == ()


@pytest.mark.parametrize("packed", [False, True])
def test_the_rows_of_an_array_are_never_in_memory_at_once(tmp_path: Path, packed: bool) -> None:
    """2.4 MB of text, of which the numbers would take 9 MB as Python objects."""
    one = json.dumps(row(tuple([-0.5] * 1500), tuple([-1.25] * 1500)), separators=(",", ":"))
    content = ("[" + ",\n".join([one] * 150) + "]").encode()
    path = tmp_path / ("a.json.gz" if packed else "a.json")
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    tracemalloc.start()
    try:
        count = sum(table.tokens for table in open_log([path]).tables(6_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 150 * 1500
    # The text twice while it is read, and a block of tokens.
    assert peak < 2.5 * len(content)


def test_an_array_longer_than_any_that_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (1 << 20) + json.dumps(GOOD).encode() + b"]"))
    monkeypatch.setattr("trimtab.diagnosis.reading.row_files.MAX_ARRAY_BYTES", 1 << 20)
    assert "is an array of over 1 MB: write one object per line" in refused(path)


def test_cells_are_read_as_python_and_json_write_them(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "logp_behavior,logp_proximal,loss_mask,response_ids,step,group,reward\n"
        '"[-1.0, -2.0]","[-1.5,-2e0]","[True, False]","[5, 9007199254740993]",3,prompt a,\n'
        '"[-1.0, nan, -inf]","[-1.5, -2, null]","[true, false, 0]","[1, 2, 3]",4,7,0.5\n'
    )
    (table,), origin = read(path)
    assert table.behavior.tolist() == [-1.0, 0.0, -1.0, 0.0, 0.0]
    assert table.mask.tolist() == [True, False, True, False, False]
    assert values(table, "ids") == [5, 9007199254740993, 1, 2, 3]
    assert values(table, "step") == [3, 4]
    assert "reward is not a finite number in 1 of 2 responses" in [found.text for found in origin.findings]


def test_rows_left_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "logp_behavior,logp_proximal\n[-1.0],[-1.5]\n"
        '-0.5,"[-1.0]"\n"[-1.0, -2.0]",[-1.0]\n[-1.0]\n"[a, b]","[-1.0, -2.0]"\n'
    )
    (table,), origin = read(path)
    assert table.responses == 1
    assert dict(origin.dropped) == {
        "logp_behavior is not a list of numbers": 1,
        "logp_behavior is not a list of numbers but one number": 1,
        "lists of different lengths": 1,
        "not as many cells as the header": 1,
    }
    assert {found.text for found in origin.findings} == {
        "left out: logp_behavior is not a list of numbers but one number, first in row 2 of a.csv",
        "left out: logp_behavior is not a list of numbers, first in row 5 of a.csv: '[a, b]'",
        "left out: lists of different lengths, first in row 3 of a.csv: logp_behavior 2, logp_proximal 1",
        "left out: not as many cells as the header, first in row 4 of a.csv",
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_error_names_row_and_column(tmp_path: Path, name: str) -> None:
    bad = [row(([-1.0], -2.0), sampling={}), row(None, sampling={})]
    (tmp_path / name).write_bytes(WRITTEN[name](bad))
    message = refused(tmp_path / name)
    assert f"1 x logp_behavior is not a list of numbers (first: row 1 of {name}: [[-1.0], -2.0])" in message
    assert f"1 x no logp_behavior (first: row 2 of {name})" in message


def test_a_folder_reads_packed_files_and_prefers_other_files_to_tables(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2\n")
    (tmp_path / "weights.gz").write_bytes(gzip.compress(b"nothing of interest"))
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    write_lines(tmp_path / "10.jsonl", [GOOD, GOOD])
    tables, origin = read(tmp_path)
    assert origin.files == 2
    assert [table.responses for table in tables] == [3]
    for name in ("2.jsonl.gz", "10.jsonl"):
        (tmp_path / name).unlink()
    assert "metrics.csv has no logp_behavior" in refused(tmp_path)
