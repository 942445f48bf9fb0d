"""What callers pass: the log-probs of a batch (`PolicyLogps`), and checks of its tensors.

Each error names the argument, what it is and what it must be, in one line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.reduce import TURNS_UNKNOWN, Sequences

TOKENS = "(batch, time)"
_KINDS = {"sequence_ids": "integer", "turn": "integer", "age": "integer", "response_ids": "integer"}
_KINDS |= {"mask": "bool", "off_policy": "bool"}
"""Kinds of the arguments that are not floating-point."""


def check_batch(mask: object, **tensors: object) -> None:
    """Raises `ValueError` unless mask is (batch, time) bool and the other given tensors have its shape and device.

    Unchecked, a float mask would select nothing and a shorter tensor would be broadcast, both silently.
    """
    shape = mask.shape if isinstance(mask, Tensor) and mask.ndim == 2 else None
    check_tensor("mask", mask, mask, *([] if shape is None else [shape]))
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor, mask, *([] if shape is None else [shape]))


def check_tensor(
    name: str, value: object, mask: object, *shapes: tuple[int, ...], kind: str = "", words: str = TOKENS
) -> None:
    """Raises `ValueError` unless `value` is a dense tensor with one of the shapes, the kind, and the mask's device.

    kind: bool, integer, float, number (integer or float) or real (also bool); by default the kind of arguments with
    this name. words: the shapes in words.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, not a tensor {words}")
    if value.shape not in shapes:
        beside = f", mask {tuple(mask.shape)}" if isinstance(mask, Tensor) and name != "mask" else ""
        raise ValueError(f"{name} has shape {tuple(value.shape)}{beside}: it must be {words}")
    kind = kind or _KINDS.get(name, "float")
    if not _is(kind, value.dtype):
        raise ValueError(f"{name} must be {kind}, not {value.dtype}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, not {value.layout}")
    if isinstance(mask, Tensor) and value.device != mask.device:
        raise ValueError(f"{name} is on {value.device}, mask on {mask.device}: move it there")


def check_advantage(advantage: object, mask: Tensor) -> None:
    """Raises `ValueError` unless the advantages are numbers (batch, 1) or (batch, time) on the mask's device."""
    shapes = ((len(mask), 1), tuple(mask.shape))
    check_tensor("advantage", advantage, mask, *shapes, kind="number", words="(batch, 1) or (batch, time)")


def _is(kind: str, dtype: torch.dtype) -> bool:
    if kind == "bool":
        return dtype == torch.bool
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    number = whole or dtype.is_floating_point
    return {"integer": whole, "float": dtype.is_floating_point, "number": number, "real": not dtype.is_complex}[kind]


@dataclass(frozen=True, eq=False)
class PolicyLogps:
    """Log-probs of the sampled tokens under each policy, in nats.

    current     (batch, time) policy being optimized, trainer numerics, with gradient; may be None in `prepare`
    behavior    (batch, time) reported by the sampler, after temperature and truncation
    mask        (batch, time) bool, True at tokens to train; the other positions may hold any value, NaN included
    proximal    (batch, time) trainer numerics, weights at the start of the update phase
    reference   (batch, time) policy that the KL term is measured from
    entropy     (batch, time) entropy of the current policy at each token, with gradient
    off_policy  (batch, time) bool, True at tokens of external traces (LUFFY)
    sequence_ids (batch, time) int in [0, batch * time), negative at padding; default: one row is one sequence
    turn        (batch, time) int, turn number of each token in its sequence, negative at padding; an untrained
                observation may have any number. Read at turn levels only
    age         (batch, time) int, age in training steps of the policy that sampled the token: 1 for the newest
    head_current (batch, time, head) log-probs of the sampler's most probable ids at each position, with gradient
    head_behavior (batch, time, head) the sampler's log-probs of the same ids; -inf at missing ids

    Raises `ValueError` for a field that is not a tensor, or has a wrong shape, dtype or device.
    """

    current: Float[Tensor, "batch time"] | None
    behavior: Float[Tensor, "batch time"] | None
    mask: Bool[Tensor, "batch time"]
    proximal: Float[Tensor, "batch time"] | None = None
    reference: Float[Tensor, "batch time"] | None = None
    entropy: Float[Tensor, "batch time"] | None = None
    off_policy: Bool[Tensor, "batch time"] | None = None
    sequence_ids: Int[Tensor, "batch time"] | None = None
    turn: Int[Tensor, "batch time"] | None = None
    age: Int[Tensor, "batch time"] | None = None
    head_current: Float[Tensor, "batch time head"] | None = None
    head_behavior: Float[Tensor, "batch time head"] | None = None

    @property
    def sequences(self) -> Sequences:
        """The sequences of the batch, with their turns if given."""
        return Sequences(self.mask, self.sequence_ids, turn=self.turn)

    def __post_init__(self) -> None:
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        heads = {name: tensors.pop(name) for name in ("head_current", "head_behavior")}
        check_batch(**tensors)
        for name, head in heads.items():
            if head is not None:
                width = head.shape[-1] if isinstance(head, Tensor) and head.ndim == 3 else 0
                check_tensor(name, head, self.mask, (*self.mask.shape, width), words="(batch, time, head)")
        shapes = [tuple(head.shape) for head in heads.values() if head is not None]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"head_current has shape {shapes[0]}, head_behavior {shapes[1]}: both must hold the same ids"
            )

    def required(self, name: str, reader: str) -> Tensor:
        """Returns a field. Raises `ValueError` naming the field and `reader` if the field is None."""
        tensor = getattr(self, name)
        if tensor is None and name == "turn":
            raise ValueError(f"{reader}: {TURNS_UNKNOWN}")
        if tensor is None:
            raise ValueError(f"{reader} needs {name}, which is None")
        return tensor
