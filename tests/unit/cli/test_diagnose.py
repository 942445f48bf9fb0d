"""`trimtab diagnose` in this process: options, outputs and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.commands import Printed

import trimtab
from trimtab.cli import main
from trimtab.cli.diagnose import page_path, parse_columns
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
