"""The first operation that differs is exactly the one that was changed, whatever it is and however little."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.support.engines import tiny
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from trimtab.errors import TrimtabError
from trimtab.trainer.bitwise.difference import Difference, compare_pair
from trimtab.trainer.bitwise.forward_recorder import row_digests

IDS = torch.tensor([[5, 6, 7, 8, 9], [15, 6, 27, 8, 39]])
ROW, NUMBER = 3, 7  # the one number that faults change


def nudged(values: Tensor, row: int = ROW) -> Tensor:
    """One number of one token becomes the next one its type can hold."""
    changed = values.clone()
    flat = changed.view(IDS.numel(), -1)
    flat[row, NUMBER] = torch.nextafter(flat[row, NUMBER], torch.tensor(torch.inf))
    return changed


def first(a: Any, b: Any, **keywords: Any) -> Difference:
    comparison = compare_pair(a, keywords or {"input_ids": IDS}, b, keywords or {"input_ids": IDS}).first
    assert comparison is not None
    return comparison


def tampered(path: str, change: Callable[[Tensor], Tensor] = nudged) -> Any:
    """A tiny Llama of which one module makes something else."""
    model = tiny()
    module = model.get_submodule(path)
    own = module.forward
    module.forward = lambda *args, **kwargs: change(own(*args, **kwargs))
    return model


@given(
    arrays.arrays("f4", (3, 5), elements=st.floats(width=32, allow_nan=False)),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 31),
)
def test_one_bit_anywhere_changes_a_fingerprint(numbers: Any, row: int, column: int, bit: int) -> None:
    before = torch.from_numpy(numbers)
    after = before.clone()
    after.view(torch.int32)[row, column] ^= -(2**31) if bit == 31 else 1 << bit
    same = row_digests(before.double()) == row_digests(after.double())
    assert same.tolist() == [index != row for index in range(3)]


def test_a_fingerprint_sees_signs_of_zero_and_the_order_of_numbers() -> None:
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    result = row_digests(rows)
    assert result[0] == result[4]
    assert len(set(result.tolist())) == 4


def test_equal_models_are_equal_in_every_operation() -> None:
    comparison = compare_pair(tiny(), [IDS], tiny(), [IDS])
    assert comparison.first is None
    assert comparison.only == ((), ())
    # Each of 3 layers: 7 linear maps, 2 norms, the activation, rotary and attention. Besides: embedding, table of
    # angles, last norm, head, and what the pair was given and returned.
    assert (comparison.tokens, comparison.operations) == (10, 3 * 12 + 4 + 2)


@pytest.mark.parametrize(
    ("path", "kind", "layer"),
    [
        ("model.embed_tokens", "embedding", None),
        ("model.layers.0.input_layernorm", "norm", 0),
        ("model.layers.1.self_attn.k_proj", "linear", 1),
        ("model.layers.2.mlp.act_fn", "activation", 2),
        ("model.layers.1.mlp.down_proj", "linear", 1),
        ("model.norm", "norm", None),
        ("lm_head", "linear", None),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_the_module_that_was_tampered_with_is_named(path: str, kind: str, layer: int | None, swap: bool) -> None:
    sides = (tiny(), tampered(path))
    result = first(*(sides[::-1] if swap else sides))
    assert (result.operation, result.kind, result.layer, result.half) == (path, kind, layer, "output")
    assert (result.tokens, result.compared) == (1, 10)
    assert result.largest is not None
    assert 0 < result.largest < 1e-5
    assert result.weights is None


def test_attention_and_rotary_embedding_are_operations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, other = tiny(), tiny()
    other.set_attn_implementation("eager")
    result = first(whole, other)
    assert (result.operation, result.kind, result.half) == (
        "model.layers.0.self_attn (attention)",
        "attention",
        "output",
    )
    assert result.inside is not None
    assert "scaled_dot_product" in result.inside
    assert "softmax" in result.inside

    own, turns = modeling_llama.apply_rotary_pos_emb, []

    def rotate(q: Tensor, k: Tensor, *rest: Any) -> Any:
        turns.append(None)  # of the second layer of the first model alone
        q, k = own(q, k, *rest)
        return (torch.nextafter(q, q.new_tensor(torch.inf)) if len(turns) % 6 == 2 else q), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    result = first(tiny(), tiny())
    assert (result.operation, result.kind, result.layer) == ("model.layers.1.self_attn (rotary)", "rotary", 1)
    assert result.tokens == 10


def test_operations_outside_modules_are_located_between_two_modules() -> None:
    other = tiny()
    mlp = other.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(nudged(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)))
    result = first(tiny(), other)
    assert (result.operation, result.half, result.kind) == ("model.layers.1.mlp.down_proj", "input", "activation")
    assert result.after == "model.layers.1.mlp.up_proj"
    assert result.inside is None


def test_the_tensor_operation_inside_a_module_is_named() -> None:
    class Norm(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.weight, self.share = nn.Parameter(torch.ones(8)), share

        def forward(self, states: Tensor) -> Tensor:
            return self.weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.share))

    states = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    comparison = compare_pair(Norm(0.1), [states], Norm(0.2), [states]).first
    assert comparison is not None
    assert (comparison.operation, comparison.kind, comparison.tokens) == ("(module)", "norm", 6)
    assert comparison.inside is not None
    assert comparison.inside.startswith("aten.add, number 3 of 6"), comparison.inside


def test_different_weights_are_distinguished_from_different_arithmetic() -> None:
    other = tiny()
    weight = other.model.layers[2].self_attn.o_proj.weight
    weight.data[3, 5] += 1e-3
    result = first(tiny(), other)
    assert result.operation == "model.layers.2.self_attn.o_proj"
    assert result.weights == f"weight differs in 1 of {weight.numel()} numbers (float32 and float32)"


def test_numbers_of_another_type_are_equal_if_their_values_are() -> None:
    wide = nn.Embedding.from_pretrained(torch.randn(40, 8).bfloat16().float())
    narrow = copy.deepcopy(wide).bfloat16()
    assert compare_pair(wide, [IDS], narrow, [IDS]).first is None
    exact = nn.Embedding.from_pretrained(torch.randn(40, 8))
    comparison = compare_pair(exact, [IDS], copy.deepcopy(exact).bfloat16(), [IDS]).first
    assert comparison is not None
    assert comparison.types == ("float32", "bfloat16")
    assert comparison.weights == "weight is float32 and bfloat16, and equal once rounded"


def test_rows_say_which_token_is_which() -> None:
    table = nn.Embedding(40, 8)
    packed = IDS.flatten()[[7, 1, 4, 9]][None]
    rows = [(7, 0), (1, 1), (4, 2), (9, 3)]
    comparison = compare_pair(table, [IDS], table, [packed], rows)
    assert (comparison.first, comparison.tokens) == (None, 4)
    wrong = compare_pair(table, [IDS], table, [packed], [(7, 0), (1, 2), (4, 1), (9, 3)])
    assert wrong.first is not None
    assert (wrong.first.operation, wrong.first.tokens) == ("(inputs)", 2)


def test_functions_are_compared_by_what_they_return() -> None:
    states = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert compare_pair(torch.exp, [states], torch.exp, {"input": states}).first is None
    comparison = compare_pair(lambda x: x.exp().log1p(), [states], lambda x: (x + 1e-6).exp().log1p(), [states]).first
    assert comparison is not None
    assert comparison.operation == "(result)"
    assert comparison.inside == "the second side alone runs aten.add"
    again = compare_pair(lambda x: x.exp().log(), [states], lambda x: x.exp().log().exp(), [states]).first
    assert again is not None
    assert again.inside == "the same tensor operations, in another order or number"


def test_modules_of_only_one_side_are_listed_as_left_out() -> None:
    a, b = nn.Sequential(nn.Linear(6, 6), nn.Identity()), nn.Sequential(nn.Linear(6, 6))
    b[0].load_state_dict(a[0].state_dict())
    states = torch.randn(4, 6)
    comparison = compare_pair(a, [states], b, [states])
    assert (comparison.first, comparison.only) == (None, (("1",), ()))


def test_a_comparison_does_not_change_the_models() -> None:
    model = tiny()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    compare_pair(model, [IDS], model, [IDS])
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert "get_interface" not in vars(modeling_llama.ALL_ATTENTION_FUNCTIONS)


@pytest.mark.parametrize(
    ("inputs", "rows", "words"),
    [
        (([IDS], [IDS[:1]]), None, "10 tokens on the first side, 5 on the second"),
        (([IDS], [IDS[:1]]), [(9, 5)], "rows name tokens outside"),
        (([IDS], [3]), None, "inputs of the second side hold no tensor"),
        (([IDS], [IDS]), [], "no operation with equal tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(inputs: Any, rows: Any, words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        compare_pair(nn.Embedding(40, 8), inputs[0], nn.Embedding(40, 8), inputs[1], rows)
