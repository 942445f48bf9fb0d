"""Rescoring of dumps: the ids of prompts in every layout, a choice of responses, and log-probs by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.cli.main import run
from trimtab.diagnosis.reading import open_log
from trimtab.errors import TrimtabError
from trimtab.preflight import rescoring as module
from trimtab.preflight.rescoring import encoded, rescore

DATA = Path(__file__).parents[1] / "diagnosis/reading/data"
VOCABULARY = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with random weights, without a tokenizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, **sizes)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def expected(model: Path, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    logits = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([prompt + ids])).logits[0]
    logp = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return logp.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    """Responses of 1 to 9 tokens after prompts of 1 to 4."""
    rng = np.random.default_rng(0)
    found = []
    for index in range(count):
        length = int(rng.integers(1, 10))
        prompt, ids = (rng.integers(0, VOCABULARY, size).tolist() for size in (int(rng.integers(1, 5)), length))
        logps = {"logp_behavior": [-1.5] * length, "logp_proximal": [-1.25] * length}
        found.append({"prompt_ids": prompt, "response_ids": ids, "step": index % 3, "reward": 0.5, **logps, **more})
    return found


def lines(path: Path, data: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def test_each_token_gets_its_log_prob_in_any_batch_and_in_parts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(6)
    dump = lines(tmp_path / "a.jsonl", data)
    for tokens in (4, 16, 1024):  # responses in parts, small batches, one batch
        monkeypatch.setattr(module, "TOKENS", tokens)
        result = rescore([dump], str(model)).to_pylist()
        for given, scored in zip(data, result, strict=True):
            assert scored["prompt_ids"] == given["prompt_ids"]
            assert scored["response_ids"] == given["response_ids"]
            wanted = expected(model, given["prompt_ids"], given["response_ids"])
            assert scored["logp_rescored"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("given", "option", "used"), [(0.5, None, 0.5), (None, 0.5, 0.5), (2.0, 0.5, 0.5)])
def test_the_temperature_is_that_of_the_data_or_the_one_given(
    tmp_path: Path, model: Path, given: float | None, option: float | None, used: float
) -> None:
    data = rows(2, **({} if given is None else {"temperature": given}))
    result = rescore([lines(tmp_path / "a.jsonl", data)], str(model), temperature=option).to_pylist()
    wanted = expected(model, data[0]["prompt_ids"], data[0]["response_ids"], used)
    assert result[0]["logp_rescored"] == pytest.approx(wanted, abs=1e-5)


def test_a_limit_chooses_evenly_and_a_step_its_own(tmp_path: Path, model: Path) -> None:
    data = rows(9)
    dump = lines(tmp_path / "a.jsonl", data)
    chosen = rescore([dump], str(model), limit=3).to_pylist()
    assert [row["response_ids"] for row in chosen] == [data[at]["response_ids"] for at in (0, 4, 8)]
    of_step = rescore([dump], str(model), step=1).to_pylist()
    assert [row["response_ids"] for row in of_step] == [data[at]["response_ids"] for at in (1, 4, 7)]
    with pytest.raises(TrimtabError, match="--step 7"):
        rescore([dump], str(model), step=7)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_result_is_read_with_all_columns(tmp_path: Path, model: Path, suffix: str) -> None:
    data = rows(4, sampling={"temperature": 1.0, "top_p": 0.9, "top_k": 5, "logprobs": "raw"})
    result = rescore([lines(tmp_path / "a.jsonl", data)], str(model))
    out = tmp_path / f"b{suffix}"
    out.write_bytes(encoded(result, suffix))
    (first,), (second,) = (list(open_log([path]).tables()) for path in (tmp_path / "a.jsonl", out))
    assert second.columns.keys() - first.columns.keys() == {"rescored"}
    for name, values in first.columns.items():
        np.testing.assert_array_equal(second.columns[name], values, err_msg=name)
    assert second.prompt_ids is None  # needed for rescoring only


def test_what_is_not_finite_is_null_in_json_lines() -> None:
    values = {"step": [math.nan], "logp_behavior": [[-1.5, math.nan, -math.inf]]}
    assert json.loads(encoded(pa.table(values), ".jsonl")) == {"step": None, "logp_behavior": [-1.5, None, None]}


def test_a_response_with_a_bad_value_is_left_out_whole(tmp_path: Path, model: Path) -> None:
    data = rows(3)
    data[1]["logp_behavior"][0] = None
    result = rescore([lines(tmp_path / "a.jsonl", data)], str(model)).to_pylist()
    assert [row["response_ids"] for row in result] == [data[at]["response_ids"] for at in (0, 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": None}, "no ids of responses"),
        ({"prompt_ids": None}, "3 of 3 responses have no ids of their prompt"),
        ({"prompt_ids": []}, "3 of 3 responses have no ids of their prompt"),
        ({"prompt_ids": "question 7"}, "3 of 3 responses have no ids of their prompt"),
        ({"prompt_ids": [VOCABULARY]}, f"the id {VOCABULARY} is not among the {VOCABULARY}"),
        ({"temperature": 0.0}, "no temperature above 0"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path: Path, model: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrimtabError, match=message) as caught:
        rescore([lines(tmp_path / "a.jsonl", rows(3, **change))], str(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["prime-rl/token_exports", "nemo-rl", "miles/train_data"])
def test_lists_that_begin_with_the_prompt_are_split(name: str) -> None:
    """The ids before the response are those of the file, and all of them."""
    count = 0
    for table in open_log([DATA / name], with_prompts=True).tables():
        assert [len(ids) for ids in table.prompt_ids] == table.prompt_length.astype(int).tolist()
        texts = [ids.tolist() for ids in _whole_ids(DATA / name)]
        for prompt, ids in zip(table.prompt_ids, np.split(table.ids, table.starts[1:-1]), strict=True):
            assert len(prompt)
            assert any(text[: len(prompt) + len(ids)] == [*prompt, *ids] for text in texts)
            count += 1
    assert count


def _whole_ids(folder: Path) -> list[np.ndarray]:
    """The ids of prompt and response of every row in a folder."""
    found = []
    for file in folder.rglob("*"):
        if file.suffix == ".jsonl":
            given = [json.loads(line).get("token_ids") for line in file.read_text().splitlines()]
            found += [np.ravel(ids) for ids in given if ids]
        elif file.suffix == ".pt":
            found += [np.asarray(ids) for ids in torch.load(file, weights_only=True)["rollout_data"]["tokens"]]
    return found


def test_files_without_the_first_token_of_a_prompt_are_refused(model: Path) -> None:
    with pytest.raises(TrimtabError, match="open-instruct"):
        rescore([DATA / "open-instruct-one"], str(model))


def test_bad_arguments_end_with_one_line(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = lines(tmp_path / "a.jsonl", rows(2))
    before = dump.read_bytes()
    for out, word in ((tmp_path / "a.csv", "not a table"), (dump, "is read")):
        assert run(["rescore", str(dump), "--model", str(model), "--out", str(out)]) == 2
        assert word in capsys.readouterr().err
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").write_bytes(b"")
    assert run(["rescore", str(dump), "--model", str(broken), "--out", str(tmp_path / "b.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "b.jsonl").exists()
    assert dump.read_bytes() == before


def test_a_column_of_another_name_holds_the_ids_of_prompts(tmp_path: Path, model: Path) -> None:
    data = [{**row, "ids": row.pop("prompt_ids")} for row in rows(3)]
    table = pa.Table.from_pylist(data)
    pq.write_table(table, tmp_path / "a.parquet")
    result = rescore([tmp_path / "a.parquet"], str(model), columns={"prompt_ids": "ids"})
    assert result.column("prompt_ids").to_pylist() == table.column("ids").to_pylist()
