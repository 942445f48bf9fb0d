"""Trimtab's own files, also of several turns, and columns named by the user."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.token_tables import values
from tests.support.trajectories import multi_turn, trajectory
from tests.unit.diagnosis.reading.test_bad_input import read, refused

from trimtab.cli.diagnose import Framework
from trimtab.diagnosis.pipeline import diagnose
from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.reading.layouts import LAYOUTS
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError
from trimtab.runs import trajectories
from trimtab.runs.trajectories import Row


def rows(count: int, *, seed: int = 0, step: int = 1) -> list[dict[str, Any]]:
    """Rows of the documented format, two a group, 1 to 9 tokens long."""
    rng = np.random.default_rng(seed)
    result = []
    for index in range(count):
        length = int(rng.integers(1, 10))
        behavior = -rng.exponential(1, length).astype(np.float32)
        result.append(
            {
                "step": step, "prompt_id": f"q{index // 2}", "group": index // 2, "prompt_ids": [1, 2],
                "response_ids": rng.integers(0, 90, length).tolist(), "loss_mask": [True] * length,
                "logp_behavior": behavior.tolist(), "logp_proximal": (behavior * np.float32(1.01)).tolist(),
                "entropy": rng.random(length).astype(np.float32).tolist(), "policy_version": [step - 1] * length,
                "proximal_version": step, "reward": float(rng.random()), "advantage": float(rng.random()),
                "sampling": {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "logprobs": "raw"},
            }
        )  # fmt: skip
    return result


def write_parquet(path: Path, data: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(data), path)
    return path


def write_lines(path: Path, data: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def arrays(table: TokenTable) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(table).items() if value is not None}


def test_every_column_is_read(tmp_path: Path) -> None:
    data = rows(6)
    (table,), origin = read(write_parquet(tmp_path / "a.parquet", data))

    def flat(name: str) -> list[Any]:
        return [value for row in data for value in row[name]]

    assert origin.framework == "trimtab"
    assert dict(origin.missing) == {}
    assert (origin.responses, origin.tokens, origin.trained) == (6, len(flat("response_ids")), len(flat("loss_mask")))
    assert table.behavior.dtype == np.float32
    np.testing.assert_array_equal(table.behavior, np.array(flat("logp_behavior"), np.float32))
    np.testing.assert_array_equal(table.trainer, np.array(flat("logp_proximal"), np.float32))
    np.testing.assert_array_equal(table.entropy, np.array(flat("entropy"), np.float32))
    np.testing.assert_array_equal(table.ids, flat("response_ids"))
    np.testing.assert_array_equal(table.version, flat("policy_version"))
    np.testing.assert_array_equal(np.diff(table.starts), [len(row["response_ids"]) for row in data])
    for name, value in (("reward", table.reward), ("advantage", table.advantage)):
        np.testing.assert_array_equal(value, [row[name] for row in data])
    assert arrays(table)["group"].tolist() == [0, 0, 1, 1, 2, 2]
    for name, value in (("temperature", 0.8), ("top_p", 0.9), ("top_k", 5), ("raw", True), ("proximal_version", 1)):
        assert set(arrays(table)[name].tolist()) == {value}


@pytest.mark.parametrize("tokens", [1, 7, 40, 10_000])
def test_lines_and_parquet_give_the_same_chunks_of_whole_responses(tmp_path: Path, tokens: int) -> None:
    data = rows(60)
    whole = next(iter(open_log([write_parquet(tmp_path / "a.parquet", data)]).tables()))
    for path in (tmp_path / "a.parquet", write_lines(tmp_path / "a.jsonl", data)):
        tables = list(open_log([path]).tables(tokens))
        assert max(table.tokens for table in tables) <= max(2 * tokens, 9)
        for name, value in arrays(whole).items():
            if name != "starts":
                np.testing.assert_array_equal(np.concatenate([arrays(table)[name] for table in tables]), value)
        lengths = np.concatenate([np.diff(table.starts) for table in tables])
        np.testing.assert_array_equal(lengths, np.diff(whole.starts))


def test_a_run_is_read_in_the_order_of_its_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")  # no tokens in it, and it must not be taken for them
    for step in (10, 2, 1):
        write_parquet(folder / f"step-{step}.parquet", rows(4, seed=step, step=step))
    for path in (tmp_path / "run", folder):
        (table,) = open_log([path]).tables()
        assert values(table, "step") == [1] * 4 + [2] * 4 + [10] * 4
        assert values(table, "group") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]  # group 0 of each step is another one


def test_the_trainers_own_files_are_read(tmp_path: Path) -> None:
    plain, current = trajectory(0, [3, 4]), np.array([-0.5, -1.5], np.float32)
    rows = [Row(one, logp_current=current) for one in (plain, replace(plain, off_policy=True), plain)]
    trajectories.write(tmp_path / "step-1.parquet", rows, step=1)
    (table,), origin = read(tmp_path / "step-1.parquet")
    assert table.trainer.tolist() == [-0.5, -1.5, -0.5, -1.5]
    assert origin.anchor == "current"
    assert origin.dropped == {"external trace (off_policy)": 1}
    assert origin.missing.keys() >= {"proximal_version", "advantage"}


def test_columns_can_be_named_and_left_out(tmp_path: Path) -> None:
    row = {"rollout_lp": [-1.0, -2.0, -3.0], "train_lp": [-1.5, -2.0, -3.0], "m": [1, 0, 1]}
    data = [row | {"toks": [9, 9, 1, 2, 3], "n": 3}]
    for path in (write_parquet(tmp_path / "a.parquet", data), write_lines(tmp_path / "a.jsonl", data)):
        columns = {"logp_behavior": "rollout_lp", "logp_proximal": "train_lp", "loss_mask": "m"}
        source = open_log([path], columns=columns | {"response_ids": "toks", "response_length": "n"})
        (table,) = source.tables()
        assert source.summary().framework == "columns"
        assert table.trainer.tolist() == [-1.5, 0, -3]
        assert table.mask.tolist() == [True, False, True]
        assert values(table, "ids") == [1, 2, 3]


def test_lists_and_masks_that_begin_with_the_prompt_are_cut_to_the_response(tmp_path: Path) -> None:
    row = {
        "logp_behavior": [-9.0, -1.0, -2.0], "logp_proximal": [-1.5, -2.5], "padding_mask": [1, 1, 1],
        "response_length": 2, "prompt_length": 0,
    }  # fmt: skip
    (table,) = open_log([write_lines(tmp_path / "a.jsonl", [row])]).tables()
    assert table.behavior.tolist() == [-1.0, -2.0]
    assert table.trainer.tolist() == [-1.5, -2.5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"logp_behaviour": "x"}, "no role 'logp_behaviour' .did you mean 'logp_behavior'"),
        ({"logp_behavior": "rollout_logprobs"}, "no column 'rollout_logprobs' for logp_behavior; its columns are"),
    ],
)
def test_a_wrong_mapping_lists_the_available_columns(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        open_log([write_parquet(tmp_path / "a.parquet", rows(1))], columns=columns)


def test_a_file_named_by_two_paths_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, rows(4))
    monkeypatch.chdir(tmp_path)
    source = open_log([Path("a.parquet"), file])
    assert sum(table.responses for table in source.tables()) == 4
    assert source.summary().files == 1


@pytest.mark.parametrize("shape", ["lines of lists", "parquet of lists", "parquet of nulls"])
@pytest.mark.parametrize("role", ["logp_current", "entropy", "response_ids", "policy_version", "turn"])
def test_a_column_of_tokens_without_any_value_is_left_out(tmp_path: Path, role: str, shape: str) -> None:
    data = rows(30)
    for row in data:
        row[role] = [None] * len(row["logp_behavior"]) if shape.endswith("lists") else None
    write = write_lines if shape.startswith("lines") else write_parquet
    log = open_log([write(tmp_path / f"a.{'jsonl' if shape.startswith('lines') else 'parquet'}", data)])
    tables = list(log.tables(tokens=40))
    summary = log.summary()
    assert sum(table.responses for table in tables) == summary.responses == 30
    assert summary.dropped == {}
    assert [one.detail for one in summary.findings] == [f"left out, since no row has a value: {role}"]


@pytest.mark.parametrize("role", ["step", "proximal_version", "reward", "advantage", "prompt_id", "turn"])
def test_a_column_of_responses_without_any_value_refuses_nothing(tmp_path: Path, role: str) -> None:
    data = [{**row, role: None} for row in rows(30)]
    _, origin = read(write_parquet(tmp_path / "a.parquet", data))
    assert origin.responses == 30
    kind = "not a number" if role in ("reward", "advantage") else "columns"
    assert [one.name for one in origin.findings] == ([] if role == "prompt_id" else [kind])


def test_two_columns_without_any_value_are_left_out_and_those_with_some_values_named(tmp_path: Path) -> None:
    data = [{**row, "logp_proximal": None, "logp_current": row["logp_proximal"], "turn": None} for row in rows(30)]
    _, origin = read(write_parquet(tmp_path / "a.parquet", data))
    assert (origin.responses, origin.anchor) == (30, "current")
    some = [{**row, "logp_rescored": None, "loss_mask": row["loss_mask"]} for row in rows(2)]
    some[0] |= {"logp_rescored": some[0]["logp_behavior"], "loss_mask": [False] * len(some[0]["loss_mask"])}
    message = refused(write_lines(tmp_path / "b.jsonl", some))
    assert "no logp_rescored " in message
    assert message.endswith(" is left out with --columns logp_rescored=)")


@pytest.mark.parametrize("role", ["logp_behavior", "logp_proximal", "loss_mask"])
def test_a_needed_column_without_any_value_refuses_the_file(tmp_path: Path, role: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{**row, role: None} for row in rows(30)])
    assert f"30 x no {role}" in refused(path)


def turn_rows(count: int = 30) -> list[Row]:
    """Responses of two turns; trainer and sampler differ by .1 in the first turn and by .3 in the second."""
    one = multi_turn(0, "abc...de", version=2)
    trainer = np.array([-1.1] * 3 + [np.nan] * 3 + [-1.3] * 2, dtype=np.float32)
    return [Row(replace(one, group=group), logp_proximal=trainer, proximal_version=4) for group in range(count)]


def test_trajectory_files_of_several_turns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    trajectories.write(path, turn_rows(), 1)
    diagnosis = diagnose(path).measured
    assert (diagnosis.origin.responses, diagnosis.origin.tokens, diagnosis.origin.trained) == (30, 240, 150)
    assert dict(diagnosis.origin.dropped) == {}
    assert dict(diagnosis.origin.nonfinite) == {}
    assert diagnosis.views["turn-number"].log_ratio_mean == pytest.approx([-0.1, -0.3], rel=1e-5)
    assert diagnosis.views["observation"].labels == ("0", "1", "no observation yet")
    assert diagnosis.views["observation"].count.tolist() == [30, 30, 90]
    assert diagnosis.views["version"].labels == ("2",), "the version -1 of an observation has no age"


def test_nulls_at_observations_are_accepted_in_json_lines(tmp_path: Path) -> None:
    line = {"logp_behavior": [-1.0, None, -1.0], "logp_proximal": [-1.1, None, -1.3], "entropy": [0.5, None, 0.5]}
    line |= {"loss_mask": [1, 0, 1], "turn": [0, 0, 1]}
    line |= dict.fromkeys(("reward", "policy_version", "group"))  # as adapters write what they do not know
    path = write_lines(tmp_path / "rollouts.jsonl", [line] * 20)
    (table,), origin = read(path)
    assert origin.findings == ()
    assert {"reward", "policy_version", "group"} <= origin.missing.keys()
    assert table.trainer.tolist() == [np.float32(-1.1), 0, np.float32(-1.3)] * 20
    diagnosis = diagnose(path).measured
    assert (diagnosis.origin.responses, diagnosis.origin.trained, dict(diagnosis.origin.nonfinite)) == (20, 40, {})
    assert diagnosis.views["turn-number"].count.tolist() == [20, 20]


def test_negative_turns_are_dropped_and_counted(tmp_path: Path) -> None:
    good = {"logp_behavior": [-1.0, -1.0], "logp_proximal": [-1.0, -1.1], "turn": [0, 1]}
    path = write_lines(tmp_path / "rollouts.jsonl", [good, good | {"turn": [-1, 0]}])
    assert dict(diagnose(path).measured.origin.dropped) == {"turn is negative": 1}


def test_every_framework_is_named_where_one_is_asked_for() -> None:
    for text in (diagnose.__doc__, Framework.__metadata__[0].help):
        assert [name for name in (*LAYOUTS, "slime") if name not in str(text)] == []
