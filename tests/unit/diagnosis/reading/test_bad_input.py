"""Whatever a file holds, the answer is data, a counted loss or one clear line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.support.token_tables import values

from trimtab.diagnosis.pipeline import diagnose
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.records import DataSummary
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

NAN, INF = float("nan"), float("inf")


def row(behavior: Any = (-1.0, -2.0), proximal: Any = (-1.5, -2.0), **more: Any) -> dict[str, Any]:
    plain = [list(value) if isinstance(value, tuple) else value for value in (behavior, proximal)]
    return {"logp_behavior": plain[0], "logp_proximal": plain[1], **more}


def lines(path: Path, *data: dict[str, Any] | str) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in data))
    return path


def read(*paths: Path) -> tuple[list[TokenTable], DataSummary]:
    source = open_log(paths)
    return list(source.tables()), source.summary()


def refused(*paths: Path) -> str:
    with pytest.raises(TrimtabError) as caught:
        read(*paths)
    message = str(caught.value)
    assert "\n" not in message
    return message


GOOD = row()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row((-1.0,), (-1.0, -2.0)), "lists of different lengths"),
        (row(None), "no logp_behavior"),
        ({"logp_proximal": [-1.0]}, "no logp_behavior"),
        (row(("a", "b")), "logp_behavior is not a list of numbers"),
        (row(("-1.0", "NaN")), "logp_behavior is not a list of numbers"),
        (row(([-1.0], [-2.0])), "logp_behavior is not a list of numbers"),
        (row(([-1.0], -2.0)), "logp_behavior is not a list of numbers"),
        (row(-1.0), "logp_behavior is not a list of numbers but one number"),
        (row((), ()), "no tokens"),
        (row(loss_mask=[False, False]), "no trained token"),
        (row(loss_mask=[True, None]), "loss_mask holds nulls"),
        (row(response_ids=[1, None]), "response_ids holds nulls"),
        (row((NAN, NAN)), "no finite log-prob at any trained token"),
        (row((-INF, None)), "no finite log-prob at any trained token"),
        (row((-1e300, -INF)), "no finite log-prob at any trained token"),
        (row((NAN, -1.0), loss_mask=[True, False]), "no finite log-prob at any trained token"),
        (row((-1.0, 10**400)), "logp_behavior is not a list of numbers"),
        (row(off_policy=True), "external trace (off_policy)"),
        (row(None, None, off_policy=True), "external trace (off_policy)"),
        ("[1, 2]", "not a JSON object"),
        ("hello", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_row_is_counted_and_the_good_ones_are_read(tmp_path: Path, bad: Any, reason: str) -> None:
    extras = {"loss_mask": [True, True], "response_ids": [1, 2], "off_policy": False}
    used = {name: value for name, value in extras.items() if isinstance(bad, dict) and name in bad}
    good = row(**used)
    (table,), origin = read(lines(tmp_path / "a.jsonl", good, bad, good))
    assert table.starts.tolist() == [0, 2, 4]
    assert table.trainer.tolist() == [-1.5, -2.0, -1.5, -2.0]
    assert origin.dropped == {reason: 1}


def test_every_non_finite_number_is_counted_by_column_and_kind(tmp_path: Path) -> None:
    data = [
        row((-1.0, NAN), (-1.0, -2.0)), row((-INF, -INF), (-1.0, INF)), row(entropy=[1.0, NAN]),
        row((-1.0, NAN), (NAN, -2.0), loss_mask=[True, False]),
    ]  # fmt: skip
    whole = [{"entropy": [1.0, 1.0], "loss_mask": [True, True], **item} for item in (*data, GOOD)]
    (table,), origin = read(lines(tmp_path / "a.jsonl", *whole))
    assert origin.nonfinite == {
        "logp_behavior nan": 1, "logp_behavior -inf": 2, "logp_proximal inf": 1, "logp_proximal nan": 1,
        "entropy nan": 1,
    }  # fmt: skip
    assert origin.dropped == {"no finite log-prob at any trained token": 2}
    assert np.diff(table.starts).tolist() == [1, 1, 2]
    assert table.behavior.tolist() == [-1.0, *GOOD["logp_behavior"][:1], *GOOD["logp_behavior"]]
    assert any("not finite: 4;" in found.text for found in origin.findings)


@pytest.mark.parametrize("low", [-3.4028235e38, -1e30, -1e9])
def test_the_lowest_float_of_a_mask_is_minus_infinity(tmp_path: Path, low: float) -> None:
    (table,), origin = read(lines(tmp_path / "a.jsonl", row((low, -2.0)), row((-2.0, -1.0), (-9999.0, 1e30))))
    assert origin.nonfinite == {"logp_behavior -inf": 1, "logp_proximal inf": 1}
    assert table.behavior.tolist() == [-2.0, -2.0]
    assert table.trainer.tolist() == [GOOD["logp_proximal"][1], -9999.0]


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30, 0.0])
def test_values_at_untrained_tokens_do_not_matter(tmp_path: Path, garbage: float) -> None:
    data = row((-1.0, garbage, -3.0), (-1.0, garbage, -3.0), loss_mask=[True, False, True], entropy=[1.0, garbage, 1.0])
    (table,), origin = read(lines(tmp_path / "a.jsonl", data))
    assert table.behavior.tolist() == [-1, 0, -3]
    assert table.trainer.tolist() == [-1, 0, -3]
    assert values(table, "entropy") == [1, 0, 1]
    assert not origin.dropped
    assert not origin.nonfinite


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        # A log-prob above 0 by rounding is none.
        ([row((-1.0, 0.7), (-1.0, 1e-6)), GOOD], "1 of 4 values of logp_behavior are above 0 (largest 0.7)"),
        ([row(reward="1.0"), row(reward=1.0), row(reward=None)], "reward is not a finite number in 2 of 3 responses"),
        ([row((-1.0, -2.0), (-1.0, -2.0))], "logp_proximal equals logp_behavior bit for bit at all 2 trained tokens"),
        ([row((0.0, 0.0))], "logp_behavior is 0 at every trained token: the sampler reported no log-probs"),
        ([row((-1.0, -2.0), (-1.0, -2.0)), GOOD], None),
    ],
)
def test_odd_values_are_a_finding(tmp_path: Path, rows: list[dict[str, Any]], text: str | None) -> None:
    _, origin = read(lines(tmp_path / "a.jsonl", *rows))
    assert [found.text.startswith(text or "") for found in origin.findings] == [True] * (text is not None)


@pytest.mark.parametrize(
    ("more", "reason"),
    [(json.dumps(GOOD).encode()[:30], "unfinished last line"), (b'{"text": "\xff\xfe"}\n', "not UTF-8")],
)
def test_a_line_that_is_not_whole_is_counted(tmp_path: Path, more: bytes, reason: str) -> None:
    path = lines(tmp_path / "a.jsonl", GOOD)
    path.write_bytes(path.read_bytes() + more)
    (table,), origin = read(path)
    assert table.responses == 1
    assert origin.dropped == {reason: 1}


def test_one_empty_file_among_others_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("")
    _, origin = read(lines(tmp_path / "a.jsonl", GOOD), tmp_path / "b.jsonl")
    assert tuple(found.text for found in origin.findings) == ("files left out: 1 empty",)
    assert origin.files == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x00\x01\x02", "neither a parquet, an arrow, a JSON, a CSV nor a torch file"),
        ("a.txt", b"hello", "neither a parquet, an arrow, a JSON, a CSV nor a torch file"),
        ("a.txt.gz", gzip.compress(b"hello", mtime=0), "a JSON, a CSV nor a torch file below its gzip"),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "is compressed: unpack it first"),
        ("a.zst", b"\x28\xb5\x2f\xfd", "compressed with zstd"),
        ("a.npz", b"PK\x03\x04", "holds numpy arrays, whose rows and padding nothing tells: write a parquet or JSONL"),
        ("a.npy", b"\x93NUMPY", "holds numpy arrays"),
        ("a.jsonl", "{}".encode("utf-16"), "is UTF-16: write it as UTF-8"),
        ("a.csv", "x".encode("utf-16"), "is UTF-16: write it as UTF-8"),
        ("a.pkl", b"\x80\x04N.", "a pickle, which is not opened"),
        ("a.parquet", b"hello", "damaged or unfinished"),
        ("a.pt", b"hello", "cannot be read"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"  \n\n", "is empty"),
        ("a.jsonl", b"nothing here\n", "holds no rows that can be read"),
        ("a.jsonl", b"[]", "holds no rows that can be read"),
        ("a.jsonl", b"[1, 2]\n[3]\n", "goes on after its array"),
        ("a.jsonl", json.dumps({"a": 1}).encode(), "has no logp_behavior"),
        ("a.jsonl", json.dumps(row(None, None)).encode(), r"nothing to diagnose in .*: 1 x no logp_behavior"),
        ("a.jsonl.gz", gzip.compress(json.dumps(GOOD).encode() * 9, mtime=0)[:-9], "damaged or unfinished gzip"),
        ("a.json", b"[" + json.dumps(GOOD).encode() + b', {"logp', "row 2 is not JSON or unfinished"),
        ("a.json", b"[" + json.dumps(GOOD).encode() + b', {"a": "\xff"}]', "is not UTF-8"),
        ("a.csv", b'logp_behavior,logp_proximal\n"[-1.0]","[-1.5]"\n"[-1', "row 2 is not CSV"),
        ("a.csv", b"logp_behavior,logp_proximal\n[-1.0],[-1.5]\n\xff,\xfe\n", "is not UTF-8"),
        ("a.csv", b"x,x\n1,2\n", "two columns of one name"),
        ("a.csv", b"logp_behavior,logp_proximal\n", "holds no rows that can be read"),
    ],
)
def test_a_file_of_another_kind_or_without_data_is_one_clear_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(message, refused(tmp_path / name))


def test_missing_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    assert "no file" in refused(tmp_path / "absent.parquet")
    assert "holds no parquet" in refused(tmp_path)
    assert "no file given" in refused()
    for name in ("metrics.jsonl", "config.toml"):
        (tmp_path / name).write_text("{}")
    assert "kept no trajectories" in refused(tmp_path)


def parquet(path: Path, data: dict[str, Any]) -> Path:
    pq.write_table(pa.table(data), path)
    return path


def test_a_parquet_file_of_no_rows_and_of_one(tmp_path: Path) -> None:
    kind = pa.list_(pa.float32())
    empty = {name: pa.array([], kind) for name in GOOD}
    one = {name: pa.array([[-1.0]], kind) for name in GOOD}
    assert "the files hold no rows" in refused(parquet(tmp_path / "a.parquet", empty))
    (table,), _ = read(parquet(tmp_path / "a.parquet", one))
    assert table.starts.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([["a"], ["b"]]), "logp_behavior is not a list of numbers"),
        (pa.array(["a", "b"]), "logp_behavior is not a list of numbers"),
        (pa.array([-1.0, -2.0]), "logp_behavior is not a list of numbers but one number"),
        (pa.array([None, None]), "no logp_behavior"),
        (pa.array([None, None], pa.list_(pa.float32())), "no logp_behavior"),
        (pa.array([[None], [None]], pa.list_(pa.null())), "no finite log-prob at any trained token"),
        (pa.array([[[-1.0]], [[-2.0]]]), "logp_behavior is not a list of numbers"),
    ],
)
def test_a_column_of_another_type_names_the_loss(tmp_path: Path, column: pa.Array, reason: str) -> None:
    path = parquet(tmp_path / "a.parquet", {"logp_behavior": column, "logp_proximal": [[-1.0], [-2.0]]})
    assert f"2 x {reason}" in refused(path)


_KINDS = (pa.float64(), pa.float32(), pa.float16(), pa.int64(), pa.decimal128(10, 4))


@pytest.mark.parametrize(
    "kind", [*map(pa.list_, _KINDS), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2)], ids=str
)
def test_any_list_of_numbers_is_accepted(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(np.array([-1, -2, -3, -4], np.float16)).cast(pa.float64()).cast(kind.value_type)
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), column).cast(kind)
    path = parquet(tmp_path / "a.parquet", {"logp_behavior": lists, "logp_proximal": [[-1.0, -2.0], [-3.5, -4.0]]})
    (table,), _ = read(path)
    assert table.behavior.tolist() == [-1, -2, -3, -4]


def test_columns_that_only_some_files_have(tmp_path: Path) -> None:
    plain = lines(tmp_path / "a.jsonl", GOOD)
    entropy = lines(tmp_path / "b.jsonl", row(entropy=[1.0, 1.0]))
    (table,), origin = read(plain, entropy)
    assert table.responses == 2
    assert table.entropy is None
    assert tuple(found.text for found in origin.findings) == ("entropy is in 1 of 2 files only and was left out",)
    current = lines(tmp_path / "c.jsonl", {"logp_behavior": [-1.0], "logp_current": [-1.0]})
    assert "has no logp_proximal" in refused(plain, current)


def test_a_torch_file_of_objects_is_not_opened(tmp_path: Path) -> None:
    torch.save({"samples": [Path("/")]}, tmp_path / "a.pt")
    assert "which are not opened" in refused(tmp_path / "a.pt")
    torch.save({"samples": [{"rollout_log_probs": np.array([Path("/")])}]}, tmp_path / "a.pt")
    assert "which are not opened" in refused(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "payload",
    [
        [1, 2],
        {},
        {"samples": [1]},
        {"samples": []},
        {"rollout_data": {}},
        {"a": torch.zeros(3)},
        {1: torch.zeros(2, 2)},
    ],
)
def test_a_torch_file_of_another_shape_is_one_clear_line(tmp_path: Path, payload: Any) -> None:
    torch.save(payload, tmp_path / "a.pt")
    refused(tmp_path / "a.pt")


def test_ambiguous_padding_is_refused(tmp_path: Path) -> None:
    torch.save({name: torch.zeros(2, 3) for name in ("rollout_log_probs", "old_log_probs")}, tmp_path / "a.pt")
    assert "tells tokens from padding" in refused(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("values", "meant"),
    [((0.5, 0.25), "probabilities"), ((0.5, 2.5), "Change their sign"), ((124.0, -8.0, 1.0), "log_softmax")],
)
def test_a_column_above_zero_is_refused_with_its_range(tmp_path: Path, values: tuple[float, ...], meant: str) -> None:
    message = refused(lines(tmp_path / "a.jsonl", *[row(values, (-0.7,) * len(values))] * 3))
    share = sum(value > 0 for value in values) / len(values)
    assert f"logp_behavior is above 0 at {share:.0%} of the trained tokens" in message
    assert f"(from {min(values):.3g} to {max(values):.3g})" in message
    assert "--columns logp_behavior=COLUMN" in message
    assert [word in message for word in ("probabilities", "Change their sign", "log_softmax")].count(True) == 1
    assert meant in message


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_of_one_token_a_row_says_to_join_them(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"tokens.{kind}"
    if kind == "csv":
        path.write_text("response,logp_behavior,logp_proximal\n0,-0.5,-0.6\n0,-1.0,-1.1\n1,-2.0,-2.1\n")
    else:
        parquet(path, {"logp_behavior": [-0.5, -1.0, -2.0], "logp_proximal": [-0.6, -1.1, -2.1]})
    message = refused(path)
    assert "3 x logp_behavior is not a list of numbers but one number (first: row 1 of" in message
    assert "join the tokens of each response to one row" in message
    assert "--columns" not in message


def test_numbers_as_text_are_read_and_a_word_among_them_is_shown(tmp_path: Path) -> None:
    text = row(("-1.0", "-2.0"), ("-1.5", "-2.5"), response_ids=["7", "8"])
    (table,), origin = read(lines(tmp_path / "a.jsonl", row(response_ids=[7, 8]), text, row((-1.0, "NaN"))))
    assert table.behavior.tolist() == [-1, -2, -1, -2]
    assert table.proximal.tolist() == [-1.5, -2, -1.5, -2.5]
    assert table.ids.tolist() == [7, 8, 7, 8]
    assert origin.dropped == {"logp_behavior is not a list of numbers": 1}
    assert any("'NaN' at place 2 of 2" in found.detail for found in origin.findings)


@pytest.mark.parametrize("column", ["logp_behavior", "both"])
def test_columns_of_whole_numbers_are_a_finding_and_have_no_cause(tmp_path: Path, column: str) -> None:
    rng = np.random.default_rng(0)
    behavior = np.round(-rng.exponential(2.0, (20, 50)))
    proximal = np.round(behavior - 0.3) if column == "both" else behavior - 0.3 * rng.random(behavior.shape)
    data = [row(tuple(b), tuple(p)) for b, p in zip(behavior.tolist(), proximal.tolist(), strict=True)]
    diagnosis = diagnose(lines(tmp_path / "a.jsonl", *data))
    [found] = [one for one in diagnosis.answer.findings if one.name == "whole numbers"]
    assert found.status == "fail"
    assert ("logp_proximal" in found.detail) == (column == "both")
    assert diagnosis.causes == ()
    assert diagnosis.measured.size.floor > 0.01


@pytest.mark.parametrize(
    "content",
    [
        '{"_step": 1, "train/loss": 0.5}\n',
        "Step,run - train/kl,run - train/kl__MIN\n1,0.5,0.5\n",
        "Wall time,Step,Value\n1.0,1,0.5\n",
        '{"log_history": []}\n',
    ],
)
def test_a_file_of_metrics_names_the_option_for_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / ("a.jsonl" if content.startswith("{") else "a.csv")
    path.write_text(content)
    assert f"--scalars {path}" in refused(path)
    tokens = lines(tmp_path / "b.jsonl", {"reward/acc": 1.0, "response_ids": [1]})
    assert "--scalars" not in refused(tokens)
    state = tmp_path / "meta.json"  # of a checkpoint
    state.write_text(json.dumps({"step": 80, "measured": {"mismatch/k3": 0.1}}))
    assert "--scalars" not in refused(state)


def test_another_spelling_of_a_known_column_is_suggested(tmp_path: Path) -> None:
    data = {"rolloutLogProbs": [-1.0], "oldLogProbs": [-1.5]}
    assert "did you mean 'rolloutLogProbs'?" in refused(lines(tmp_path / "a.jsonl", data))
    with pytest.raises(TrimtabError, match="did you mean 'oldLogProbs'"):
        open_log([tmp_path / "a.jsonl"], columns={"logp_behavior": "rolloutLogProbs"})
