"""The kernels' modules where there is no Triton, no device, or both."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.trainer.models.invariant.kernels import as_aligned, attention_kernel, row_kernels


def test_tensors_of_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TrimtabError, match="run on CUDA, got a tensor on cpu; move it there"):
        row_kernels.batch_invariant_matmul(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(TrimtabError, match=r"got torch.float64; change model.dtype"):
        row_kernels.silu(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TrimtabError, match="of one type on one device"):
        row_kernels.batch_invariant_matmul(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bfloat16))


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed here")
@pytest.mark.parametrize(
    ("module", "kernel"),
    [(row_kernels, "_product"), (row_kernels, "_silu"), (row_kernels, "_tiles"), (attention_kernel, "_attend")],
)
def test_without_triton_a_launch_says_how_to_install_it(module: ModuleType, kernel: str) -> None:
    with pytest.raises(TrimtabError, match=r"needs Triton, which is not installed: pip install triton$"):
        getattr(module, kernel)[(1,)]


def test_addresses_are_aligned() -> None:
    whole = torch.arange(64.0)
    for tensor in (whole, whole[1:], whole[3:19], whole.view(8, 8).T):
        result = as_aligned(tensor)
        assert result.data_ptr() % 16 == 0
        assert result.is_contiguous()
        assert torch.equal(result, tensor)
    assert as_aligned(whole) is whole
