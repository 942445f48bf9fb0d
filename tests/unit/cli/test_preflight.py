"""`trimtab preflight` as a command; what each check finds: see preflight/test_checks.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support import faulty_engines as faults
from tests.support.commands import Printed

from trimtab.cli import main
from trimtab.preflight import checklist, engine_pair
from trimtab.preflight.engine_pair import Check, EnginePair, ScoredResponses
from trimtab.runs.provenance import versions

NAMES = [
    *("mismatch", "prefill", "distribution", "batch sizes", "prefix cache"),
    *("sampling settings", "weights", "end tokens", "training mode"),
]


def test_a_healthy_pair_exits_with_0(tmp_path: Path, printed: Printed) -> None:
    page = tmp_path / "preflight.html"
    command = ["preflight", "laboratory", "--trainer", "transformers", "--lengths", "8", "20"]
    lines = printed(*command, "--html", str(page)).splitlines()
    assert len(lines) == 12
    assert lines[0].endswith("embedded, float32 | transformers, float32 (laboratory)")
    assert [line[6:].startswith(name) for line, name in zip(lines[1:10], NAMES, strict=True)] == [True] * 9
    assert "at 8 tokens" in lines[1]
    assert "at 20 tokens" in lines[1]
    assert lines[-2].split(maxsplit=1) == ["verdict", "fit to train"]
    html = page.read_text()
    assert all(name in html for name in NAMES)
    assert "fit to train" in html


def test_a_fault_exits_with_1(tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    build = engine_pair.build_engines
    monkeypatch.setattr(engine_pair, "build_engines", lambda *rest: [faults.TopToken(build(*rest)[0])])
    page = tmp_path / "preflight.html"
    command = ["preflight", "laboratory", "--dtype", "bfloat16", "--lengths", "20", "--json"]
    result = json.loads(printed(*command, "--html", str(page), code=1))
    assert (result["ok"], result["bound"], result["page"]) == (False, 1e-2, str(page))
    assert [check["name"] for check in result["checks"]] == NAMES
    assert result["checks"][0]["figures"]["k3"] == pytest.approx(result["lengths"]["20"], rel=1e-6)
    assert "wrong-token" in page.read_text()
    assert dict(one.split() for one in result["versions"].split(", ")) == versions("embedded")


def test_each_line_is_printed_when_its_check_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def watched(pair: EnginePair, samples: Mapping[int, ScoredResponses]) -> Check:
        printed = capsys.readouterr()
        seen.extend((printed.out.splitlines(), printed.err.splitlines()))
        return real.run(pair, samples)

    real = checklist.CHECKS["distribution"]
    monkeypatch.setattr(checklist, "CHECKS", {**checklist.CHECKS, "distribution": real._replace(run=watched)})
    assert main.run(["preflight", "laboratory", "--lengths", "8"]) == 0
    before, steps = seen
    assert [line.split(maxsplit=2)[:2] for line in before[1:]] == [["ok", "mismatch"], ["ok", "prefill"]]
    assert steps == ["trimtab preflight: responses of 8 tokens"]
    after = capsys.readouterr().out.splitlines()
    assert len(after) == 8  # the other checks and the verdict
    assert all(line[24] == " " != line[25] for line in [*before, *after])  # one column


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--html", "model.safetensors"], "--html model.safetensors is not a page"),
        (["--prompts", "missing.txt"], "--prompts missing.txt cannot be read"),
        (["--trainer", "transformers", "--set", "numerics=invariant"], "use --trainer trimtab"),
        (["--lengths"], "--lengths names nothing"),
        (["--sampler", "server"], "engine.server.urls"),
        (["--url", "http://127.0.0.1:8000"], "the sampler is embedded: add --sampler server"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, printed: Printed) -> None:
    [line] = printed("preflight", "laboratory", *words, code=2).splitlines()
    assert message in line
