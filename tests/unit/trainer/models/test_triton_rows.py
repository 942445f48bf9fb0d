"""Products and operations on rows in Triton's interpreter: bits of a row in any batch, and closeness to float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.support.triton_support import DTYPES, INTERPRETED, REASON, close, differences, tile_products  # noqa: F401
from torch import Tensor

from trimtab.trainer.models.invariant.kernels import row_kernels
from trimtab.trainer.models.invariant.kernels.row_kernels import Tile, batch_invariant_matmul, rms_norm, silu

if not INTERPRETED:
    pytest.skip(REASON, allow_module_level=True)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 5, 3), (37, 130, 150), (70, 64, 64)])
def test_product_is_close_to_float64(dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    a, b = random(rows, depth, dtype=dtype), random(columns, depth, dtype=dtype, seed=1)
    close(batch_invariant_matmul(a, b), a.double() @ b.double().T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_product_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    b = random(40, 150, dtype=dtype, seed=1)
    assert differences(lambda rows: batch_invariant_matmul(rows, b), random(70, 150, dtype=dtype)) == []


def test_columns_of_a_product_do_not_depend_on_each_other() -> None:
    """The head multiplies by parts of the vocabulary and must find the same logits."""
    a, b = random(5, 150), random(200, 150, seed=1)
    assert torch.equal(batch_invariant_matmul(a, b[128:]), batch_invariant_matmul(a, b)[:, 128:])


def test_float32_is_not_cut_to_tf32() -> None:
    numbers = torch.tensor([[2049.0], [4097.0], [1.0 + 2.0**-23]])  # more than the 11 places of TF32
    assert torch.equal(batch_invariant_matmul(numbers, torch.ones(1, 1)), numbers)


def split(a: Tensor, b: Tensor) -> Tensor:
    """Few rows leave a GPU idle, so their sum is split over two programs."""
    if len(a) >= 16:
        return batch_invariant_matmul(a, b)
    half = a.shape[1] // 2
    return batch_invariant_matmul(a[:, :half], b[:, :half]) + batch_invariant_matmul(a[:, half:], b[:, half:])


def tuned(a: Tensor, b: Tensor) -> Tensor:
    """Few rows get a tile of their own."""
    usual = row_kernels.TILES[a.dtype]
    if len(a) < 16:
        row_kernels.TILES[a.dtype] = Tile(16, 64, 16, warps=4, stages=2)
    try:
        return row_kernels.batch_invariant_matmul(a, b)
    finally:
        row_kernels.TILES[a.dtype] = usual


def rounded_sums(a: Tensor, b: Tensor) -> Tensor:
    """Partial sums as atomic additions leave them: in the order in which programs happen to end."""
    parts = [
        batch_invariant_matmul(a[:, k : k + 32].contiguous(), b[:, k : k + 32].contiguous())
        for k in range(0, a.shape[1], 32)
    ]
    return sum(parts if len(a) % 2 else parts[::-1], torch.zeros_like(parts[0]))


@pytest.mark.parametrize("fault", [split, rounded_sums])
def test_planted_faults_of_products_are_found(fault: Callable[[Tensor, Tensor], Tensor]) -> None:
    b = random(40, 150, seed=1)
    assert "alone" in differences(lambda rows: fault(rows, b), random(70, 150))


def test_a_tile_chosen_by_the_number_of_rows_changes_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order of k every tile gives the same sums here; on tensor cores not. So the launch itself is compared."""
    launches = []

    class Recorder:
        def __getitem__(self, _: object) -> Callable[..., None]:
            return lambda *arguments, **options: launches.append((arguments[6:], options))

    monkeypatch.setattr(row_kernels, "_product", Recorder())
    b = random(40, 150, seed=1)
    for rows in (1, 15, 16, 17, 300):
        batch_invariant_matmul(random(rows, 150), b)
    assert all(launch == launches[0] for launch in launches)
    tuned(random(1, 150), b)
    assert launches[-1] != launches[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64, 576])
def test_norm(dtype: torch.dtype, width: int) -> None:
    states, weight = random(9, width, dtype=dtype) * 3, random(width, seed=1)
    output = rms_norm(states, weight, 1e-5)
    exact = states.double()
    assert output.dtype == torch.float32
    close(output, weight.double() * exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt(), torch.float32)
    assert differences(lambda rows: rms_norm(rows, weight, 1e-5), states) == []


def test_norm_by_hand() -> None:
    output = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(output, torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu(dtype: torch.dtype) -> None:
    states = random(13, 150, dtype=dtype) * 4
    exact = states.double()
    close(silu(states), exact * exact.sigmoid(), dtype)
    assert differences(silu, states) == []


def test_silu_far_out() -> None:
    assert silu(torch.tensor([[-200.0, 0.0, 200.0]])).tolist() == [[0.0, 0.0, 200.0]]


def test_empty_batches() -> None:
    assert batch_invariant_matmul(random(0, 8), random(5, 8)).shape == (0, 5)
    assert rms_norm(random(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert silu(random(0, 8)).shape == (0, 8)
