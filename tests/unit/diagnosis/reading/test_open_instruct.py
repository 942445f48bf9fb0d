"""Files of open-instruct (data/write_open_instruct.py): packed rows, and slices of them by sequence-parallel ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.token_tables import values
from tests.unit.diagnosis.reading.test_frameworks import DATA, read, refusal

from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.watch import Watch, parse_bounds
from trimtab.errors import TrimtabError

NAME = "run_trainer_logprobs_step000003_rank0000{}.jsonl"
WHOLE = DATA / "open-instruct-one/run_trainer_logprobs_step000003.jsonl"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "open-instruct", tmp_path / "run"))


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copies `WHOLE` with each record changed."""
    records = [json.loads(line) for line in WHOLE.read_text().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_packed_rows_are_read_one_sequence_at_a_time() -> None:
    table, origin = read("open-instruct-one")
    record = json.loads(WHOLE.read_text().splitlines()[0])
    assert (origin.framework, origin.anchor, origin.dropped, origin.findings) == ("open-instruct", "proximal", {}, ())
    assert values(table, "ids") == [30, 31, 32, 33, 40, 41, 50, 51, 52, 53, 54, 60, 61, 62]
    assert table.starts.tolist() == [0, 4, 6, 11, 14]
    assert table.mask.tolist() == [*[True] * 8, False, False, *[True] * 4], "a tool's output is untrained"
    # The first row is 10 11 12 30 31 32 33 10 11 12 40 41, and its lists begin at the second token.
    assert table.behavior[:6].tolist() == pytest.approx(record["vllm_logprobs"][2:6] + record["vllm_logprobs"][9:])
    assert table.trainer[:6].tolist() == pytest.approx(record["trainer_logprobs"][2:6] + record["trainer_logprobs"][9:])
    assert values(table, "version") == [2] * 4 + [1] * 2 + [2] * 8
    assert values(table, "group") == [0, 0, 1, 1], "by the tokens of the prompt, wherever it is in a row"
    assert values(table, "step") == [3] * 4


def test_slices_of_the_ranks_are_joined() -> None:
    whole, _ = read("open-instruct-one")
    table, origin = read("open-instruct")
    assert (origin.files, origin.responses, origin.dropped, origin.findings) == (2, 4, {}, ()), "rollouts are not read"
    # The first token of a slice is in no file: 33 and 54.
    kept = [position for position, token in enumerate(values(whole, "ids")) if token not in (33, 54)]
    for name in ("ids", "mask", "behavior", "trainer", "version"):
        assert values(table, name) == [values(whole, name)[position] for position in kept], name
    assert values(table, "group") == [0, 0, 1, 1]


def test_one_rank_stands_for_all_of_its_rows(run: Path) -> None:
    for ranks in ((3,), (2, 3), (3, 2)):
        source = open_log([run / NAME.format(rank) for rank in ranks])
        assert [values(table, "ids") for table in source.tables()] == [[50, 51, 52, 53, 60, 61, 62]]
    (run / NAME.format(2)).unlink()
    with pytest.raises(TrimtabError, match=r"no file .*rank00002\.jsonl"):
        open_log([run])


def test_a_row_of_which_a_slice_is_missing_is_counted(run: Path) -> None:
    for rank in (0, 1):
        path = run / NAME.format(rank)
        text = path.read_text()
        path.write_text(text + (text if rank == 0 else text[:100]))  # the run was killed here
    source = open_log([run])
    assert sum(table.responses for table in source.tables()) == 4
    assert source.summary().dropped == {
        "unfinished last line": 1,
        "its slice in the file of another rank is missing": 1,
    }


def test_rows_of_a_batch_are_told_apart(tmp_path: Path) -> None:
    """Numbers of sequences begin at 1 in each row of a batch: two rows of one sequence each, the second padded."""
    record = {
        "step": 5, "sample_idx": 0, "sp_size": 1, "trainer_model_step": 5,
        "attention_mask": [1, 1, 1, 1, 1, 0], "response_mask": [False, True, True, False, True, False],
        "token_ids": [1, 2, 3, 4, 5, 0], "model_steps": [5, 5, 5, 3, 3, 0],
        "vllm_logprobs": [float("nan"), -1.0, -2.0, float("nan"), -3.0, 1.0],
        "trainer_logprobs": [1.0, -1.5, -2.0, 1.0, -3.5, 1.0],
    }  # fmt: skip
    record |= {f"{name}_shape": [2, 3] for name, value in list(record.items()) if isinstance(value, list)}
    (tmp_path / "r_trainer_logprobs_step000005.jsonl").write_text(json.dumps(record) + "\n")
    source = open_log([tmp_path])
    (table,) = source.tables()
    assert source.summary().dropped == {}
    assert table.starts.tolist() == [0, 2, 3]
    assert table.trainer.tolist() == [-1.5, -2.0, -3.5]
    # The trainer of step 5 has the weights of step 4; those sampled with "5" are the first ones of a resumed run.
    assert values(table, "proximal_version") == [5, 4]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("vllm_logprobs", [-1.0], "lists of different lengths"),
        ("vllm_logprobs_shape", [2, 11], "lists of different lengths"),
        ("token_ids", [["a"], 2], "lists of different lengths"),
        ("attention_mask", ["a"] * 11, "lists of different lengths"),
        ("attention_mask_shape", [1, 1, 11], "lists of different lengths"),
        ("sp_size", 2, "its slice in the file of another rank is missing"),
        ("trainer_model_step", [1], "no proximal_version"),
        ("model_steps", [None] * 11, "no proximal_version"),
    ],
)
def test_a_damaged_row_is_dropped_and_counted(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    def damage(record: dict[str, Any]) -> None:
        if 30 in record["token_ids"]:
            record[name] = value

    source = open_log([changed(tmp_path / WHOLE.name, damage)])
    assert sum(table.responses for table in source.tables()) == 2
    assert source.counts.dropped == {reason: 1 if "list" in reason or "slice" in reason else 2}  # rows, or sequences


def test_one_side_is_refused(tmp_path: Path) -> None:
    message = refusal([DATA / "open-instruct/run_rollouts_000000.jsonl"])
    assert "no logp_proximal, the trainer's log-probs (open-instruct calls it trainer_logprobs)" in message
    assert "--save_trainer_logprobs true" in message

    def older(record: dict[str, Any]) -> None:  # before May 2026
        for name in list(record):
            if name not in ("step", "sample_idx", "sp_size", "trainer_logprobs", "response_mask"):
                del record[name]

    message = refusal([changed(tmp_path / WHOLE.name, older)])
    assert "no logp_behavior, the sampler's log-probs (open-instruct calls it vllm_logprobs)" in message


def test_a_step_of_several_ranks_is_watched_as_one(run: Path) -> None:
    watch = Watch(run, parse_bounds([]))
    (report,) = [report for _ in range(3) for report in watch.poll()]
    assert not isinstance(report, str), report
    assert (report.step, report.figures["sequences"], report.figures["tokens"]) == ("3", 4, 10)
