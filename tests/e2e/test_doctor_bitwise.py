"""`trimtab doctor --bitwise` on real models: it is quiet where nothing differs, and names the one thing that does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trimtab.cli import main
from trimtab.trainer import run

pytestmark = pytest.mark.e2e

COMMAND = ["doctor", "--bitwise", "--json"]
INVARIANT = ["laboratory", "--set", "numerics=invariant"]


class SummedInHalves(nn.Linear):
    """A product that sums in another order than any single kernel: other bits on every processor."""

    def forward(self, input: Tensor) -> Tensor:
        half = self.in_features // 2
        return F.linear(input[..., :half], self.weight[:, :half]) + F.linear(input[..., half:], self.weight[:, half:])


def answer(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, Any]:
    assert main.run([*COMMAND, *words]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_bundled_model_is_equal_in_every_operation() -> None:
    done = subprocess.run([sys.executable, "-m", "trimtab", *COMMAND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["sides"]["numerics"] == "invariant"
    # 30 layers of 12 operations (tests/unit/trainer/bitwise/test_difference.py), and four more.
    assert (values["tokens"], values["operations"]) == (271, 30 * 12 + 4)
    assert values["not_compared"] == {"first": [], "second": []}


def test_a_recipe_in_other_numerics_and_a_worker_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, 0, *INVARIANT, "--set", "engine.workers=1", "--set", "engine.hang_timeout=60")["ok"]
    result = answer(capsys, 1, "laboratory")["difference"]
    # A GPU chooses another product for another number of rows.
    kind = "linear" if torch.cuda.is_available() else "attention"
    assert (result["kind"], result["layer"], result["half"]) == (kind, 0, "output")


@pytest.mark.parametrize(
    ("path", "native", "kind"),
    [
        ("model.layers.1.mlp.down_proj", SummedInHalves, "linear"),
        ("model.layers.0.post_attention_layernorm", LlamaRMSNorm, "norm"),
    ],
)
def test_one_native_operation_is_named(
    path: str, native: type[nn.Module], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = run.prepare_model

    def swapped(model: Any, *rest: Any) -> Any:
        model.get_submodule(path).__class__ = native
        return prepare(model, *rest)

    monkeypatch.setattr(run, "prepare_model", swapped)
    result = answer(capsys, 1, *INVARIANT)["difference"]
    assert (result["operation"], result["kind"], result["half"]) == (path, kind, "output")
    assert result["weights"] is None
