"""A pretended accelerator: a device type of its own whose values lie on the CPU, for tests without a GPU.

Importing this file registers the device `pretended:0` for the whole process. Tensors on it refuse operations with
tensors of another device, as those on a GPU do, and every point where a GPU would be waited for is an `Event`.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.support.device_events import LOG
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME = "pretended"

READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
# Their result's shape depends on values.
SHAPES = {
    *(aten.nonzero.default, aten.masked_select.default, aten.bincount.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
}
INDEXING = {
    *(aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default),
    *(aten._unsafe_index.Tensor, aten._unsafe_index_put.default),
}
ROUNDED = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "scaled_dot_product_attention")
"""Operations that autocast runs in bfloat16."""


class PretendedTensor(torch.Tensor):
    """A tensor of the pretended device around one on the CPU."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendedTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        result = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=f"{NAME}:0", **layout)
        result.inner = inner
        return result

    def __init__(self, inner: torch.Tensor) -> None: ...

    def __repr__(self) -> str:
        return f"PretendedTensor({self.inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self.detach().clone()
        is_parameter = isinstance(self, torch.nn.Parameter)
        return memo.setdefault(id(self), torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied)

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of the pretended device has no NumPy array: use .cpu()")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # In inference mode composite operations arrive whole.
    if torch.is_inference_mode_enabled() and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
        return result
    tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
    _refuse_other_devices(func, tensors)
    to_cpu = _is_copy_to_cpu(func, args, kwargs)
    if to_cpu or func in READS or func in SHAPES or _indexes_by_mask(func, args):
        LOG.add("copy" if to_cpu else "read" if func in READS else "shape")
    plain_args, plain = pytree.tree_map(
        lambda leaf: leaf.inner if isinstance(leaf, PretendedTensor) else leaf, (args, kwargs)
    )
    if plain.get("device") is not None:
        plain["device"] = torch.device("cpu")
    if func is aten.histc.default and not plain_args[0].is_floating_point():  # a GPU counts whole numbers too
        result = func(plain_args[0].float(), *plain_args[1:], **plain).to(plain_args[0].dtype)
    elif func is aten._fused_rms_norm_backward.default:
        result = _norm_backward(*plain_args)
    else:
        result = func(*plain_args, **plain)
    if to_cpu:
        return args[0] if func is aten.copy_.default else result
    # A view of a tensor from outside of inference mode is not an inference tensor.
    view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
    inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(inference and not (view and not ours[0].is_inference())):
        result = pytree.tree_map(lambda leaf: PretendedTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)
    if not inference:  # autograd checks that a view shares the storage of its base
        return return_and_correct_aliasing(func, args, kwargs, result)
    arguments = zip(args, func._schema.arguments, strict=False)
    written = [arg for arg, value in arguments if value.alias_info is not None and value.alias_info.is_write]
    return written[0] if written and len(func._schema.returns) == 1 else result


def _refuse_other_devices(func: Any, tensors: list[torch.Tensor]) -> None:
    others = [tensor for tensor in tensors if not isinstance(tensor, PretendedTensor)]
    # As on a GPU: numbers and indices may lie on the CPU.
    allowed = func in (aten.copy_.default, aten._to_copy.default) or func in INDEXING
    if not allowed and any(tensor.ndim > 0 for tensor in others):
        devices = sorted({str(tensor.device) for tensor in tensors})
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {devices}")


def _is_copy_to_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func is aten.copy_.default:
        return not isinstance(args[0], PretendedTensor)
    device = kwargs.get("device")
    is_ours = bool(args) and isinstance(args[0], PretendedTensor)
    return func is aten._to_copy.default and is_ours and device is not None and torch.device(device).type == "cpu"


def _indexes_by_mask(func: Any, args: Any) -> bool:
    return func in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0


class _Generator(torch.Generator):
    """A generator for any device: PyTorch has no way to make one for a device in Python."""

    def __new__(cls, _device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


def _in_bfloat16(operation: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        def cast(leaf: Any) -> Any:
            return leaf.bfloat16() if isinstance(leaf, PretendedTensor) and leaf.dtype == torch.float32 else leaf

        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            args, kwargs = pytree.tree_map(cast, (args, kwargs))
            return operation(*args, **kwargs)

    return run


class _Attention(torch.autograd.Function):
    """PyTorch's fused attention as one operation, as on a GPU; other devices compute it by a dozen."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, scale: float | None) -> Any:
        ctx.group = query.shape[1] // key.shape[1]
        inputs = (query, *(PretendedTensor(x.inner.repeat_interleave(ctx.group, 1)) for x in (key, value)))
        ctx.options = {"scale": scale}
        attend = aten._scaled_dot_product_flash_attention_for_cpu.default
        results = _dispatch(attend, (*inputs, 0.0, causal), ctx.options)
        ctx.save_for_backward(*inputs, *results)
        ctx.causal = causal
        return results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        attend = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        results = _dispatch(attend, (grads[0], *ctx.saved_tensors, 0.0, ctx.causal), ctx.options)
        keys, values = (PretendedTensor(x.inner.unflatten(1, (-1, ctx.group)).sum(2)) for x in results[1:])
        return results[0], keys, values, None, None


def _attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    _mask, _dropout, causal = args
    return _Attention.apply(query, key, value, causal, options.get("scale"))


def _norm_backward(grad: Any, states: Any, _shape: Any, scale: Any, weight: Any, _mask: Any) -> Any:
    """The gradients of `_fused_rms_norm`, which a CPU composes of other operations."""
    normed, scaled = states * scale, grad * weight
    to_states = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return to_states, (grad * normed).flatten(0, -2).sum(0)


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)
_ALL, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_ALL.fallback(lambda func, *args, **kwargs: _dispatch(func, args, kwargs), "PrivateUse1")
_ALL.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
# `torch.tensor(..., device=...)` copies below the level at which subclasses are asked.
_ATEN.impl("copy_", lambda *args, **kwargs: _dispatch(aten.copy_.default, args, kwargs), "PrivateUse1")
for _name in ROUNDED:
    _ATEN.impl(_name, _in_bfloat16(getattr(aten, _name)), "AutocastPrivateUse1")
# What a GPU computes by one operation, and a CPU by several.
_ATEN.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
_ATEN.impl("_fused_rms_norm", lambda *args: _dispatch(aten._fused_rms_norm.default, args, {}), "PrivateUse1")
torch.Generator = _Generator  # type: ignore[misc]
