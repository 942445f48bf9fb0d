"""`PolicyLogps`, the log-probs an objective reads, and `Ratio`, the ratio of two of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.ratios import LEVELS
from trimtab.corrections.weights import check_word


@dataclass(frozen=True)
class Ratio:
    """current over `over`, at a level."""

    level: str = "token"
    over: str = "proximal"

    def __post_init__(self) -> None:
        check_word(self.level, LEVELS, "Ratio")
        check_word(self.over, ("proximal", "behavior"), "Ratio")


@dataclass(frozen=True, eq=False)
class PolicyLogps:
    """Log-probs of the sampled tokens under each policy, in nats; DESIGN: three policies and a reference.

    current     (batch, time) the policy being optimised, trainer numerics, carries gradient; may be None in `prepare`
    behavior    (batch, time) what the sampler reported, after temperature and truncation
    mask        (batch, time) bool, True at tokens to train; anything may stand at the other positions
    proximal    (batch, time) trainer numerics, weights at the start of the update phase
    reference   (batch, time) KL anchor
    entropy     (batch, time) entropy of the current policy at each token, carries gradient
    off_policy  (batch, time) bool, True at tokens of external traces (LUFFY)
    sequence_ids (batch, time) int in [0, batch * time), negative at padding; default: one row is one sequence

    Raises `ValueError` when shapes differ or a mask is not bool.
    """

    current: Float[Tensor, "batch time"] | None
    behavior: Float[Tensor, "batch time"] | None
    mask: Bool[Tensor, "batch time"]
    proximal: Float[Tensor, "batch time"] | None = None
    reference: Float[Tensor, "batch time"] | None = None
    entropy: Float[Tensor, "batch time"] | None = None
    off_policy: Bool[Tensor, "batch time"] | None = None
    sequence_ids: Int[Tensor, "batch time"] | None = None

    def __post_init__(self) -> None:
        for part in fields(self):
            tensor = getattr(self, part.name)
            if tensor is None:
                continue
            if tensor.ndim != 2 or tensor.shape != self.mask.shape:
                raise ValueError(
                    f"{part.name} has shape {tuple(tensor.shape)}, mask {tuple(self.mask.shape)}: "
                    "all must be (batch, time)"
                )
        for name, tensor in (("mask", self.mask), ("off_policy", self.off_policy)):
            if tensor is not None and tensor.dtype != torch.bool:
                raise ValueError(f"{name} must be bool, not {tensor.dtype}")

    def required(self, name: str, reader: str) -> Tensor:
        """A field that must be there; `reader` says for whom in the error."""
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"{reader} needs {name}, which is None")
        return tensor
