"""The log-probs that an objective reads, the policy ratio formed from them, and ALP's noise as printed code.

The trainer has its own implementation of the noise (`trainer/models/perturbation.py`), with a float32 residual
stream and packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.arguments import CheckedFields, check_batch, check_tensor, one_of
from trimtab.corrections.ratios import LEVELS
from trimtab.corrections.reduce import TURNS_UNKNOWN, Sequences


@dataclass(frozen=True)
class Ratio(CheckedFields):
    """The ratio current/proximal or current/behavior.

    level: token; the products sequence, turn (a model turn) or prefix (the tokens up to this one); or their geometric
        means geometric, turn_geometric or prefix_geometric.
    over: the denominator, proximal or behavior.
    """

    level: str = one_of(LEVELS, "token")
    over: str = one_of(("proximal", "behavior"), "proximal")


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


def perturb(layers: torch.nn.ModuleList, log_sigma: torch.Tensor, seed: int) -> list[torch.utils.hooks.RemovableHandle]:
    """Adds sigma_l * eps_l to the input of every decoder layer l, eps_l ~ N(0, I), until the handles are removed.

    Only for the forward whose log-probs are `current`, and its backward: all other forwards have no noise.
    log_sigma: (layers,) a parameter, log 1e-4 at first, with a learning rate of its own (5e-4), without decay, and left
        out of the gradient clip.
    seed: another one for each update and micro-batch; activations that are recomputed get the same noise.
    Not printed: a float32 residual stream, without which bfloat16 rounds most of the noise away.
    """
    handles = []
    for index, layer in enumerate(layers):

        def add(_layer, inputs, index=index):
            hidden = inputs[0]
            generator = torch.Generator(hidden.device).manual_seed(seed * len(layers) + index)
            noise = torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=hidden.dtype)
            return (hidden + log_sigma[index].exp() * noise, *inputs[1:])

        handles.append(layer.register_forward_pre_hook(add))
    return handles
