"""Triton kernels of batch-invariant numerics; this file has what they share: import, launch options, checks.

A kernel is batch-invariant if each row is computed by the same operations in the same order whatever the other rows
are. The source code alone does not determine that, because Triton compiles variants. Precautions:

- No autotuning, no reduction split over programs, no tile shape chosen by the number of rows: tiles depend on the
  dtype alone ("Defeating nondeterminism in LLM inference", Thinking Machines Lab 2025, and its batch_invariant_ops).
- Triton compiles another variant for an integer argument that is 1 or a multiple of 16, and another memory layout (and
  so another order of a reduction) for aligned pointers. Numbers of rows are excluded from that (`do_not_specialize`);
  pointers are always aligned (`as_aligned`), or their alignment is ignored (`do_not_specialize_on_alignment`).
- Products of float32 would be rounded to TF32 by default (thinking-machines-lab/batch_invariant_ops#23,
  vllm-project/vllm#55131): every product requests IEEE precision.
- Releases of Triton differ in whether they fuse a multiplication and an addition (on until 3.9, off later): every
  launch sets it (`LAUNCH`).
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
KEY_BLOCK = 64
"""Keys of a block of attention, with kernels and without."""
# Alignment of pointers in bytes, so that one variant of a kernel serves all; PyTorch allocates multiples of 512.
ALIGNMENT = 16
# Options of every launch.
LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}


class _Absent:
    """A placeholder for a kernel without Triton: a launch raises an error with the command to install it."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise TrimtabError(f'numerics = "invariant" on CUDA needs Triton, which is not installed: {INSTALL}')


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns `triton.jit` with these options, or, if Triton is not installed, a decorator that returns `_Absent`."""
    return triton.jit(**options) if triton is not None else lambda _: _Absent()


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1, set before Triton's import).

    The interpreter cannot multiply bfloat16, so kernels convert operands to float32 first, which is exact. It truncates
    to bfloat16, whereas a device rounds to nearest.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_operands(*tensors: Tensor) -> torch.dtype:
    """Returns the common dtype of the operands."""
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise TrimtabError(f"invariant kernels want operands of one type on one device, got {kinds}")
    if first.dtype not in (torch.bfloat16, torch.float32):
        raise TrimtabError(f"invariant kernels compute in bfloat16 or float32, got {first.dtype}; change model.dtype")
    if not first.is_cuda and not is_interpreted():
        raise TrimtabError(f"invariant Triton kernels run on CUDA, got a tensor on {first.device}; move it there")
    return first.dtype


def as_aligned(tensor: Tensor) -> Tensor:
    """Returns the tensor, contiguous and at an aligned address; copied if necessary (a slice may start anywhere)."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def power_of_2(count: int) -> int:
    """Returns the smallest power of two that is at least `count`, as Triton requires of block sizes."""
    return 1 << max(0, count - 1).bit_length()


def ceil_divide(count: int, size: int) -> int:
    """Returns the number of tiles of `size` that cover `count`."""
    return -(-count // size)


def use_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels compute on this tensor: on CUDA, and on a CPU in Triton's interpreter (for tests)."""
    return tensor.is_cuda or is_interpreted()
