"""`Loss`, through which every loss is read, and small float64 batches, each made to show one property of a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trimtab.objectives import Objective, PolicyLogps

Batch = dict[str, Tensor]
"""The fields of `PolicyLogps` and `advantage`, (batch, 1)."""

POLICIES = ("current", "proximal", "behavior")
TOKENS, MOVED = 4, 1  # trained tokens of a row, and the place of the token that a probe moves
RARE, FREQUENT = -4.0, -0.3  # log-prob of the moved token
POSITIVE, NEGATIVE = 1.5, -0.5  # advantages: a mean of 0 or a std of 1 would hide that a loss normalizes them
STEP = 1e-4  # nats, for slopes; inside the bounds of GSPO


def equal_policies(lengths: Sequence[int], width: int, advantage: Tensor, moved: float | None = None) -> Batch:
    """Returns a batch in which all policies are equal, also at padding.

    advantage: (rows, 1). moved: if it is given, all rows are alike and have this log-prob at the token that is moved.
    """
    rows = len(lengths)
    place = torch.arange(width).expand(rows, width)
    row = torch.zeros(rows, 1, dtype=torch.long) if moved is not None else torch.arange(rows)[:, None]
    logp = -1.1 - 0.13 * ((3 * row + 5 * place) % 11).double()
    if moved is not None:
        logp[:, MOVED] = moved
    heads = torch.tensor([-1.0, -1.5, -2.5], dtype=torch.float64).expand(rows, width, 3)
    return {
        **{name: logp.clone() for name in (*POLICIES, "reference")},
        "entropy": torch.full_like(logp, 0.5),
        "off_policy": torch.zeros_like(logp, dtype=torch.bool),
        "turn": (place >= 2).long(),
        "age": torch.ones_like(place),
        "head_current": heads.clone(),
        "head_behavior": heads.clone(),
        "mask": place < torch.tensor(lengths)[:, None],
        "advantage": advantage.double(),
    }


def of_rows(rows: int, advantage: float, moved: float = RARE, tokens: int = TOKENS) -> Batch:
    """Returns a batch of equal rows, with two columns of padding."""
    return equal_policies([tokens] * rows, tokens + 2, torch.full((rows, 1), advantage), moved)


def of_lengths(lengths: Sequence[int], width: int = 8) -> Batch:
    """Returns a batch of rows with these lengths and different advantages."""
    values = [1.0, -0.5, 2.0, -0.7, 1.3, -1.1, 0.6, 0.9]
    return equal_policies(lengths, width, torch.tensor(values[: len(lengths)])[:, None])


@dataclass(frozen=True)
class Probe:
    """Moves log-probs of one policy by x: the weights at several x are a curve of a loss."""

    name: str
    policy: str  # "current" moves by x, the others by -x: the ratio is exp(x)
    span: str = "token"  # or the whole "response", or "mean": a token moves, the others against it, the mean is kept
    moved: float = RARE  # log-prob of the token that moves
    tokens: int = TOKENS  # of the response

    @property
    def highest(self) -> float:
        """The largest shift: no log-prob may exceed 0."""
        return math.inf if self.moved == RARE else 0.25

    def batch(self, shifts: Tensor, advantage: float) -> Batch:
        """Returns a batch: a row without a shift, then a row for each shift."""
        batch = of_rows(len(shifts) + 1, advantage, self.moved, self.tokens)
        columns = torch.arange(self.tokens + 2)[None]
        shift = torch.cat([shifts.new_zeros(1), shifts])[:, None]
        where = columns == MOVED if self.span == "token" else batch["mask"]
        factor = torch.where(columns == MOVED, 1.0, -1 / (self.tokens - 1) if self.span == "mean" else 1.0).double()
        factor = factor if self.policy == "current" else -factor
        # Log-probs that move up start lower, so that they stay below 0.
        low = (shift - 3).clamp(min=0) * (self.moved == RARE) + 3.0 * (self.span != "token")
        for name in (*POLICIES, "reference"):
            batch[name] = batch[name] - torch.where(where, low, 0.0)
        batch[self.policy] = batch[self.policy] + torch.where(where, factor * shift, 0.0)
        if self.policy == "current":
            batch["reference"] = batch["current"].clone()  # no KL
        return batch


PROBES = (
    Probe("π/π_old of a token", "current"),
    Probe("π_old/μ of a token", "behavior"),
    Probe("π/π_old of a response", "current", "response"),
    Probe("π_old/μ of a response", "behavior", "response"),
    Probe("π/π_old of a frequent token", "current", moved=FREQUENT),
    Probe("π/π_old of a token, the mean kept", "current", "mean"),
    Probe("π_old/μ of a token, the mean kept", "behavior", "mean"),
    Probe("π/π_old of a token in a long response", "current", tokens=128),
)
DRIFT, MISMATCH, DRIFT_ALL, MISMATCH_ALL, DRIFT_FREQUENT, DRIFT_MEAN, MISMATCH_MEAN, DRIFT_LONG = PROBES


def random_batch(seed: int, spread: float, rows: int = 6, width: int = 12) -> Batch:
    """Returns a batch of random log-probs; each policy is `spread` nats away from the one before it."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def moved(logp: Tensor) -> Tensor:
        return (logp + spread * torch.randn(logp.shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)

    lengths = (uniform(rows, 1) * width).long() + 1
    mask = (torch.arange(width)[None] < lengths) & (uniform(rows, width) < 0.85)
    behavior = -0.05 - 3.5 * uniform(rows, width)
    proximal = moved(behavior)
    current = moved(proximal)
    heads = (uniform(rows, width, 3) * 2).log_softmax(-1) - 0.2
    return {
        **{"current": current, "proximal": proximal, "behavior": behavior, "reference": moved(current)},
        **{"entropy": uniform(rows, width), "off_policy": (uniform(rows, width) < 0.2) & mask, "mask": mask},
        **{"turn": (uniform(rows, width) < 0.3).long().cumsum(1), "age": (5 * uniform(rows, width)).long()},
        **{"head_current": heads, "head_behavior": heads - 0.1 * uniform(rows, width, 3)},
        "advantage": 2 * uniform(rows, 1) - 0.8,
    }


@dataclass(frozen=True)
class Update:
    """An optimizer update, from which a loss gets its counts."""

    batch: Batch  # the whole
    parts: int = 1  # micro-batches that it is split into
    counted: bool = True  # whether counts are passed also to parameters that have a default

    @property
    def tokens(self) -> Tensor:
        return self.batch["mask"].sum()

    @property
    def responses(self) -> int:
        return len(self.batch["mask"])


@dataclass(frozen=True)
class Reading:
    """A value of the loss and its gradients, which are 0 for an input that the loss does not read."""

    loss: float
    gradient: Tensor
    by_advantage: Tensor
    by_heads: Tensor
    by_entropy: Tensor


@dataclass
class Loss:
    """A loss. call: returns the scalar loss of a batch, which is a part of an update. inputs: how it is called."""

    name: str
    call: Callable[[Batch, Update], Tensor]
    inputs: str = ""

    def read(self, batch: Batch, update: Update | None = None) -> Reading:
        """Returns the loss of a batch and its gradients. Without `update` the batch is the whole update."""
        names = ("current", "advantage", "head_current", "entropy")
        leaves = {name: batch[name].detach().requires_grad_() for name in names}
        given = {name: value.clone() for name, value in (batch | leaves).items()}  # no leaves: it may write into them
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # a loss that draws tokens draws the same ones
            value = self.call(given, Update(given) if update is None else update)
        gradients = map(torch.zeros_like, leaves.values())
        if value.requires_grad:
            gradients = torch.autograd.grad(value, [*leaves.values()], allow_unused=True, materialize_grads=True)
        return Reading(float(value.detach()), *gradients)

    def at_zero(self, batch: Batch) -> Tensor:
        """Returns the gradient at A = 0; 0 if it is NaN, as of a loss that divides by the std of A."""
        return self.read({**batch, "advantage": 0 * batch["advantage"]}).gradient.nan_to_num()

    @cached_property
    def silent(self) -> bool:
        """Whether the gradient at A = 0 is 0: the loss has no KL, no entropy bonus, no regression."""
        batch = of_rows(4, 0.0)
        for row, name in enumerate((*POLICIES, "reference")):
            batch[name][row] -= 0.3
        return not bool(self.at_zero(batch).count_nonzero())

    def policy_gradient(self, batch: Batch) -> Tensor:
        """Returns -(gradient - gradient at A = 0) / A."""
        rest = 0.0 if self.silent else self.at_zero(batch)
        return (rest - self.read(batch).gradient) / batch["advantage"]


def of_objective(objective: Objective) -> Loss:
    """Returns an objective as a loss of the same name."""
    fields = sorted({*POLICIES, "mask", "sequence_ids", *objective.needs})

    def logps(batch: Batch) -> PolicyLogps:
        return PolicyLogps(**{name: batch[name] for name in fields if name in batch})

    def call(batch: Batch, update: Update) -> Tensor:
        whole = None if update.batch is batch else objective.prepare(logps(update.batch), update.batch["advantage"])
        return objective(logps(batch), batch["advantage"], state=whole).loss

    return Loss(objective.name, call, ", ".join(sorted(objective.needs)))
