"""`tools/first_difference.py`: quiet where sampler and trainer are equal, and names the one module that is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.engines import EOS, tiny, tokenizer
from tools import first_difference as tool
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import invariant, packed_attention

pytestmark = pytest.mark.e2e


def found(
    change: Callable[[Any, Any], object] | None = None, *, name: str = "llama", mixed: bool = True, native: bool = False
) -> str | None:
    """What the script finds after a change of the two models: bfloat16 against autocast, or float32 on both sides."""
    model = tiny(name)
    if native:
        model.set_attn_implementation(packed_attention.PACKED_IMPLEMENTATION)
    else:
        invariant.make_invariant(model)
    engine = EmbeddedEngine(model, tokenizer(), torch.bfloat16 if mixed else torch.float32)
    model.train()
    if change is not None:
        change(engine._model, model)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if mixed else nullcontext()
    return tool.first_difference(*tool.sides(engine._model, model, autocast, EOS))


@pytest.mark.parametrize(("name", "mixed"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_invariant_numerics_are_equal(name: str, mixed: bool) -> None:
    assert found(name=name, mixed=mixed) is None


def test_native_numerics_differ_first_in_attention() -> None:
    assert str(found(native=True, mixed=False)).startswith("input of layers.0.self_attn.o_proj: ")


class Float64Linear(nn.Linear):
    """Sums in float64, rounded once."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.double(), self.weight.double()).to(input.dtype)


def become(path: str, kind: type[nn.Module]) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), "__class__", kind)


def test_one_native_module_of_either_side_is_named() -> None:
    linear, norm = (
        become("model.layers.1.mlp.down_proj", Float64Linear),
        become("model.layers.2.input_layernorm", LlamaRMSNorm),
    )
    assert str(found(lambda sampler, _: linear(sampler), mixed=False)).startswith("layers.1.mlp.down_proj: ")
    assert str(found(lambda _, trainer: norm(trainer))).startswith("layers.2.input_layernorm: ")


def test_a_stale_weight_is_named_with_its_size() -> None:
    def stale(sampler: Any, _trainer: Any) -> None:
        bias = torch.zeros(64, dtype=torch.bfloat16)
        bias[3] = 64.0
        sampler.model.layers[1].mlp.up_proj.bias = nn.Parameter(bias)

    tokens = tool.TEXTS * (tool.PROMPT + tool.RESPONSE - 1)
    assert str(found(stale)).startswith(f"layers.1.mlp.up_proj: {tokens} of {tokens} tokens differ, by 64")


def test_another_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "log_probs", lambda *given: tool.native_log_probs(*given) + 0.5)
    assert str(found()).startswith(f"{tool.HEAD}: ")
