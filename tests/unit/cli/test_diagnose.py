"""`trimtab diagnose` in this process: options, outputs and errors.

With `--redact`, strings and ids planted everywhere are in no output, and in the others without it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.commands import Printed
from tokenizers import Tokenizer, models

import trimtab
from trimtab.cli import main
from trimtab.cli.diagnose import page_path, parse_columns
from trimtab.diagnosis.pipeline import diagnose
from trimtab.diagnosis.redaction import Redaction
from trimtab.errors import TrimtabError

pytestmark = pytest.mark.e2e


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """40 responses of 12 tokens whose log-ratios are noise of 0.1 nats: k3 0.005."""
    random = np.random.default_rng(0)
    behavior = -random.exponential(1.0, (40, 12)).astype(np.float32) - 0.5
    current = np.minimum(behavior + 0.1 * random.standard_normal((40, 12)).astype(np.float32), -1e-3)
    columns = {
        "response_ids": random.integers(0, 50, (40, 12)).tolist(),
        "loss_mask": np.ones((40, 12), dtype=bool).tolist(),
        "logp_behavior": behavior.tolist(),
        "logp_current": current.tolist(),
        "reward": [1.0] * 40,
    }
    pq.write_table(pa.table(columns), tmp_path / "step-000001.parquet")
    return tmp_path / "step-000001.parquet"


def test_json_and_page(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main.run(["diagnose", str(file), "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    values = json.loads(printed.out)
    assert (values["origin"]["rows"], values["origin"]["tokens"]) == (40, 480)
    assert values["mismatch"]["k3"] == pytest.approx(0.005, rel=0.3)
    assert values["report"] == str(out)
    assert f"{480:,} tokens" in out.read_text()
    assert printed.err == ""


def test_a_few_tokens_are_not_called_agreement(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"logp_behavior": [-1.0], "logp_proximal": [-1.1]}\n')
    answer = trimtab.diagnose(path).answer
    assert answer.cause == "1 trained token: too few to tell whether both sides agree"
    assert answer.verdict[0] == ("", f"{answer.cause}.")


def test_python_gives_what_the_command_gives(file: Path) -> None:
    calls: list[tuple[str, int]] = []
    diagnosis = trimtab.diagnose(file, on_progress=lambda what, tokens: calls.append((what, tokens)))
    assert diagnosis.measured.origin.responses == 40
    assert calls[0] == ("reading", 0)
    assert ("reading", 480) in calls
    assert calls[-1][1] == 480


def test_the_page_is_written_to_the_current_folder_by_default(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    text = printed("diagnose", str(file))
    assert (tmp_path / "diagnose.html").is_file()
    assert text.splitlines()[-1].split() == ["page", "diagnose.html"]
    assert page_path(tmp_path) == tmp_path / "diagnose.html"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.parquet"], "missing.parquet"),
        (["DATA", "--framework", "nope"], "nope"),
        (["DATA", "--columns", "logp_behavior"], "OURS=THEIRS"),
        (["DATA", "--columns", "logp_behavior=a,logp_behavior=b"], "twice"),
        (["DATA", "--out", "DATA"], "ends in .html"),
        (["DATA", "--columns", "logp_behavior=absent"], "absent"),
        ([], "FILE"),
        ([""], "an argument is empty"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_bytes()
    words = [str(file) if word == "DATA" else word for word in arguments]
    out = [] if "--out" in words else ["--out", str(tmp_path / "page.html")]
    assert main.run(["diagnose", *words, *out]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.out == ""
    assert file.read_bytes() == before
    assert not (tmp_path / "page.html").exists()


def test_column_pairs() -> None:
    assert parse_columns(["a=b", "c = d, e=f=g", "h="]) == {"a": "b", "c": "d", "e": "f=g", "h": ""}
    for wrong in ("", "a", "=b"):
        with pytest.raises(TrimtabError, match="not a pair"):
            parse_columns([wrong])


IDS = (731_001, 731_002, 731_003)
"""Of six digits, which neither the count of anything here nor a hash of five signs has."""
PLACES = ("RUN", "FILE", "STRAY", "CELL", "TOKEN", "DTYPE", "QUANT", "PROMPT", "TEXT", "COLUMN", "PAGE")
MARK = "Zzyzx"


def planted(folder: Path, scale: float) -> Path:
    """A run whose folder, files, recipe, cells, prompts and token texts hold marks; the third id holds most of k3."""
    run = folder / f"{MARK}RUN"
    data = run / "trajectories"
    data.mkdir(parents=True)
    (run / "model").mkdir()
    vocabulary = {f"{MARK}TOKEN{id_}": id_ for id_ in IDS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{MARK}TOKEN{IDS[0]}"))
    tokenizer.save(str(run / "model" / "tokenizer.json"))
    recipe = f'[model]\ndtype = "{MARK}DTYPE"\nautocast = "none"\n[engine]\ntype = "embedded"\ndtype = "float32"\n'
    (run / "config.toml").write_text(f'{recipe}quantize = "{MARK}QUANT"\n')
    (data / f"{MARK}STRAY.jsonl").write_text(json.dumps({f"{MARK}COLUMN": f"{MARK}TEXT"}) + "\n")
    random = np.random.default_rng(0)
    rows = []
    for index in range(40):
        ids = random.choice(IDS, 30, p=(0.6, 0.3, 0.1))
        behavior = -0.5 - random.exponential(1.0, 30)
        trainer = behavior + np.where(ids == IDS[2], 6 * scale, scale) * random.standard_normal(30)
        row: dict[str, Any] = {
            "response_ids": ids.tolist(),
            "logp_behavior": behavior.tolist(),
            "logp_proximal": trainer.tolist(),
            "prompt_id": f"{MARK}PROMPT{index // 4}",
            "completion": f"{MARK}TEXT",
        }
        rows.append(row)
    rows.append({**rows[0], "logp_behavior": f"{MARK}CELL"})
    rows.append({**rows[0], "logp_proximal": [-1.0]})
    (data / f"{MARK}FILE.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return planted(tmp_path_factory.mktemp("one"), 0.1), planted(tmp_path_factory.mktemp("two"), 0.05)


def outputs(runs: tuple[Path, ...], folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """What each form of output holds, standard error and page included: of the first run, then against the others."""
    page = folder / f"{MARK}PAGE.html"
    result = {}
    for against in ([], *(["--against", str(other)] for other in runs[1:])):
        for form in ([], ["--json"], ["--markdown"]):
            assert main.run(["diagnose", str(runs[0]), *against, *form, "--out", str(page), *options]) == 0
            printed = capsys.readouterr()
            result[" ".join([*against[:1], *form]) or "terminal"] = printed.out + printed.err
        result[f"page {against[:1]}"] = page.read_text()
    return result


def found(text: str) -> set[str]:
    """The marks and ids in a text, and paths."""
    marks = {place for place in PLACES if f"{MARK}{place}".lower() in text.lower()}
    if MARK.lower() in text.lower() and not marks:
        marks = {"another"}
    ids = {"ID" for id_ in IDS if re.search(rf"(?<![\d.]){id_:,}(?!\d)|(?<![\d.]){id_}(?!\d)", text)}
    return marks | ids


def test_no_output_holds_a_mark_and_without_the_option_all_do(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {name: found(text) for name, text in outputs(runs[:1], tmp_path, capsys).items()}
    # So that the test can fail: the marks are where they show.
    seen = set().union(*shown.values())
    assert {"RUN", "FILE", "STRAY", "CELL", "TOKEN", "DTYPE", "QUANT", "PAGE", "ID"} <= seen, (
        "marks are where they show"
    )
    assert all(shown.values()), f"each output shows some: {shown}"
    hidden = {name: found(text) for name, text in outputs(runs, tmp_path, capsys, "--redact").items()}
    assert len(hidden) == 8
    assert hidden == {name: set() for name in hidden}


def test_what_remains_is_the_diagnosis(runs: tuple[Path, Path]) -> None:
    whole, redacted = diagnose(runs[0]), diagnose(runs[0], redaction=Redaction())
    assert redacted.measured.size.mismatch == whole.measured.size.mismatch
    assert [cause.name for cause in redacted.causes] == [cause.name for cause in whole.causes]
    assert redacted.measured.origin.dropped == whole.measured.origin.dropped
    found = [finding.text for finding in redacted.measured.origin.findings]
    assert "left out: lists of different lengths, first in row 42" in found
    tokens = redacted.measured.views["token"]
    assert tokens.count.tolist() == whole.measured.views["token"].count.tolist()
    assert len(set(tokens.labels)) == 3
    assert all(re.fullmatch("hash [0-9a-f]{5}", label) for label in tokens.labels)


def test_hashes_are_new_in_every_invocation_and_no_function_of_the_id(runs: tuple[Path, Path]) -> None:
    """Trying all ids against a function that is known, or the same twice, would give the ids."""
    labels = [diagnose(runs[0], redaction=Redaction()).measured.views["token"].labels for _ in range(2)]
    # Two permutations of 2**20 agree at one of three ids in 3e-6 of the cases.
    assert not set(zip(IDS, labels[0], strict=True)) & set(zip(IDS, labels[1], strict=True))


def test_the_reason_of_a_refusal_is_kept_back(runs: tuple[Path, Path], tmp_path: Path, printed: Printed) -> None:
    bad = runs[0] / f"{MARK}FILE.jsonl"
    bad.write_text(json.dumps({"logp_behavior": f"{MARK}CELL", "logp_proximal": [-1.0], f"{MARK}COLUMN": 1}) + "\n")
    for options in ([], ["--columns", f"logp_behavior={MARK}COLUMN"], ["--against", f"{runs[0]}/{MARK}"]):
        arguments = ["diagnose", str(bad), *options, "--out", str(tmp_path / "page.html")]
        assert found(printed(*arguments, code=2))
        error = printed(*arguments, "--redact", code=2)
        assert found(error) == set()
        assert "run again without --redact" in error
        assert error.count("\n") == 1


def test_the_name_of_a_page_that_cannot_be_written_is_kept_back(
    runs: tuple[Path, Path], tmp_path: Path, printed: Printed
) -> None:
    (tmp_path / f"{MARK}FILE").write_text("")
    arguments = ["diagnose", str(runs[1]), "--out", str(tmp_path / f"{MARK}FILE" / f"{MARK}PAGE.html")]
    assert found(printed(*arguments, code=2))
    assert found(printed(*arguments, "--redact", code=2)) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--redact", "--tokenizer", "x"], "leave out --tokenizer"), (["--json", "--markdown"], "leave one out")],
)
def test_options_that_exclude_each_other(options: list[str], message: str, tmp_path: Path, printed: Printed) -> None:
    assert message in printed("diagnose", str(tmp_path), *options, code=2)
