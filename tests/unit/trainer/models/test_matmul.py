"""Products through oneDNN and the fused norm are those of PyTorch and transformers, with their gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from trimtab.trainer.build_model import use_fused_norms
from trimtab.trainer.models import matmul
from trimtab.trainer.models.matmul import (
    FastLinear,
    batched_product,
    fast_linear,
    inference_linear,
    packed_alike,
    packed_weight,
    product_dtype,
    tiled_product,
    use_fast_linear,
)


@pytest.fixture(autouse=True)
def no_earlier_trials() -> Iterator[None]:
    matmul._shares_bits.cache_clear()
    yield
    matmul._shares_bits.cache_clear()


ROWS = [(3, 5, 7), (1, 1, 1), (130, 64, 33), (0, 4, 2)]


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_those_of_pytorch(shape: tuple[int, int, int], biased: bool) -> None:
    rows, width, out = shape
    torch.manual_seed(0)
    tensors = [torch.randn(2, rows, width), torch.randn(out, width), *([torch.randn(out)] if biased else [])]
    fast, reference = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    weigh = torch.randn(2, rows, out)
    results = [f(*arguments) for f, arguments in ((fast_linear, fast), (F.linear, reference))]
    for result in results:
        (result * weigh).sum().backward()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for first, second in zip(fast, reference, strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_pytorchs_own_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_FAST_DTYPES", (torch.float32,))
    states, weight, bias = (torch.randn(*size, dtype=dtype) for size in ((9, 16), (8, 16), (8,)))
    assert torch.equal(fast_linear(states, weight, bias), F.linear(states, weight, bias))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)])
def test_bfloat16_products_are_the_float32_products_rounded(
    monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, ...], autocast: bool
) -> None:
    monkeypatch.setattr(matmul, "_FAST_DTYPES", dtypes)
    torch.manual_seed(2)
    drawn = [torch.randn(9, 256).bfloat16(), torch.randn(8, 256).bfloat16()]
    exact = [t.double().requires_grad_() for t in drawn]
    (exact[0] @ exact[1].T).sum().backward()
    states, weight = (t.to(torch.float32 if autocast else torch.bfloat16).requires_grad_() for t in drawn)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = fast_linear(states, weight)
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    for found, right in ((result, exact[0] @ exact[1].T), (states.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        torch.testing.assert_close(found.double(), right, rtol=2.0**-8, atol=1e-4)


def test_under_autocast_a_model_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with bfloat16 instructions."""
    monkeypatch.setattr(matmul, "_FAST_DTYPES", (torch.float32,))
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(12, 6), nn.GELU(), nn.Linear(6, 3, bias=False))
    swapped = copy.deepcopy(plain)
    use_fast_linear(swapped)
    assert [type(part) for part in swapped] == [FastLinear, nn.GELU, FastLinear]
    assert list(swapped.state_dict()) == list(plain.state_dict())
    states = torch.randn(5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(swapped(states), plain(states))
    torch.testing.assert_close(swapped(states), plain(states), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_layer_is_the_linear_layer_for_any_number_of_rows(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(3)
    weight, bias = torch.randn(33, 64, dtype=dtype), torch.randn(33, dtype=dtype) if biased else None
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 0.06
    for rows in (1, 8, 130):
        states = torch.randn(rows, 64, dtype=dtype)
        for used in (weight, packed_weight(weight, 8)):
            result = inference_linear(states, used, bias)
            assert result.dtype == dtype
            torch.testing.assert_close(result, F.linear(states, weight, bias), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lacks", [False, True])
def test_batched_product_is_rounded_once(monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    monkeypatch.setattr(matmul, "_BFLOAT16", lacks)
    torch.manual_seed(4)
    a, b = torch.randn(3, 5, 64).bfloat16(), torch.randn(3, 64, 7).bfloat16()
    result, exact = batched_product(a, b), torch.bmm(a.double(), b.double())
    assert result.dtype == torch.bfloat16
    assert product_dtype(a) == (torch.float32 if lacks else torch.bfloat16)
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("same", [{64}, {16, 64, 128}, {16, 32, 48, 64, 128, 256, 512, 1024}])
def test_only_numbers_of_rows_that_share_their_bits_are_multiplied_at_once(
    monkeypatch: pytest.MonkeyPatch, same: set[int], dtype: torch.dtype
) -> None:
    """Where a product of other numbers of rows adds in another order, as on processors with AMX."""
    exact, used = matmul.product, []

    def by_64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # with the same bits on every processor
        padded = F.pad(a, (0, 0, 0, -len(a) % 64))
        return torch.cat([exact(part, b) for part in padded.split(64)])[: len(a)]

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        used.append(len(a))
        return by_64(a, b) if len(a) in same else by_64(a.flip(1), b.flip(1))

    monkeypatch.setattr(matmul, "product", product)
    torch.manual_seed(0)
    a, b = torch.randn(1100, 96).to(dtype), torch.randn(40, 96).to(dtype)
    expected = by_64(a, b)
    for rows in (0, 1, 16, 60, 64, 80, 200, 700, 1100):
        tiled_product(a[:rows], b)  # tries what it needs
        used.clear()
        assert torch.equal(tiled_product(a[:rows], b), expected[:rows])
        assert set(used) <= same
    if 1024 in same:
        assert used == [1024, 64, 64]  # 12 rows are left, padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_bits_of_products_of_64_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1300, 288).to(dtype), torch.randn(192, 288).to(dtype)
    a, b = torch.cat([a, -a], 1), torch.cat([b, b], 1)  # sums of which only rounding errors are left
    expected = torch.cat([matmul.product(part, b) for part in F.pad(a, (0, 0, 0, 44)).split(64)])
    for rows in (5, 16, 48, 112, 1300):
        assert torch.equal(tiled_product(a[:rows], b), expected[:rows])
        assert torch.equal(tiled_product(a[:rows], packed_alike(b)), expected[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_whose_packed_products_have_other_bits_is_not_packed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    exact = matmul.product
    weight = torch.randn(40, 96).to(dtype)
    monkeypatch.setattr(matmul, "product", lambda a, b: exact(a, b) + 1e-7 * b.is_mkldnn)
    assert packed_alike(weight) is weight
    matmul._shares_bits.cache_clear()
    monkeypatch.setattr(matmul, "product", lambda a, b: a.new_zeros(len(a), len(b)))  # the same, packed or not
    assert packed_alike(weight).is_mkldnn == matmul._ONEDNN


def test_weights_are_rounded_once_inside_reused_casts() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    matmul.use_fast_linear(layer)
    batches = torch.randn(3, 5, 4)

    def gradients(*, with_probe: bool) -> list[torch.Tensor]:
        layer.zero_grad()
        for states in batches:
            if with_probe:  # without gradient, before the first pass that has one
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                    layer(states)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                layer(states).square().sum().backward()
        return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]

    expected = gradients(with_probe=False)
    for with_probe in (False, True):
        with matmul.reused_casts():
            found = gradients(with_probe=with_probe)
            cast = matmul.cast_weight(layer[0].weight, torch.bfloat16)
            assert matmul.cast_weight(layer[0].weight, torch.bfloat16) is cast
        assert len(found) == 2
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert matmul.cast_weight(layer[0].weight, torch.bfloat16) is not cast


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.final_norm = Qwen2RMSNorm(8, eps=1e-5), Qwen2RMSNorm(8, eps=1e-5)
        self.input_layernorm.weight.data = torch.linspace(-1, 2, 8)


def normed(layer: Layer, states: torch.Tensor, *, autocast: bool) -> list[torch.Tensor]:
    states = states.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outs = [layer.input_layernorm(states), layer.final_norm(states)]
    weights = torch.randn(2, *states.shape, generator=torch.Generator().manual_seed(1))
    loss = sum((out.float() * weight).sum() for out, weight in zip(outs, weights, strict=True))
    inputs = [states, *layer.parameters()]
    return [out.detach() for out in outs] + list(torch.autograd.grad(loss, inputs))  # type: ignore[arg-type]


@pytest.mark.parametrize("autocast", [False, True])
def test_values_and_gradients_are_those_of_transformers(autocast: bool) -> None:
    layer = Layer()
    fused = copy.deepcopy(layer)
    use_fused_norms(fused)
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    theirs, ours = (normed(one, states, autocast=autocast) for one in (layer, fused))
    # Only the norm before products has autocast's dtype, in which each product would round its input.
    assert [out.dtype for out in ours[:2]] == [torch.bfloat16 if autocast else torch.float32, torch.float32]
    torch.testing.assert_close(ours[0].float(), theirs[0].to(ours[0].dtype).float())
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02 if autocast else 1e-5, atol=0.02 if autocast else 1e-5)
