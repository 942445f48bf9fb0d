"""`trimtab preflight` as a command; what each check finds: see preflight/test_checks.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tests.support import faulty_engines as faults

from trimtab.cli import main
from trimtab.preflight import build_pair

NAMES = [
    *("mismatch", "prefill", "distribution", "batch sizes", "prefix cache"),
    *("sampling settings", "weights", "end tokens", "null update"),
]


def test_a_healthy_pair_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "preflight.html"
    command = ["preflight", "laboratory", "--trainer", "transformers", "--lengths", "8", "20", "--github"]
    assert main.run([*command, "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    assert lines[0].endswith("embedded, float32 | transformers, float32 (laboratory)")
    assert [line[6:].startswith(name) for line, name in zip(lines[1:10], NAMES, strict=True)] == [True] * 9
    assert "at 8 tokens" in lines[1]
    assert "at 20 tokens" in lines[1]
    assert lines[-3].split(maxsplit=1) == ["verdict", "fit to train"]
    record = json.loads((tmp_path / "preflight.receipt.json").read_text())
    assert lines[-2].split(maxsplit=1) == ["receipt", record["sha256"]]
    assert (record["lengths"], record["threads"]) == ([8, 20], torch.get_num_threads())
    html = page.read_text()
    assert all(name in html for name in (*NAMES, "prefill/trainer"))
    assert "fit to train" in html


def test_a_fault_exits_with_1_and_is_annotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_pair.build_engines
    monkeypatch.setattr(build_pair, "build_engines", lambda *rest: [faults.TopToken(build(*rest)[0])])
    page = tmp_path / "preflight.html"
    command = ["preflight", "laboratory", "--dtype", "bfloat16", "--lengths", "20", "--github", "--json"]
    assert main.run([*command, "--html", str(page)]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["ok"], result["bound"], result["page"]) == (False, 1e-2, str(page))
    assert [check["name"] for check in result["checks"]] == NAMES
    assert result["checks"][0]["figures"]["k3"] == pytest.approx(result["lengths"]["20"], rel=1e-6)
    errors = [line for line in printed.err.splitlines() if line.startswith("::")]
    assert errors[0].startswith("::error title=trimtab preflight: mismatch::k3 ")
    assert "%25" in errors[0]
    assert "wrong-token" in page.read_text()
    record = result["receipt"]
    assert record == json.loads(page.with_suffix(".receipt.json").read_text())
    choices = json.dumps({name: record[name] for name in record if name != "sha256"}, sort_keys=True).encode()
    assert hashlib.sha256(choices.replace(b", ", b",").replace(b": ", b":")).hexdigest() == record["sha256"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--html", "model.safetensors"], "--html model.safetensors is not a page"),
        (["--prompts", "missing.txt"], "--prompts missing.txt cannot be read"),
        (["--trainer", "transformers", "--set", "numerics=invariant"], "use --trainer trimtab"),
        (["--lengths"], "--lengths names nothing"),
        (["--sampler", "server"], "engine.server.urls"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["preflight", "laboratory", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
