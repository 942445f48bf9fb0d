"""`trimtab doctor --bitwise` as a command; what it finds: see bitwise/test_difference.py and e2e/test_bitwise.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trimtab.cli import main

PAIRS = """
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, states):
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)


def network(eps):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), Norm(eps), nn.Linear(8, 4))


ids = torch.arange(12).view(2, 6)
equal = lambda: (network(0.1), [ids], network(0.1), {"input": ids})
other = lambda: (network(0.1), [ids], network(0.2), [ids])
turned = lambda: (network(0.1)[0], [ids], network(0.1)[0], [ids.T], [(row * 6 + time, time * 2 + row)
                                                                     for row in range(2) for time in range(6)])
three = lambda: (network(0.1), [ids], network(0.1))
words = lambda: (network(0.1), ["a"], network(0.1), ["a"])
asking = lambda number: None
"""


@pytest.fixture(autouse=True)
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_pairs.py").write_text(PAIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_pairs", raising=False)


def test_a_user_defined_pair_of_equal_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--bitwise", "--pair", "my_pairs:equal"]) == 0
    # Four modules, what the pair was given, and what it returned.
    assert "bit for bit equal: 12 tokens, 6 operations" in capsys.readouterr().out
    assert main.run(["doctor", "--bitwise", "--pair", "my_pairs:turned"]) == 0
    assert "bit for bit equal: 12 tokens" in capsys.readouterr().out


def test_a_pair_that_differs_is_an_exit_code_and_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--bitwise", "--pair", "my_pairs:other"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "DIFFERS 2 (norm, layer 2)" in output
    assert "12 of 12 differ, largest difference" in output
    assert "inputs equal: this operation computes different bits from them" in output
    assert "inside aten.add, number 3 of 5" in output


def test_json_has_the_same_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--bitwise", "--pair", "my_pairs:other", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["tokens"], result["operations"]) == (False, 12, 6)
    actual = result["difference"]
    assert (actual["operation"], actual["kind"], actual["half"], actual["tokens"]) == ("2", "norm", "output", 12)
    assert actual["after"] == "1"
    assert 0 < actual["largest"] < 1
    assert main.run(["doctor", "--bitwise", "--pair", "my_pairs:equal", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {
        "ok": True,
        "tokens": 12,
        "operations": 6,
        "difference": None,
        "not_compared": {"first": [], "second": []},
        "sides": {"first": "Sequential", "second": "Sequential"},
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--bitwise", "--pair", "my_pairs:three"], "must return (module, inputs, module, inputs)"),
        (["--bitwise", "--pair", "my_pairs:words"], "inputs of the first side hold no tensor"),
        (["--bitwise", "--pair", "my_pairs:asking"], "pair 'my_pairs:asking': it must take 0 arguments"),
        (["--bitwise", "--pair", "my_pairs:equa"], "no 'equa' in 'my_pairs' (did you mean 'equal'?)"),
        (["--bitwise", "quickstart", "--pair", "my_pairs:equal"], "leave out the recipe"),
        (["quickstart"], "are for --bitwise"),
        (["--pair", "my_pairs:equal"], "are for --bitwise"),
        (["--bitwise", "quickstart-vllm"], "--set engine.type=embedded"),
        (["--bitwise", "quickstart", "--set", "model.lora.rank=4"], "--set model.lora.rank=0"),
        (["--bitwise", "no/such/model"], "no/such/model"),
    ],
)
def test_mistakes_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", *words]) == 2
    printed = capsys.readouterr()
    assert line in printed.err, printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
