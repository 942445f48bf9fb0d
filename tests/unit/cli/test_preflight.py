"""`trimtab preflight` as a command; what each check finds: see preflight/test_checks.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support import faulty_engines as faults

from trimtab.cli import main
from trimtab.cli.preflight import write_summary
from trimtab.errors import TrimtabError
from trimtab.preflight import build_pair, checklist
from trimtab.preflight.checklist import Preflight
from trimtab.preflight.engine_pair import Check, EnginePair, Outcome, ScoredResponses
from trimtab.runs.provenance import versions

NAMES = [
    *("mismatch", "prefill", "distribution", "batch sizes", "prefix cache"),
    *("sampling settings", "weights", "end tokens", "training mode"),
]


def test_a_healthy_pair_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "preflight.html"
    command = ["preflight", "laboratory", "--trainer", "transformers", "--lengths", "8", "20", "--github"]
    assert main.run([*command, "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert lines[0].endswith("embedded, float32 | transformers, float32 (laboratory)")
    assert [line[6:].startswith(name) for line, name in zip(lines[1:10], NAMES, strict=True)] == [True] * 9
    assert "at 8 tokens" in lines[1]
    assert "at 20 tokens" in lines[1]
    assert lines[-2].split(maxsplit=1) == ["verdict", "fit to train"]
    html = page.read_text()
    assert all(name in html for name in NAMES)
    assert "fit to train" in html


def test_a_fault_exits_with_1_and_is_annotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("of an earlier step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
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
    first, title, *rows = summary.read_text().splitlines()
    assert (first, title.partition(":")[0]) == ("of an earlier step", "### trimtab preflight")
    assert title.endswith(result["verdict"])
    cells = [[cell.strip() for cell in row.replace("\\|", "").strip("|").split("|")] for row in rows if row]
    assert [len(row) for row in cells] == [2] * 12  # an empty head, the pair, and the checks
    assert [row[0] for row in cells[3:]] == [check["status"] for check in result["checks"]]
    assert [row[1].startswith(f"{name}: ") for row, name in zip(cells[3:], NAMES, strict=True)] == [True] * 9
    assert "wrong-token" in page.read_text()
    assert dict(one.split() for one in result["versions"].split(", ")) == versions("embedded")


def test_its_first_screen_says_what_it_does_not_judge(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["preflight", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "For a trainer of your own there are trimtab.testing.assert_parity" in text
    assert "trimtab.Monitor" in text


def test_each_line_is_printed_when_its_check_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def watched(pair: EnginePair, samples: Mapping[int, ScoredResponses]) -> Outcome:
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


def test_a_summary_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = Preflight({"model": "m", "sampler": "s", "trainer": "t"}, 1.0, [], {})
    with pytest.raises(TrimtabError, match=r"GITHUB_STEP_SUMMARY = .*summary\.md cannot be written: No such file"):
        write_summary(result, tmp_path / "absent" / "summary.md")


def test_marks_in_a_summary_stay_text(tmp_path: Path) -> None:
    check = Check("fail", "mismatch", "a | b\n<script> `c` [d](e) \x1b[2J &amp;")
    write_summary(Preflight({"model": "m", "sampler": "s", "trainer": "t"}, 1.0, [check], {}), tmp_path / "s.md")
    row = (tmp_path / "s.md").read_text().splitlines()[5]
    assert row == r"| fail | mismatch: a \| b &lt;script&gt; \`c\` \[d\](e)  \[2J &amp;amp; |"


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
