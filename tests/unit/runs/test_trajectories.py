"""Trajectory files: the public columns by name and type, and every bit back."""

from __future__ import annotations

import io
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.trajectories import multi_turn

from trimtab.errors import TrimtabError
from trimtab.runs import trajectories
from trimtab.runs.trajectories import Row
from trimtab.types import Completion, Problem, Prompt, SamplingParams, Trajectory

CONTRACT = {
    "step": pa.int64(),
    "prompt_id": pa.string(),
    "group": pa.int64(),
    "prompt_ids": pa.list_(pa.int64()),
    "response_ids": pa.list_(pa.int64()),
    "loss_mask": pa.list_(pa.bool_()),
    "logp_behavior": pa.list_(pa.float32()),
    "logp_proximal": pa.list_(pa.float32()),
    "logp_current": pa.list_(pa.float32()),
    "entropy": pa.list_(pa.float32()),
    "policy_version": pa.list_(pa.int64()),
    "proximal_version": pa.int64(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "sampling": pa.struct(
        [("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int64()), ("logprobs", pa.string())]
    ),
}


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def row(**changes: Any) -> Row:
    completion = Completion(
        response_ids=ints(7, 8, 2),
        logp_behavior=floats(-0.1, -1e-30, -12.345678),
        policy_version=ints(4, 4, 5),
        finish_reason="stop",
        text="42\n",
        entropy=floats(0.5, 0.0, 3.25),
    )
    trajectory = Trajectory(
        prompt=Prompt(Problem("add-7", "40+2?", "42", {"source": "made up"}), "Q: 40+2?\nA: ", ints(1, 5)),
        group=3,
        completion=completion,
        sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=16, stop=("\n", "Q:"), stop_ids=(2,)),
        loss_mask=np.array([True, False, True]),
        reward=1.25,
        rewards={"zz/exact": 1.0, "format": 0.25},
    )
    whole = Row(trajectory, floats(-0.2, -0.3, -12.0), floats(-0.25, -0.35, -12.5), -0.5, 5)
    return replace(whole, **changes)


def completed(one: Trajectory, **changes: Any) -> Trajectory:
    """With fields of its completion changed."""
    return replace(one, completion=replace(one.completion, **changes))


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit and type for type; `Problem.extra` is not stored, so it is not compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    if is_dataclass(a):
        names = [field.name for field in fields(a) if field.name != "extra"]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    return a == b


def test_the_public_columns_come_first_with_their_types(tmp_path: Path) -> None:
    path = tmp_path / "trajectories" / "step-000010.parquet"
    trajectories.write(path, [row(), row()], 10)
    schema = pq.read_schema(path)
    assert schema.names[: len(CONTRACT)] == list(CONTRACT)
    for name, kind in CONTRACT.items():
        assert schema.field(name).type.equals(kind), name
    assert [item.name for item in path.parent.iterdir()] == ["step-000010.parquet"]


def test_other_tools_read_the_values(tmp_path: Path) -> None:
    path = tmp_path / "step-000010.parquet"
    trajectories.write(path, [row()], 10)
    result = pq.read_table(path).to_pylist()[0]
    plain = {"step": 10, "prompt_id": "add-7", "group": 3, "proximal_version": 5, "reward": 1.25, "advantage": -0.5}
    plain |= {"prompt_ids": [1, 5], "response_ids": [7, 8, 2], "loss_mask": [True, False, True]}
    plain |= {"policy_version": [4, 4, 5], "entropy": [0.5, 0.0, 3.25], "finish": "stop"}
    plain |= {"text": "42\n", "prompt_text": "Q: 40+2?\nA: "}
    plain |= {"sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprobs": "processed"}}
    assert {name: result[name] for name in plain} == plain
    assert result["logp_behavior"] == [float(np.float32(x)) for x in (-0.1, -1e-30, -12.345678)]
    assert result["logp_proximal"] == [float(np.float32(x)) for x in (-0.2, -0.3, -12.0)]
    assert result["logp_current"] == [-0.25, float(np.float32(-0.35)), -12.5]
    assert dict(result["rewards"]) == {"zz/exact": 1.0, "format": 0.25}


def test_columns_nobody_has_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bare = row(logp_proximal=None, advantage=None, proximal_version=None)
    trajectories.write(path, [bare, bare], 1)
    missing = set(CONTRACT) - set(pq.read_schema(path).names)
    assert missing == {"logp_proximal", "advantage", "proximal_version"}
    result = trajectories.read(path)[1]
    assert (result.logp_proximal, result.advantage, result.proximal_version) == (None, None, None)
    assert same(result.logp_current, bare.logp_current)


def external(**changes: Any) -> Row:
    """A row whose response no policy of the run wrote."""
    known, nothing = row(**changes), floats(*[float("nan")] * 3)
    unknown = completed(known.trajectory, logp_behavior=nothing, policy_version=ints(-1, -1, -1), entropy=None)
    return replace(known, trajectory=replace(unknown, off_policy=True))


def test_external_traces_are_marked_where_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    trajectories.write(path, [row(), external()], 1)
    assert pq.read_schema(path).field("off_policy").type.equals(pa.bool_())
    result = trajectories.read(path)
    assert [item.trajectory.off_policy for item in result] == [False, True]
    assert all(map(same, result, [row(), external()]))
    # Every list has the length of its response, for readers that lay columns side by side.
    table = pq.read_table(path).to_pydict()
    assert [len(entropy) for entropy in table["entropy"]] == [3, 3]
    assert np.isnan(table["entropy"][1]).all()
    assert np.isnan(table["logp_behavior"][1]).all()
    trajectories.write(path, [row()], 1)
    assert "off_policy" not in pq.read_schema(path).names


def test_a_sampled_response_without_entropy_is_still_half_a_column() -> None:
    bare = completed(row().trajectory, entropy=None)
    with pytest.raises(ValueError, match="entropy: 2 of 3 rows have it"):
        trajectories.to_bytes([row().trajectory, external().trajectory, bare])


def test_both_parts_of_a_drift_are_columns_of_their_own(tmp_path: Path) -> None:
    drifted = row(drift=floats(-0.25, np.nan))
    trajectories.write(tmp_path / "a.parquet", [drifted], 1)
    (read,) = pq.read_table(tmp_path / "a.parquet", columns=["drift_mismatch", "drift_staleness"]).to_pylist()
    assert read["drift_mismatch"] == -0.25
    assert np.isnan(read["drift_staleness"])
    assert same(trajectories.read(tmp_path / "a.parquet")[0], drifted)
    with pytest.raises(ValueError, match="drift_mismatch: 1 of 2 rows have it"):
        trajectories.write(tmp_path / "b.parquet", [row(), drifted], 1)


@pytest.mark.parametrize("name", ["logp_proximal", "logp_current", "advantage", "proximal_version"])
def test_half_a_column_and_a_list_of_another_length_are_refused(tmp_path: Path, name: str) -> None:
    whole = row()
    with pytest.raises(ValueError, match=f"{name}: 1 of 2 rows have it"):
        trajectories.write(tmp_path / "a.parquet", [whole, replace(whole, **{name: None})], 1)
    if name.startswith("logp"):
        short = replace(whole, **{name: floats(0, 0)})
        with pytest.raises(ValueError, match=f"{name} of row 1 has 2 entries for 3 response tokens"):
            trajectories.write(tmp_path / "a.parquet", [whole, short], 1)
    assert list(tmp_path.iterdir()) == []


def test_lengths_inside_the_trajectory_are_checked_too() -> None:
    trajectory = row().trajectory
    for short in (
        replace(trajectory, loss_mask=np.array([True])),
        completed(trajectory, policy_version=ints(1)),
        completed(trajectory, sampling_mask=(ints(1),)),
    ):
        with pytest.raises(ValueError, match="of row 0 has 1 entries for 3 response tokens"):
            trajectories.to_bytes([short])


def test_no_rows_is_a_file_too(tmp_path: Path) -> None:
    trajectories.write(tmp_path / "a.parquet", [], 1)
    assert trajectories.read(tmp_path / "a.parquet") == []
    assert trajectories.from_bytes(trajectories.to_bytes([])) == []


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(TrimtabError, match=r"a\.parquet: not a trajectory file written by the trainer"):
        trajectories.read(tmp_path / "a.parquet")
    pq.write_table(pa.table({"step": [1]}), tmp_path / "b.parquet")
    with pytest.raises(TrimtabError, match=r"b\.parquet: .*prompt_id"):
        trajectories.read(tmp_path / "b.parquet")
    with pytest.raises(TrimtabError, match=r"cannot read .*c\.parquet: No such file"):
        trajectories.read(tmp_path / "c.parquet")


@st.composite
def some_trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories of any content; `kept` is there for all or none, `entropy` for all that were sampled or none."""
    with_entropy, with_kept = draw(st.booleans()), draw(st.booleans())
    text = st.text(max_size=4)
    number = st.floats(width=64)

    def array(kind: Any, size: int) -> Any:
        return draw(hnp.arrays(kind, size))

    def one() -> Trajectory:
        size, off_policy = draw(st.integers(0, 4)), draw(st.booleans())
        kept = tuple(array(np.int64, draw(st.integers(0, 3))) for _ in range(size))
        return Trajectory(
            prompt=Prompt(Problem(draw(text), draw(text), draw(text)), draw(text), array(np.int64, 2)),
            group=draw(st.integers(0, 2**62)),
            completion=Completion(
                response_ids=array(np.int64, size),
                logp_behavior=array(np.float32, size),
                policy_version=array(np.int64, size),
                finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                text=draw(text),
                entropy=array(np.float32, size) if with_entropy and not off_policy else None,
                sampling_mask=kept if with_kept else None,
            ),
            sampling=SamplingParams(
                temperature=draw(number),
                top_p=draw(number),
                top_k=draw(st.integers(0, 9)),
                max_tokens=draw(st.integers(1, 9)),
                stop=tuple(draw(st.lists(text, max_size=2))),
                stop_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
                ignore_stop=draw(st.booleans()),
                logprobs=draw(st.sampled_from(["processed", "raw"])),
            ),
            loss_mask=array(np.bool_, size),
            reward=draw(number),
            rewards=draw(st.dictionaries(text, number, max_size=2)),
            off_policy=off_policy,
        )

    return [one() for _ in range(draw(st.integers(0, 3)))]


@given(some_trajectories())
@settings(max_examples=25, deadline=None)
def test_pending_trajectories_come_back_bit_for_bit(pending: list[Trajectory]) -> None:
    loaded = trajectories.from_bytes(trajectories.to_bytes(pending))
    assert len(loaded) == len(pending)
    assert all(map(same, loaded, pending))


def test_records_too_large_for_one_group_of_rows_go_into_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet refuses 2 GiB of a binary column in one group; here a group holds two rows' experts."""
    one = row().trajectory
    size = len(one.prompt.ids) + len(one.completion.response_ids) - 1
    experts = [np.full((size, 3, 2), [number, number + 1], dtype=np.int16) for number in range(5)]
    pending = [completed(one, routed_experts=chosen) for chosen in experts]
    whole = trajectories.to_bytes(pending)
    assert pq.ParquetFile(pa.BufferReader(whole)).num_row_groups == 1
    monkeypatch.setattr(trajectories, "ROW_GROUP_BYTES", 2 * size * 12 + 1)  # records in memory are int16
    cut = trajectories.to_bytes(pending)
    assert pq.ParquetFile(pa.BufferReader(cut)).num_row_groups == 3
    for result, given_ in zip(trajectories.from_bytes(cut), pending, strict=True):
        np.testing.assert_array_equal(result.completion.routed_experts, given_.completion.routed_experts)


def test_sampling_masks_take_few_bytes_are_in_all_rows_or_none_and_as_long_as_they_say() -> None:
    drawn = np.random.default_rng(0)
    sets = tuple(np.sort(drawn.choice(50_000, 200, replace=False)) for _ in range(3))
    one = row().trajectory
    masked = completed(one, sampling_mask=sets)
    data = trajectories.to_bytes([masked])
    assert (len(data) - len(trajectories.to_bytes([one]))) / 600 < 3  # 1.4, and 2 for the two columns; int64 has 8
    with pytest.raises(ValueError, match="kept: 1 of 2 rows have it"):
        trajectories.to_bytes([masked, one])
    table = pq.read_table(pa.BufferReader(data))
    damaged = io.BytesIO()
    pq.write_table(table.set_column(table.column_names.index("kept"), "kept", [[[200, 200, 199]]]), damaged)
    with pytest.raises(TrimtabError, match="600 entries"):
        trajectories.from_bytes(damaged.getvalue())


def test_files_come_back_but_for_the_sets_of_ids(tmp_path: Path) -> None:
    whole = row()
    truncated = replace(whole, trajectory=completed(whole.trajectory, sampling_mask=(ints(1, 2), ints(), ints(3))))
    trajectories.write(tmp_path / "a.parquet", [truncated, truncated], 1)
    first, second = trajectories.read(tmp_path / "a.parquet")
    assert same(first, whole)
    assert same(second, whole)
    assert first.trajectory.completion.logp_behavior.flags.writeable


def test_turns_are_written_and_read_bit_for_bit(tmp_path: Path) -> None:
    void = replace(multi_turn(1, "a..b"), loss_mask=np.zeros(4, dtype=np.bool_))
    rows = [multi_turn(0, "ab..c", version=3), multi_turn(0, "def", version=3), void]
    back = trajectories.from_bytes(trajectories.to_bytes(rows))
    assert all(map(same, back, rows))
    path = tmp_path / "step-000001.parquet"
    trajectories.write(path, [Row(one) for one in rows], 1)
    table = pq.read_table(path)
    assert table["turn"].to_pylist() == [[0, 0, 0, 0, 1], [0, 0, 0], [0, 0, 0, 1]]
    assert np.isnan(table["logp_behavior"][0].as_py()).tolist() == [False, False, True, True, False]
    assert same(trajectories.read(path)[0].trajectory, rows[0])
    trajectories.write(path, [Row(multi_turn(0, "ab"))], 1)
    assert "turn" not in pq.read_schema(path).names
