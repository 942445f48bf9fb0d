"""Texts of token ids, where a tokenizer is on this machine: on the terminal, the page and in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from typer.testing import CliRunner

import trimtab
from trimtab.cli.main import app
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.output.as_text import terminal_text
from trimtab.diagnosis.output.html_page import page
from trimtab.errors import TrimtabError
from trimtab.runs.tokenizers import token_texts

ODD = 7
"""The id at which sampler and trainer disagree: one of sixteen tokens."""
WORDS = {f"w{index}": index for index in range(ODD)} | {"Ġ<seven>": ODD}


def tokenizer(path: Path, words: dict[str, int] = WORDS, decoder: decoders.Decoder | None = None) -> Path:
    result = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    result.decoder = decoder or decoders.ByteLevel()
    path.parent.mkdir(parents=True, exist_ok=True)
    result.save(str(path))
    return path


def responses(path: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(20):
        behavior = -rng.exponential(0.5, 16)
        ids = [*rng.integers(0, ODD, 15).tolist(), ODD]
        trainer = behavior - np.where(np.array(ids) == ODD, 0.7, 0.01)
        rows.append({"logp_behavior": behavior.tolist(), "logp_proximal": trainer.tolist(), "response_ids": ids})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_of(folder: Path, words: dict[str, int] | None = WORDS, model: str = "some/model") -> Path:
    responses(folder / "trajectories" / "step-000001.jsonl")
    (folder / "config.toml").write_text(f'[model]\npath = "{model}"\n')
    if words is not None:
        tokenizer(folder / "model" / "tokenizer.json", words)
    return folder


def where(result: Diagnosis) -> str:
    return next(line for line in terminal_text(result).splitlines() if line.startswith("where"))


@pytest.mark.e2e
def test_the_runs_own_tokenizer_is_found_from_the_run_and_from_its_files(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    for path in (run, run / "trajectories", run / "trajectories" / "step-000001.jsonl"):
        diagnosis = trimtab.diagnose(path)
        assert "token 7 (␣<seven>)" in where(diagnosis)
        assert diagnosis.texts[ODD] == "␣<seven>"
    text = page(diagnosis)
    assert "token 7 (␣&lt;seven&gt;)" in text
    assert "<bdi>␣&lt;seven&gt;</bdi>" in text
    assert "<seven>" not in text


@pytest.mark.e2e
def test_without_a_tokenizer_ids_stand_alone(tmp_path: Path) -> None:
    for path in (responses(tmp_path / "a.jsonl"), run_of(tmp_path / "run", words=None)):
        diagnosis = trimtab.diagnose(path)
        assert "token 7 (6.2% of the tokens" in where(diagnosis)
        assert diagnosis.texts == {}
    assert "seven" not in page(diagnosis)


@pytest.mark.e2e
def test_a_tokenizer_can_be_named(tmp_path: Path) -> None:
    file, data = tokenizer(tmp_path / "model" / "tokenizer.json"), responses(tmp_path / "a.jsonl")
    for name in (file, file.parent, tmp_path):
        assert "token 7 (␣<seven>)" in where(trimtab.diagnose(data, tokenizer=str(name)))
    with pytest.raises(TrimtabError, match=r"no tokenizer.json at 'nobody/nothing'.*nothing is downloaded"):
        trimtab.diagnose(data, tokenizer="nobody/nothing")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(TrimtabError, match=r"broken.json cannot be read"):
        trimtab.diagnose(data, tokenizer=str(broken))


@pytest.mark.e2e
def test_the_model_of_the_recipe_is_looked_up_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "run", words=None, model="some/model")
    cache = tmp_path / "cache" / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    tokenizer(cache / "snapshots" / "abc" / "tokenizer.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "token 7 (␣<seven>)" in where(trimtab.diagnose(run))
    assert "token 7 (␣<seven>)" in where(trimtab.diagnose(responses(tmp_path / "a.jsonl"), tokenizer="some/model"))
    # A folder on this machine comes first.
    local = run_of(tmp_path / "local", words=None, model=str(tokenizer(tmp_path / "m" / "tokenizer.json").parent))
    assert "token 7 (␣<seven>)" in where(trimtab.diagnose(local))


@pytest.mark.e2e
def test_runs_of_two_vocabularies_have_no_texts(tmp_path: Path) -> None:
    one, same = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    other = run_of(tmp_path / "c", {**{f"x{index}": index for index in range(ODD)}, "w0": 8, "eight": ODD})
    assert trimtab.diagnose([one, same]).texts
    assert trimtab.diagnose([one, other]).texts == {}
    assert trimtab.diagnose([one, responses(tmp_path / "alone.jsonl")]).texts == {}


@pytest.mark.e2e
def test_the_option_and_the_json(tmp_path: Path) -> None:
    data = responses(tmp_path / "a.jsonl")
    arguments = ["diagnose", str(data), "--out", str(tmp_path / "a.html"), "--json"]
    done = CliRunner().invoke(app, [*arguments, "--tokenizer", str(tokenizer(tmp_path / "tokenizer.json"))], obj=[])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["token_texts"]["7"] == "␣<seven>"
    assert "&lt;seven&gt;" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("words", "decoder", "shown"),
    [
        # The third is half of a character.
        (
            {"Ġthe": 0, "Ċ": 1, "Ã": 2, "<|im_end|>": 4},
            decoders.ByteLevel(),
            {0: "␣the", 1: "↵", 2: "Ã", 4: "<|im_end|>", 99: "(not in the vocabulary)"},
        ),
        ({"▁the": 0, "re": 1}, decoders.Metaspace(), {0: "␣the", 1: "re"}),
        ({"x": 0, "\u202eabc": 1, "a\x00": 2, "\t": 3}, decoders.Fuse(), {1: "\\u202eabc", 2: "a\\u0000", 3: "⇥"}),
    ],
)
def test_spaces_are_visible_and_signs_that_cannot_be_printed_are_named(
    tmp_path: Path, words: dict[str, int], decoder: decoders.Decoder, shown: dict[int, str]
) -> None:
    file = tokenizer(tmp_path / "model" / "tokenizer.json", words, decoder)
    assert token_texts(file, shown, visible=True) == token_texts(tmp_path, shown, visible=True) == (shown, "")
