"""Shared by all Triton kernels here: the optional import, launch settings, and known traps.

A kernel is batch-invariant if each row's numbers go through the same operations in the same order whatever stands
beside them. Its source text alone does not decide that; Triton compiles variants. What is done about it here:

- No autotuning, no split of a reduction over programs, no tile shape chosen from a number of rows: tiles depend on
  the type alone ("Defeating nondeterminism in LLM inference", Thinking Machines Lab 2025, and its batch_invariant_ops).
- Triton compiles another variant for an integer argument that is 1 or a multiple of 16, and another memory layout (so
  another order of a reduction) for aligned pointers. Counts of rows are excluded from that (`do_not_specialize`),
  pointers are aligned always (`aligned`) or their alignment is ignored (`do_not_specialize_on_alignment`).
- Products of float32 would be rounded to TF32 by default (thinking-machines-lab/batch_invariant_ops#23,
  vllm-project/vllm#55131): every product asks for IEEE ones.
- Whether a multiplication and an addition are fused differs between releases of Triton (on until 3.9, off later):
  the launches here say it (`LAUNCH`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    triton = tl = None

INSTALL = "pip install triton"
# Bytes that a pointer is a multiple of, so that one variant of a kernel serves all; PyTorch allocates by 512.
ALIGNMENT = 16
# Options of every launch.
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}


class _Absent:
    """Stands for a kernel where Triton is not installed: the module imports, a launch says what to do."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise TrimtabError(f'numerics = "invariant" on CUDA needs Triton, which is not installed: {INSTALL}')


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` where Triton is installed."""
    return triton.jit(**options) if triton is not None else lambda _: _Absent()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1, set before Triton's import).

    It cannot multiply bfloat16: kernels then turn operands into float32 first, which is exact. It cuts digits off
    where a device rounds to the nearest bfloat16.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def require(*tensors: Tensor) -> torch.dtype:
    """The common type of tensors the kernels can read. Raises `TrimtabError` for other types, devices, or a mixture."""
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise TrimtabError(f"invariant kernels want operands of one type on one device, got {kinds}")
    if first.dtype not in (torch.bfloat16, torch.float32):
        raise TrimtabError(f"invariant kernels compute in bfloat16 or float32, got {first.dtype}; change model.dtype")
    if not first.is_cuda and not interpreted():
        raise TrimtabError(f"invariant Triton kernels run on CUDA, got a tensor on {first.device}; move it there")
    return first.dtype


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous and at an aligned address, copied if need be: a slice may start anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def power_of_2(count: int) -> int:
    """The smallest power of two that is at least `count`: Triton's blocks have such sizes."""
    return 1 << max(0, count - 1).bit_length()


def parts(count: int, size: int) -> int:
    """How many tiles of `size` cover `count`."""
    return -(-count // size)


def uses_kernels(tensor: Tensor) -> bool:
    """On CUDA, and on a CPU where TRITON_INTERPRET=1 has Triton's interpreter run the kernels (for tests)."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
