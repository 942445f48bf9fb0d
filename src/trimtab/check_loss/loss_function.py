"""The one form in which every loss is probed: a function of a batch and of the update that the batch is a part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trimtab.check_loss.probe_batches import POLICIES, RARE, Batch, of_rows
from trimtab.objectives import Objective, PolicyLogps
from trimtab.objectives.state import State


@dataclass(frozen=True)
class Update:
    """The batch of a whole optimizer update, and the number of micro-batches that it is split into."""

    batch: Batch
    parts: int = 1

    @property
    def tokens(self) -> Tensor:
        return self.batch["mask"].sum()

    @property
    def responses(self) -> int:
        return len(self.batch["mask"])


@dataclass(frozen=True)
class Reading:
    """A value of the loss and its gradients, 0 where it has none."""

    loss: float
    gradient: Tensor
    by_advantage: Tensor
    by_heads: Tensor
    by_entropy: Tensor


@dataclass
class Loss:
    """A loss. call: returns the scalar loss of a batch, which is a part of an update. inputs: how it was called.

    without_counts: the call with the defaults of parameters that take counts of the update, None without defaults.
    """

    name: str
    call: Callable[[Batch, Update], Tensor]
    inputs: str = ""
    without_counts: Callable[[Batch, Update], Tensor] | None = None

    def read(self, batch: Batch, update: Update | None = None) -> Reading:
        """Evaluates it with gradients. Without `update` the batch is the whole update."""
        names = ("current", "advantage", "head_current", "entropy")
        leaves = {name: batch[name].clone().requires_grad_() for name in names}
        given = {**{name: value.clone() for name, value in batch.items()}, **leaves}
        torch.manual_seed(0)  # a loss that draws tokens draws the same ones
        value = self.call(given, Update(given) if update is None else update)
        gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if value.requires_grad:
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            pairs = zip(found, gradients, strict=True)
            gradients = [zero if gradient is None else gradient for gradient, zero in pairs]
        return Reading(float(value.detach()), *gradients)

    @cached_property
    def silent(self) -> bool:
        """Whether no gradient is left at A = 0: no KL, no entropy, no regression."""
        batch = of_rows(4, 0.0, RARE)
        for row, name in enumerate(("current", "reference", "behavior", "proximal")):
            batch[name][row] -= 0.3
        return not bool(self.read(batch).gradient.count_nonzero())

    def policy_gradient(self, batch: Batch) -> Tensor:
        """Returns minus the gradient for each unit of advantage, without what remains at A = 0."""
        gradient = self.read(batch).gradient
        if not self.silent:
            gradient = gradient - self.read({**batch, "advantage": 0 * batch["advantage"]}).gradient
        return -gradient / batch["advantage"]


def of_objective(objective: Objective) -> Loss:
    """Returns an objective as a loss, with the name of the objective."""
    fields = {*POLICIES, "mask", *objective.needs}

    def logps(batch: Batch) -> PolicyLogps:
        return PolicyLogps(**{name: batch[name] for name in sorted(fields)})

    prepared: list[tuple[Update, State]] = []

    def call(batch: Batch, update: Update) -> Tensor:
        if update.batch is batch:
            return objective(logps(batch), batch["advantage"]).loss
        if not prepared or prepared[0][0] is not update:
            prepared[:] = [(update, objective.prepare(logps(update.batch), update.batch["advantage"]))]
        return objective(logps(batch), batch["advantage"], state=prepared[0][1]).loss

    return Loss(objective.name, call)
