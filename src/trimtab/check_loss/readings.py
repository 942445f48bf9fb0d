"""What is read of a loss: each property by itself, computed when it is first asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.check_loss import probes
from trimtab.check_loss.bends import Bends, find_bends
from trimtab.check_loss.probes import (
    DOWN,
    MOVED,
    POLICIES,
    STEP,
    TOKENS,
    UP,
    Batch,
    Loss,
    Probe,
    Reading,
    Update,
    of_lengths,
    of_rows,
)

SIGNS = {True: UP, False: DOWN}
"""Whether A > 0 -> the advantage of the probes."""
POINTS = torch.cat([torch.tensor([STEP]), 0.025 * torch.arange(1, 121)]).double()
"""Shifts at which every curve is read, upwards and, with the other sign, downwards."""
SHIFTS = torch.tensor([-2.0, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0]).double()
TO_REFERENCE = torch.tensor([-1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0, 3.0]).double()
FAR = 25.0
NEIGHBOR_SHIFTS = (0.4, 3.0, -3.0)
ONES = (probes.DRIFT, probes.MISMATCH, probes.DRIFT_ALL, probes.MISMATCH_ALL)
PLACES = {"own": MOVED, "before": 0, "after": 3}
SPLITS = {"two": ([6, 3, 4, 1, 5], (2, 5)), "two of as many responses": ([6, 3, 4, 1], (2, 4))}
"""Lengths of responses, and the rows after which a micro-batch ends."""
SPREADS = (5e-5, 2e-3, 0.1, 0.6)
"""Nats between the policies of the random batches."""

DENOMINATORS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "token-mean": lambda n, _: n.sum(),
    "seq-mean-token-mean": lambda n, _: len(n) * n,
    "seq-mean-token-sum or constant": lambda n, _: torch.tensor(len(n)),
    "a mean over all positions, padding too": lambda n, width: torch.tensor(len(n) * width),
    "seq-mean-token-mean over responses with a token": lambda n, _: (n > 0).sum() * n,
    "trained-mean-token-sum": lambda n, _: (n > 0).sum(),
    "no denominator, a sum over tokens": lambda _n, _: torch.tensor(1),
}
"""From the lengths of the responses, (rows,), and the width of the batch: the denominator of each or of all."""
UNKNOWN = "none of the known"


class Neutral(NamedTuple):
    """Where all policies are equal: gradient for each advantage, dL/dA odd in A, and the batch."""

    gradient: Tensor
    by_advantage: Tensor
    batch: Batch


@dataclass
class Readings:
    """The readings of a loss. Weights are relative to that where all policies are equal."""

    loss: Loss
    _bends: dict[tuple[Probe, int], dict[tuple[bool, int], Bends]] = field(default_factory=dict)

    @cached_property
    def neutral(self) -> Mapping[str, Neutral]:
        shapes = {"plain": ([6, 3, 4, 1], 8), "wide": ([6, 3, 4, 1], 12)}
        shapes |= {"empty": ([6, 3, 4, 1, 0], 8), "more": ([6, 3, 4, 1, 6, 6, 2], 8)}
        result = {}
        for name, (lengths, width) in shapes.items():
            batch = of_lengths(lengths, width)
            up, down = self.loss.read(batch), self.loss.read({**batch, "advantage": -batch["advantage"]})
            odd = -(up.by_advantage + down.by_advantage).sum(1) / 2
            result[name] = Neutral(self.loss.policy_gradient(batch), odd, batch)
        return result

    @cached_property
    def flat(self) -> Tensor:
        """The gradient for each advantage where all policies are equal and all log-probs too, which are -1 there."""
        batch = self.neutral["plain"].batch
        same = {name: torch.full_like(batch[name], -1.0) for name in (*POLICIES, "reference")}
        return self.loss.policy_gradient({**batch, **same})

    @cached_property
    def lifted(self) -> Tensor:
        """The same where the current policy is a nat above the proximal one, and that a nat above the sampler."""
        batch = self.neutral["plain"].batch
        return self.loss.policy_gradient(
            {**batch, **{name: batch[name] - low for name, low in zip(POLICIES, (2, 3, 4), strict=True)}}
        )

    @cached_property
    def aggregation(self) -> tuple[str, float]:
        """The denominator that explains the gradients where all policies are equal, and the factor that is left."""
        best = (UNKNOWN, math.nan, math.inf)
        for name, denominator in DENOMINATORS.items():
            products = []
            for gradient, _, batch in self.neutral.values():
                lengths = batch["mask"].sum(1).double()
                divided = denominator(lengths, batch["mask"].shape[1]).expand(len(lengths))
                products += (gradient[:, 0] * divided)[lengths > 0].tolist()
            middle = sorted(products)[len(products) // 2]
            spread = (max(products) - min(products)) / (abs(middle) or 1.0)
            if spread < best[2] - 1e-9:
                best = (name, middle, spread)
        return best[:2] if best[2] < 1e-6 else (UNKNOWN, best[1])

    @cached_property
    def scale(self) -> float:
        """The gradient of a token of `of_rows(8, ...)` where all policies are equal."""
        return float(self.loss.policy_gradient(of_rows(8, 1.0))[0, MOVED]) or 1.0

    @cached_property
    def homogeneity(self) -> float:
        """Gradient where all advantages are three times as large, over three times that before: 1 for a linear loss."""
        batch = self.neutral["plain"].batch
        zero, one, three = (
            self.loss.read({**batch, "advantage": k * batch["advantage"]}).gradient[0, 0] for k in (0, 1, 3)
        )
        return float((three - zero) / (3 * (one - zero)))

    @cached_property
    def exponents(self) -> Mapping[tuple[bool, str, str, int], float]:
        """d log weight / d log-prob by sign of A, policy, place of the token (`PLACES`) and side (1 or -1)."""
        result = {}
        for positive, advantage in SIGNS.items():
            batch = of_rows(1 + 2 * len(POLICIES), advantage)
            sides = [(policy, side) for policy in POLICIES for side in (1, -1)]
            for row, (policy, side) in enumerate(sides, 1):
                batch[policy][row, MOVED] += side * STEP
            gradient = self.loss.policy_gradient(batch)
            for row, (policy, side) in enumerate(sides, 1):
                for place, column in PLACES.items():
                    share = float(gradient[row, column] / gradient[0, column])
                    change = math.log(share) if share > 0 else share - 1
                    result[positive, policy, place, side] = change / (side * STEP)
        return result

    def exponent(self, positive: bool, policy: str, place: str = "own") -> float:
        """The mean of the exponents of both sides."""
        return sum(self.exponents[positive, policy, place, side] for side in (1, -1)) / 2

    def kink(self, positive: bool, policy: str) -> float:
        """The difference of the exponents of both sides at the moved token."""
        above, below = (self.exponents[positive, policy, "own", side] for side in (1, -1))
        return abs(above - below)

    def weights(self, probe: Probe, shifts: Tensor, advantage: float, tokens: int = 0) -> Tensor:
        """Returns the weights of the moved token at these shifts."""
        gradient = self.loss.policy_gradient(probe.batch(shifts, advantage, tokens))[:, MOVED]
        return gradient[1:] / gradient[0]

    def bends(self, probe: Probe, tokens: int = 0) -> dict[tuple[bool, int], Bends]:
        """Returns the bends of a probe by sign of A and direction of the shift. tokens: in place of the probe's."""
        if (probe, tokens) not in self._bends:
            found = {}
            for positive, advantage in SIGNS.items():
                curve = partial(self.weights, probe, advantage=advantage, tokens=tokens)
                for direction, points in ((1, POINTS[probe.highest >= POINTS]), (-1, -POINTS)):
                    found[positive, direction] = find_bends(curve, points)
            self._bends[probe, tokens] = found
        return self._bends[probe, tokens]

    @cached_property
    def curves(self) -> Mapping[tuple[Probe, bool], Tensor]:
        """The weights at `SHIFTS`, or at the highest shift of a probe."""
        return {
            (probe, positive): self.weights(probe, SHIFTS.clamp(max=probe.highest), advantage)
            for probe, (positive, advantage) in product(probes.PROBES, SIGNS.items())
        }

    @cached_property
    def far(self) -> Mapping[bool, Tensor]:
        """The weights at log-ratios of -`FAR` and `FAR`."""
        shifts = torch.tensor([-FAR, FAR]).double()
        return {positive: self.weights(probes.DRIFT, shifts, advantage) for positive, advantage in SIGNS.items()}

    @cached_property
    def padding(self) -> Mapping[tuple[str, str], str]:
        """Field and "nan" or "counted" -> what NaN or another value at padding changes; only where it does."""
        batch = self.neutral["plain"].batch
        before = self.loss.read(batch)
        result = {}
        for name in (*POLICIES, "reference"):
            for kind, value in (("nan", torch.nan), ("counted", -0.7)):
                after = self.loss.read({**batch, name: torch.where(batch["mask"], batch[name], value)})
                change = abs(after.loss - before.loss) + float((after.gradient - before.gradient).abs().max())
                if kind == "nan" and math.isnan(change):
                    result[name, kind] = "loss and gradient" if math.isnan(after.loss) else "the gradient"
                elif kind == "counted" and change > 1e-9:
                    result[name, kind] = f"{after.loss - before.loss:.3g}"
        return result

    @cached_property
    def splits(self) -> Mapping[str, list[Tensor]]:
        """The gradient of each micro-batch over that of the whole, at its trained tokens."""
        result = {}
        for name, (lengths, ends) in SPLITS.items():
            batch = of_lengths(lengths)
            batch["current"] = batch["current"] + STEP / 10
            whole = self.loss.read(batch).gradient
            update = Update(batch, len(ends))
            result[name] = []
            for start, end in pairwise((0, *ends)):
                part = {key: value[start:end] for key, value in batch.items()}
                shares = self.loss.read(part, update).gradient / whole[start:end]
                result[name].append(shares[part["mask"]])
        return result

    @cached_property
    def kl_curve(self) -> Tensor:
        """The gradient of a token at A = 0 against log π_ref - log π (`TO_REFERENCE`), in units of `scale`."""
        batch = of_rows(len(TO_REFERENCE), 0.0)
        batch["reference"][:, MOVED] += TO_REFERENCE
        return self._at_zero(batch)

    @cached_property
    def kl_weighted(self) -> Tensor:
        """The same at 0.5, where nothing else, the sampler, and the proximal policy is 0.5 away."""
        batch = of_rows(8, 0.0)
        batch["behavior"][1, MOVED] -= 0.5
        batch["proximal"][2, MOVED] -= 0.5
        batch["reference"][:, MOVED] += 0.5
        return self._at_zero(batch)[:3]

    @cached_property
    def pull(self) -> Tensor:
        """The gradient at A = 0 where a whole response has moved: current by four shifts, then the sampler."""
        shifts = torch.tensor([-1.0, -0.5, 0.5, 1.0, 0, 0, 0]).double()
        found = [self._at_zero(probe.batch(shifts, 1.0)) for probe in (probes.DRIFT_ALL, probes.MISMATCH_ALL)]
        return torch.cat([values[1:5] - values[0] for values in found])

    def _at_zero(self, batch: Batch) -> Tensor:
        gradient = self.loss.read({**batch, "advantage": 0 * batch["advantage"]}).gradient[:, MOVED]
        return gradient / self.scale

    @cached_property
    def inputs(self) -> Mapping[str, Tensor]:
        """The change of all gradients by an input that few losses read, in units of `scale`."""
        batch = of_rows(2, 1.0)
        batch["advantage"] = torch.tensor([[UP], [DOWN]]).double()
        batch["current"][:, MOVED] += torch.tensor([0.7, -0.9]).double()
        batch["behavior"][:, MOVED] -= 0.1
        before = self.loss.read(batch)
        changes = {
            "off_policy": (torch.arange(TOKENS + 2) == MOVED).expand(2, -1),
            "age": 0 * batch["age"] + 3,
            "turn": 0 * batch["turn"],
            "head_behavior": batch["head_behavior"] - torch.tensor([1.5, 0.0, 0.1]).double(),
        }
        after = {name: self.loss.read({**batch, name: value}) for name, value in changes.items()}
        changed = {
            name: torch.cat([(one.gradient - before.gradient).flatten(), one.by_heads.flatten()]) / self.scale
            for name, one in after.items()
        }
        return {**changed, "entropy": before.by_entropy.flatten() / self.scale}

    @cached_property
    def neighbors(self) -> Mapping[tuple[float, bool, Probe], Tensor]:
        """The gradients of three responses when the second, or a token of it, drifts, over those before: (3, tokens).

        By shift in nats, whether A > 0, and what drifts.
        """
        result = {}
        for x, (positive, advantage), probe in product(NEIGHBOR_SHIFTS, SIGNS.items(), ONES):
            before, after = (
                self.loss.policy_gradient(probe.batch(torch.tensor([shift, 0.0]).double(), advantage))
                for shift in (0.0, x)
            )
            result[x, positive, probe] = (after / before)[:, :TOKENS]
        return result

    @cached_property
    def curvature(self) -> Mapping[tuple[Probe, bool], float]:
        """The second derivative of the weight at a ratio of 1: p**2 for ratio**p, 0 for 1 + p * log ratio."""
        shifts = torch.tensor([-5 * STEP, 5 * STEP]).double()
        return {
            (probe, positive): float(self.weights(probe, shifts, advantage).sum() - 2) / (5 * STEP) ** 2
            for probe, (positive, advantage) in product((probes.DRIFT, probes.MISMATCH), SIGNS.items())
        }

    @cached_property
    def rounded(self) -> bool:
        """Whether it computes in 16 bits: gradients have as few digits, or weights change in steps."""
        gradient = self.random[2].gradient
        kinds = (torch.bfloat16, torch.float16)
        if len(gradient.unique()) > 4 and any(torch.equal(gradient.to(kind).double(), gradient) for kind in kinds):
            return True
        for probe in (probes.DRIFT, probes.MISMATCH):
            changes = self.weights(probe, torch.linspace(0.01, 0.15, 300).double(), UP).diff().abs() > 1e-9
            if int(changes.sum()) > 2 and not bool((changes[1:] & changes[:-1]).any()):
                return True
        return False

    @cached_property
    def without_counts(self) -> list[tuple[Tensor, Tensor]]:
        """Gradients by a call without the counts of the update, and with them; empty for a loss that needs them."""
        if self.loss.without_counts is None:
            return []
        loss, shifts = Loss(self.loss.name, self.loss.without_counts), torch.tensor([3.0, -3.0]).double()
        batches = [probe.batch(shifts, advantage) for probe in ONES for advantage in SIGNS.values()]
        batches += [probes.random_batch(seed, spread) for seed, spread in enumerate(SPREADS)]
        return [(loss.read(batch).gradient, self.loss.read(batch).gradient) for batch in batches]

    @cached_property
    def random(self) -> list[Reading]:
        """The readings of a random batch for each of `SPREADS`."""
        return [self.loss.read(probes.random_batch(seed, spread)) for seed, spread in enumerate(SPREADS)]
