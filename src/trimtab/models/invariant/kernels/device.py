"""Selects the implementation: PyTorch on a CPU, Triton kernels on CUDA."""

from __future__ import annotations

import os

from torch import Tensor


def uses_kernels(tensor: Tensor) -> bool:
    """On CUDA, and on a CPU where TRITON_INTERPRET=1 has Triton's interpreter run the kernels (for tests)."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
