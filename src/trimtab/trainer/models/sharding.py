"""Shards a model over ranks with FSDP2 (one parameter group per decoder layer, one for the rest); weights as a whole.

FSDP gathers a group's weights before a module's forward and frees them after it. Scoring, however, calls the backbone
and then reads the head's weight outside of any forward. So a sharded model has a method that FSDP treats as a forward:
`with_full_weights` calls a function while embedding, final norm and head are gathered, in forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.trainer.models.architecture import decoder_stack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_BASE_LAYER = ".base_layer"
"""What peft adds to the name of a weight that has an adapter."""

_GATHERED = "call_with_gathered_weights"
"""Name of the method of a sharded model that calls a function while its weights are gathered."""


def apply_fsdp(
    model: Any, mesh: DeviceMesh, *, compute: torch.dtype | None = None, offload: bool = False, reshard: bool = True
) -> None:
    """Shards `model` over the ranks of the one-dimensional `mesh`, in place, with the values of rank 0.

    Weights are moved to the mesh's device layer by layer, so that no device holds all of them; other ranks' models may
    be empty (on the meta device). Parameters become DTensors sharded along their first dimension, under their old
    names; tied ones stay tied. Gradients are summed over ranks, not averaged, in float32 or wider. Afterwards every
    rank must run the model equally often.

    Args:
        compute: dtype in which a layer's weights are gathered, for use under autocast of the same dtype; None: their
            own. Embedding, norm after the last layer, head and the residual stream keep their own dtype.
        offload: parameters, gradients and optimizer state stay in CPU memory; weights are copied to the device.
        reshard: free a layer's weights after its forward and gather them again for its backward.
    """
    from torch.distributed import fsdp

    reduce = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    pinned = mesh.device_type == "cuda"
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pinned) if offload else fsdp.OffloadPolicy(),
    }
    layer_policy = fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    layers, aliases = decoder_stack(model).layers, shared_parameters(model)
    inner = {id(module) for layer in layers for module in layer.modules()}
    for layer in layers:
        _move_to_mesh(layer.modules(), mesh)
        fsdp.fully_shard(layer, reshard_after_forward=reshard, mp_policy=layer_policy, **options)
    # Embedding, final norm and head are needed at both ends of forward and backward: freeing them gains nothing.
    root_policy = fsdp.MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    _move_to_mesh((module for module in model.modules() if id(module) not in inner), mesh)
    for name, first in aliases.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, model.get_parameter(first))
    fsdp.fully_shard(model, reshard_after_forward=False, mp_policy=root_policy, **options)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    setattr(model, _GATHERED, lambda work: work())
    fsdp.register_fsdp_forward_method(model, _GATHERED)


def _move_to_mesh(modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Moves parameters and buffers of these modules, but not of their children, to the mesh's device.

    Values are rank 0's. An empty module gets new memory, even for tied tensors.
    """

    def move(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=mesh.device_type) if tensor.is_meta else tensor.to(mesh.device_type)

    for module in modules:
        module._apply(move, recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            dist.broadcast(tensor.data, 0, group=mesh.get_group())


def with_full_weights(model: Any, work: Callable[[], T]) -> T:
    """Runs `work` while the model's weights outside of its layers are gathered, and returns its result.

    Everything that needs a gradient must be returned by `work`: a tensor, or a tuple of tensors.
    """
    if not hasattr(model, _GATHERED):
        return work()
    result = getattr(model, _GATHERED)(work)
    if not torch.is_grad_enabled():  # without a backward, which frees weights, the next forward would use stale ones
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    return result


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, sharing its memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor. All ranks must call it in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor; checked by attributes, to avoid importing torch.distributed.tensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "full_tensor")


def shared_parameters(model: nn.Module) -> dict[str, str]:
    """Returns a mapping from each additional name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return aliases


@torch.no_grad()
def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight, with adapters merged, under the name it has without adapters.

    The merge does not modify the model: peft's merge followed by unmerge is not exact in floating point and would
    slowly change the frozen base. Weights of a sharded model are gathered one at a time: every rank must iterate over
    all of them, and a tied one is yielded once.
    """
    deltas = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    again = shared_parameters(model)
    for name, weight in model.state_dict().items():
        if ".lora_" in name or (is_sharded(weight) and name in again):
            continue
        plain = name.replace(_BASE_LAYER, "")
        adapted: Any = deltas.get(plain) if _BASE_LAYER in name else None
        merged = weight if adapted is None else weight + adapted.get_delta_weight("default").to(weight.dtype)
        yield plain, full_tensor(merged)
