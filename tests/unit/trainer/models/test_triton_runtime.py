"""The kernels' modules where there is no Triton, no device, or both."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.trainer.models.invariant.kernels import attention_kernel, matmul_kernel, row_kernels, runtime


def test_tensors_of_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TrimtabError, match="run on CUDA, got a tensor on cpu; move it there"):
        matmul_kernel.batch_invariant_matmul(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(TrimtabError, match=r"got torch.float64; change model.dtype"):
        row_kernels.silu(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TrimtabError, match="of one type on one device"):
        matmul_kernel.batch_invariant_matmul(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bfloat16))


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed here")
@pytest.mark.parametrize(
    ("module", "kernel"),
    [(matmul_kernel, "_product"), (row_kernels, "_silu"), (row_kernels, "_tiles"), (attention_kernel, "_attend")],
)
def test_without_triton_a_launch_says_how_to_install_it(module: ModuleType, kernel: str) -> None:
    with pytest.raises(TrimtabError, match=r"needs Triton, which is not installed: pip install triton$"):
        getattr(module, kernel)[(1,)]


def test_addresses_are_aligned() -> None:
    whole = torch.arange(64.0)
    for tensor in (whole, whole[1:], whole[3:19], whole.view(8, 8).T):
        result = runtime.as_aligned(tensor)
        assert result.data_ptr() % 16 == 0
        assert result.is_contiguous()
        assert torch.equal(result, tensor)
    assert runtime.as_aligned(whole) is whole


@pytest.mark.parametrize(("count", "power"), [(1, 1), (2, 2), (3, 4), (576, 1024), (1024, 1024)])
def test_sizes_of_blocks(count: int, power: int) -> None:
    assert runtime.power_of_2(count) == power


@pytest.mark.e2e
def test_the_benchmark_says_that_it_needs_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    script = Path(__file__).parents[4] / "benchmarks" / "invariant_cuda.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().out.startswith("no CUDA device: ")
