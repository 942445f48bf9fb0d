"""Lists in every form that writers give them, files beside the data, and what a refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from tests.support.token_tables import values
from tests.unit.diagnosis.reading.test_bad_input import lines

from trimtab.diagnosis.reading import open_log
from trimtab.diagnosis.reading.batches import as_list, shown
from trimtab.diagnosis.records import DataSummary
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import Finding, TrimtabError

DATA = Path(__file__).parent / "data"
LOGPS = [-0.5, -1.25, 0.0]
OPENAI = [{"token": "a", "logprob": value, "top_logprobs": []} for value in LOGPS]
CHOICE = {"index": 0, "message": {"content": "abc"}, "logprobs": {"content": OPENAI, "refusal": None}}
FORMS: dict[str, Any] = {
    "list": LOGPS,
    "JSON text": "[-0.5, -1.25, 0.0]",
    "numpy text": "[-0.5  -1.25\n  0.  ]",
    "array text": "array([-0.5 , -1.25,  0.  ], dtype=float32)",
    "text of numpy scalars": "[np.float64(-0.5), np.float32(-1.25), np.float64(0.0)]",
    "records": OPENAI,
    "text of records": json.dumps(OPENAI),
    "Python text of records": repr(OPENAI),
    "object of a chat choice": {"content": OPENAI, "refusal": None},
    "chat choice": CHOICE,
    "chat response": {"id": "1", "choices": [CHOICE], "usage": {}},
    "refusal": {"content": None, "refusal": OPENAI},
    "object of a completion": {"tokens": ["a", "b", "c"], "token_logprobs": LOGPS},
    "SGLang": [[-0.5, 7, None], [-1.25, 8, "x"], [0.0, 9, None]],
    "SGLang's object": {"output_token_logprobs": [[-0.5, 7, None], [-1.25, 8, None], [0.0, 9, None]]},
    "SGLang's response": {
        "text": "abc",
        "meta_info": {"id": "1", "output_token_logprobs": [[-0.5, 7, None], [-1.25, 8, None], [0.0, 9, None]]},
    },
    "conversation": [
        {"role": "user", "content": "q"},
        {"index": 0, "logprobs": {"content": OPENAI[:2]}},
        {"role": "tool", "content": "abc", "logprobs": None},
        {"role": "assistant", "content": "c", "logprobs": {"content": OPENAI[2:]}},
    ],
    "vLLM": [{"7": {"logprob": value, "rank": 1}} for value in LOGPS],
}


def read(*paths: Path, **columns: str) -> tuple[TokenTable, DataSummary]:
    source = open_log(paths, columns=columns)
    tables = list(source.tables())
    return TokenTable.concat(tables) if tables else source.summary(), source.summary()  # type: ignore[return-value]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_list_is_read(form: str) -> None:
    assert as_list(FORMS[form]) == LOGPS


@pytest.mark.parametrize(
    "cell",
    [
        "[-0.1 -0.2 ... -0.3]",
        "[-0.1, , -0.2]",
        [{"7": {"logprob": -1.0}, "8": {"logprob": -2.0}}],  # either may have been sampled
        [[-0.5, 7]],
        [CHOICE, CHOICE | {"index": 1}],  # either may be trained on
        [CHOICE, {"logprobs": {"content": "text"}}],
        "[INST] hello [/INST]",
        "[" * 100_000,
    ],
)
def test_what_is_no_list_of_numbers_stays_what_it_is(cell: Any) -> None:
    assert as_list(cell) == cell


def test_text_and_records_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    text, proximal = "[-0.5 -1.25\n 0. ]", [-0.25, -1.0, -0.5]
    lines(tmp_path / "a.jsonl", {"logp_behavior": OPENAI, "logp_proximal": json.dumps(proximal)})
    (tmp_path / "b.csv").write_text(f'logp_behavior,logp_proximal\n"{text}","{proximal}"\n')
    pq.write_table(
        pa.table({"logp_behavior": [OPENAI], "logp_proximal": [json.dumps(proximal)]}), tmp_path / "c.parquet"
    )
    torch.save({"samples": [{"logp_behavior": text, "logp_proximal": torch.tensor(proximal)}]}, tmp_path / "d.pt")
    pyarrow.feather.write_feather(
        pa.table({"logp_behavior": [text], "logp_proximal": [proximal]}), str(tmp_path / "e.arrow")
    )
    for file in sorted(tmp_path.iterdir()):
        table, origin = read(file)
        assert origin.dropped == {}, file.name
        assert table.behavior.tolist() == LOGPS, file.name
        assert table.trainer.tolist() == proximal, file.name


@pytest.mark.parametrize("name", ["sglang", "art"])
def test_responses_of_servers_are_read_beside_the_trainers_log_probs(name: str) -> None:
    table, origin = read(DATA / name)
    assert (origin.framework, origin.anchor, origin.dropped, origin.findings) == ("trimtab", "proximal", {}, ())
    assert table.behavior.tolist() == [-0.5, -1.25, -0.25, -2.0]
    assert table.trainer.tolist() == [-0.75, -1.0, -0.25, -1.5]
    assert table.starts.tolist() == [0, 3, 4]
    if name == "sglang":
        assert values(table, "ids") == [7, 8, 9, 4]
    else:
        assert values(table, "reward") == [1, 0]


def test_a_servers_logprobs_are_not_the_setting_of_that_name(tmp_path: Path) -> None:
    table, origin = read(lines(tmp_path / "a.jsonl", {"logprobs": {"content": OPENAI}, "logp_current": LOGPS}))
    assert table.behavior.tolist() == LOGPS
    assert (table.raw, "sampling" in origin.missing) == (None, True)


def test_a_servers_response_alone_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "abc", "output_ids": [7], "meta_info": {"output_token_logprobs": []}})
    with pytest.raises(TrimtabError, match=r"a\.jsonl has no logp_proximal, .*the sampler's side only: add"):
        read(path)
    two = {"logprobs": [CHOICE, CHOICE | {"index": 1}], "logp_proximal": LOGPS}
    with pytest.raises(TrimtabError, match=r"row 1 of b\.jsonl: \[\{'index': 0.*wanted in each row: a list"):
        read(lines(tmp_path / "b.jsonl", two))


def test_versions_given_as_text_are_read_per_token(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"logp_behavior": [LOGPS], "logp_proximal": [LOGPS], "policy_version": ["[4, 4, 5]"]}
    pq.write_table(pa.table(columns), path)
    table, _ = read(path)
    assert values(table, "version") == [4, 4, 5]


def test_a_refusal_shows_the_cell_and_what_is_wanted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"logp_behavior": "about " + "9" * 500, "logp_proximal": LOGPS})
    with pytest.raises(TrimtabError, match=r"\(first: row 1 of a\.jsonl: 'about 9+\.\.\.9+'\)") as error:
        read(path)
    assert "wanted in each row: a list such as [-0.1, -0.2]" in str(error.value)
    assert len(str(error.value)) < 400
    assert shown({"a": "\x1b[31m"}) == "{'a': '\\x1b[31m'}"  # safe to print


PROMPTED = {"logp_behavior": [-0.5, -1.0], "logp_proximal": [-9.0, -9.0, -9.0, -0.25, -0.75]}


def test_a_list_with_the_prompt_is_cut_where_the_prompt_is_known(tmp_path: Path) -> None:
    plain = {"logp_behavior": [-2.0], "logp_proximal": [-1.5], "prompt_ids": [1, 2]}
    path = lines(tmp_path / "a.jsonl", PROMPTED | {"prompt_ids": [7, 8, 9]}, plain, PROMPTED | {"prompt_ids": [7, 8]})
    table, origin = read(path)
    assert table.behavior.tolist() == [-0.5, -1.0, -2.0]
    assert table.trainer.tolist() == [-0.25, -0.75, -1.5]
    assert values(table, "prompt_length") == [3, 2]
    assert origin.dropped == {"lists of different lengths": 1}  # a prompt of 2 does not explain 3 more values
    with pytest.raises(TrimtabError, match=r"row 1 of b\.jsonl: .* 2, logp_proximal 5\).*prompt_length=COLUMN"):
        read(lines(tmp_path / "b.jsonl", PROMPTED))
    table, _ = read(lines(tmp_path / "c.jsonl", PROMPTED | {"n": 3}), prompt_length="n")
    assert table.trainer.tolist() == [-0.25, -0.75]


def test_files_of_a_folder_without_log_probs_are_left_out(tmp_path: Path) -> None:
    good = {"logp_behavior": [-1.0], "logp_proximal": [-1.5]}
    lines(tmp_path / "train.jsonl", good, good)
    (tmp_path / "config.json").write_text(json.dumps({"lr": 1e-6}))
    (tmp_path / "pretty.json").write_text(json.dumps({"lr": 1e-6}, indent=2))
    lines(tmp_path / "text.jsonl", {"input": "q", "output": "a", "score": 1.0, "step": 3})  # as verl writes
    table, origin = read(tmp_path)
    assert (table.responses, origin.files, origin.framework, origin.dropped) == (2, 1, "trimtab", {})
    text = f"left out: {tmp_path / 'config.json'} holds no log-probs (nor do 2 more files)"
    assert origin.findings == (Finding("note", "left out", text),)
    # A file that is named, or that holds one side only, is still an error.
    with pytest.raises(TrimtabError, match=r"config\.json has no logp_behavior"):
        read(tmp_path / "train.jsonl", tmp_path / "config.json")
    lines(tmp_path / "half.jsonl", {"logp_behavior": [-1.0]})
    with pytest.raises(TrimtabError, match=r"half\.jsonl has no logp_proximal"):
        read(tmp_path)


def test_the_tokens_of_verl_are_read_beside_its_text(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    row = {"responses": [5], "response_mask": [1], "rollout_log_probs": [-1.0], "old_log_probs": [-1.5], "step": 1}
    lines(tmp_path / "tokens" / "1.jsonl", row)
    lines(tmp_path / "1.jsonl", {"input": "q", "output": "a", "score": 1.0, "step": 1})
    table, origin = read(tmp_path)
    assert (table.responses, origin.framework) == (1, "verl")
    assert [finding.name for finding in origin.findings] == ["age"]


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lengths = np.random.default_rng(0).integers(1, 9, 50)
    rows = [{"logp_behavior": [-1.1 * n] * n, "logp_proximal": [-1.5] * n, "step": n} for n in lengths.tolist()]
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(
        str(tmp_path / "saved"), num_shards={"train": 2}
    )
    source = open_log([tmp_path / "saved"])
    tables = list(source.tables(tokens=20))
    origin = source.summary()
    assert (origin.files, origin.responses, origin.findings) == (2, 50, ())
    assert np.concatenate([table.lengths for table in tables]).tolist() == lengths.tolist()
    assert max(table.tokens for table in tables) < 40  # read in blocks
    arrow = sorted((tmp_path / "saved").rglob("*.arrow"))[0]
    arrow.write_bytes(arrow.read_bytes()[:300])
    with pytest.raises(TrimtabError, match="is damaged or unfinished"):
        read(arrow)


TOKENS = [[(7, -1.5, -1.25), (8, -0.5, -0.75)], [], [(9, -2.5, -2.25)]]
COLUMNS = {
    "records": {"logp_behavior": "tokens.q", "logp_proximal": "tokens.p", "response_ids": "tokens.id"},
    "structures": {"logp_behavior": "rollout.q", "logp_proximal": "train.p", "response_ids": "rollout.id"},
}


@pytest.mark.parametrize("shape", sorted(COLUMNS))
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_fields_of_structures_are_columns(tmp_path: Path, kind: str, shape: str) -> None:
    """Lists of structures, and structures of lists; a row that is null or empty is dropped and counted."""
    rows: list[dict[str, Any]] = [{"tokens": [{"id": i, "q": q, "p": p} for i, q, p in row]} for row in TOKENS]
    if shape == "structures":
        rows = [
            {"rollout": {"id": [i for i, *_ in row], "q": [q for _, q, _ in row]}, "train": {"p": [p for *_, p in row]}}
            for row in TOKENS
        ]
    rows.append(dict.fromkeys(rows[0]))
    path, table = tmp_path / f"a.{kind}", pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TrimtabError, match=next(iter(COLUMNS[shape].values())).replace(".", r"\.")):
        open_log([path])  # it says which fields there are
    source = open_log([path], columns=COLUMNS[shape])
    read = TokenTable.concat(list(source.tables()))
    found = zip(read.ids.tolist(), read.behavior.tolist(), read.proximal.tolist(), strict=True)
    assert list(found) == [token for row in TOKENS for token in row]
    assert sum(source.summary().dropped.values()) == 2


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_fields_of_lists_of_a_fixed_size_are_columns(tmp_path: Path, kind: str) -> None:
    record = pa.struct({"id": pa.int64(), "q": pa.float32(), "p": pa.float32()})
    rows = [TOKENS[0], None, TOKENS[0][::-1]]
    cells = [row and [dict(zip(("id", "q", "p"), token, strict=True)) for token in row] for row in rows]
    table, path = pa.table({"tokens": pa.array(cells, pa.list_(record, 2))}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    source = open_log([path], columns=COLUMNS["records"])
    read = TokenTable.concat(list(source.tables(tokens=2)))  # an arrow file is read in slices
    assert (read.ids.tolist(), read.behavior.tolist()) == ([7, 8, 8, 7], [-1.5, -0.5, -0.5, -1.5])
    assert source.summary().responses == 2
