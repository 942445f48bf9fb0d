"""The normals of the perturbation: their distribution, their independence, and that nothing else is touched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.trainer.models.noise import CODES, normals, quantiles

COUNT = 1 << 20


def draw(*shape: int, seed: int = 7, place: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32) -> Tensor:
    return normals(shape, seed, place, device=torch.device("cpu"), dtype=dtype)


def correlation(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).mean())


def test_the_table_is_the_quantile_function_with_exact_moments() -> None:
    table = quantiles().double()
    assert abs(table.mean()) < 1e-9
    assert abs(table.square().mean() - 1) < 1e-6
    assert abs(table.pow(4).mean() - 3) < 1e-3
    assert 4.32 < table.max() < 4.33
    middle = (torch.arange(CODES, dtype=torch.float64) + 0.5) / CODES
    assert (torch.special.ndtr(table) - middle).abs().max() < 1e-5


def test_neighbors_are_independent() -> None:
    """Positions (rows), channels (columns) and the four normals of one random word."""
    noise = draw(2048, 512)
    for rows, columns in [(1, 0), (2, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 1)]:
        ahead, behind = noise[rows:, columns:], noise[: 2048 - rows, : 512 - columns]
        assert abs(correlation(ahead, behind)) < 5 / 1024, (rows, columns)
        assert abs(correlation(ahead.abs() - 0.7979, behind.abs() - 0.7979)) < 5 / 1024, (rows, columns)


def test_seeds_and_places_are_independent() -> None:
    names = [(7, (0,)), (7, (1,)), (7, (2,)), (8, (0,)), (0, (7,)), (7, (0, 0)), (7 + 2**32, (0,)), (2**63 - 1, (0,))]
    samples = [draw(1 << 16, seed=seed, place=place) for seed, place in names]
    for i, one in enumerate(samples):
        for other in samples[:i]:
            assert abs(correlation(one, other)) < 5 / 256


def test_a_second_draw_is_the_same_and_no_global_generator_moves() -> None:
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index] # noqa: NPY002
    assert torch.equal(draw(3, 5, 7), draw(3, 5, 7))
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index] # noqa: NPY002


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7])
def test_any_size_takes_the_same_stream(count: int) -> None:
    assert torch.equal(draw(count), draw(8)[:count])


def test_shape_and_type_do_not_change_the_numbers() -> None:
    assert torch.equal(draw(6, 4).flatten(), draw(24))
    assert torch.equal(draw(24, dtype=torch.float64), draw(24).double())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    state = torch.cuda.get_rng_state()
    first, again, other = (normals((COUNT,), 7, (p,), device=device, dtype=torch.float32) for p in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert abs(correlation(first, other)) < 5 / 1024
    assert abs(float(first.double().var()) - 1) < 4 * math.sqrt(2 / COUNT)
