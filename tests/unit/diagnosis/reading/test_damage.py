"""Random damage to a file of any kind ends in data or in one clear line, never in another error."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.reading.layouts import ROLES
from trimtab.errors import TrimtabError

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


def test_the_undamaged_files_are_read() -> None:
    for name in SOURCES:
        assert sum(table.responses for table in open_log([DATA / name]).tables()) > 0
