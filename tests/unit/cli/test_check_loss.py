"""`trimtab check-loss` as a command: exit codes, JSON, page, and what a file may not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.commands import Printed

from trimtab.cli import main

LOSS = """
import torch

def right(current, proximal, mask, advantage, responses):
    print("a line of a debugger")
    ratio = torch.where(mask, current - proximal, 0.0).clamp(-20, 20).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (torch.where(mask, loss, 0.0) / mask.sum(1, keepdim=True).clamp(min=1)).sum() / responses

def endless(current, advantage):
    while True:
        pass

def failing(current, advantage):
    return current.no_such_method()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_loss.py"
    path.write_text(LOSS)
    return path


def test_equal_and_different(file: Path, tmp_path: Path, printed: Printed) -> None:
    text = printed("check-loss", f"{file}:right", "--as", "grpo")
    assert text.startswith(f"{file}:right is grpo: ")
    assert "debugger" not in text
    page = tmp_path / "loss.html"
    command = ["check-loss", f"{file}:right", "--as", "grpo:clip_high=0.28", "--json", "--html", str(page)]
    answer = json.loads(printed(*command, code=1))
    assert [one["kind"] for one in answer["differences"]] == ["clip"]
    assert (answer["equal"], answer["spec"], answer["page"]) == (False, "grpo:clip_high=0.28", str(page))
    html = page.read_text()
    assert all(words in html for words in ("is 0 beyond 1.28", "this loss, A &gt; 0", "grpo, A &lt; 0", "π_old/μ of a"))
    assert main.run(["check-loss", f"{file}:right", "--html", str(page)]) == 0
    assert 'name = "grpo"' in page.read_text().replace("&#34;", '"')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py:right"], "there is no file nothing.py"),
        (["FILE:rigth"], "no 'rigth' in 'my_loss' (did you mean 'right'?)"),
        (["FILE:torch.pi"], "is float: name a function, or a method of a TRL trainer"),
        (["FILE:failing"], "'Tensor' object has no attribute 'no_such_method'"),
        (["FILE:endless", "--timeout", "2"], "took longer than 2 s"),
        (["FILE:right", "--as", "gpro"], "unknown objective 'gpro'"),
        (["FILE:right", "--as", "grpo", "--ignore", "nam"], "no difference 'nam' to ignore (did you mean 'nan'"),
        (["FILE:right", "--html", "page.txt"], "--html page.txt is not a page"),
        (["trl:grpo"], "trl:grpo is code of an installed package, which would be imported: read it, then add"),
    ],
)
def test_what_cannot_be_run_exits_with_2(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main.run(["check-loss", *(word.replace("FILE", str(file)) for word in arguments)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_the_file_that_is_named_is_checked_and_not_another_of_its_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    other = tmp_path / "below" / "my_loss.py"
    other.write_text(LOSS.replace("clamp(0.8, 1.2)", "clamp(0.5, 1.2)"))
    monkeypatch.chdir(tmp_path)
    assert main.run(["check-loss", f"{file}:right", "--as", "grpo"]) == 0
    assert main.run(["check-loss", "below/my_loss.py:right", "--as", "grpo"]) == 1
    other.rename(other.with_name("json.py"))
    assert main.run(["check-loss", "below/json.py:right", "--as", "grpo"]) == 2


def test_the_expected_objective_loads_no_code(file: Path, tmp_path: Path, printed: Printed) -> None:
    made = tmp_path / "made"
    assert "--allow-code" in printed("check-loss", f"{file}:right", "--as", f'os:mkdir:path="{made}"', code=2)
    assert not made.exists()


def test_what_may_hide_more_is_said(file: Path, printed: Printed) -> None:
    file.write_text(LOSS.replace("mask, advantage, responses)", "mask, advantage, responses, ref=None, beta=0.1)"))
    text = printed("check-loss", f"{file}:right", "--as", "grpo:clip_high=0.3", "--ignore", "clip")
    assert "but for what is ignored (clip), which may hide more" in text
    assert "left at their defaults: ref, beta" in text
