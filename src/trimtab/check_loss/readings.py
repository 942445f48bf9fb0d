"""Reads the properties of a loss from its gradients, each when it is first asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor

from trimtab.check_loss import probes
from trimtab.check_loss.bends import Bends, find_bends
from trimtab.check_loss.probes import MOVED, POLICIES, STEP, TOKENS, Batch, Loss, Probe, Reading, Update

ADVANTAGES = {True: probes.POSITIVE, False: probes.NEGATIVE}
"""Whether A > 0 -> the advantage of the probes."""
CURVE_SHIFTS = torch.cat([torch.tensor([STEP]), 0.025 * torch.arange(1, 121)]).double()
"""Log-ratios at which a curve is read to find its bends, upwards and, with the other sign, downwards."""
SHIFTS = torch.tensor([-3, -2, -1, -0.5, -0.1, 0.1, 0.5, 1, 2, 3], dtype=torch.float64)
"""Log-ratios at which all probes are read, up to `Probe.highest`."""
FAR_SHIFTS = torch.cat([-torch.arange(3.5, 25), torch.arange(3.5, 25)]).double()
"""Log-ratios of a token at which losses that clamp log-ratios differently have different weights."""
TO_REFERENCE = torch.tensor([-1.0, -0.5, -0.1, 0.1, 0.5, 3.0]).double()  # log π_ref - log π
FORMS = {"k1": torch.ones_like(TO_REFERENCE), "k2": -TO_REFERENCE, "k3": 1 - TO_REFERENCE.exp()}
FORMS["k3 of the reverse direction"] = (-TO_REFERENCE).exp() - 1
"""KL estimator -> its gradient at `TO_REFERENCE`, with coefficient 1. At a ratio of 1, `unbiased` equals k2."""
RATIO_PROBES = (probes.DRIFT, probes.MISMATCH, probes.DRIFT_ALL, probes.MISMATCH_ALL)
REJECTED_BATCHES = [
    probe.batch(torch.tensor([3.0, -3.0]).double(), sign) for probe in RATIO_PROBES for sign in ADVANTAGES.values()
]
"""Batches in which masks reject responses or tokens."""
PLACES = {"own": MOVED, "before": 0, "after": 3}  # columns of the tokens at which exponents are read
SPREADS = (5e-5, 2e-3, 0.1, 0.6)  # nats between the policies of the random batches
RANDOM_BATCHES = [probes.random_batch(seed, spread) for seed, spread in enumerate(SPREADS)]

DENOMINATORS: dict[str, Callable[[Tensor, int], Tensor | int]] = {
    "token-mean": lambda n, _: n.sum(),
    "seq-mean-token-mean": lambda n, _: len(n) * n,
    "seq-mean-token-sum or constant": lambda n, _: len(n),
    "a mean over all positions, padding too": lambda n, width: len(n) * width,
    "seq-mean-token-mean over responses with a token": lambda n, _: (n > 0).sum() * n,
    "trained-mean-token-sum": lambda n, _: (n > 0).sum(),
    "no denominator, a sum over tokens": lambda _n, _: 1,
}
"""Lengths of the responses, (rows,), and width of the batch -> one denominator for all responses or one for each."""
UNKNOWN = "none of the known"


@dataclass
class Readings:
    """The readings of a loss. A weight is a gradient relative to the gradient if all policies are equal."""

    loss: Loss
    _bends: dict[Probe, dict[tuple[bool, int], Bends]] = field(default_factory=dict)

    @cached_property
    def neutral(self) -> Mapping[str, tuple[Batch, Tensor]]:
        """Batches in which all policies are equal, and their `policy_gradient`."""
        batches = {
            "plain": probes.of_lengths([6, 3, 4, 1]),
            "wide": probes.of_lengths([6, 3, 4, 1], 12),
            "empty": probes.of_lengths([6, 3, 4, 1, 0]),
            "more": probes.of_lengths([6, 3, 4, 1, 6, 6, 2]),
        }
        return {name: (batch, self.loss.policy_gradient(batch)) for name, batch in batches.items()}

    @cached_property
    def by_advantage(self) -> Tensor:
        """-d loss / dA of each response, (rows,), averaged over A and -A, if all policies are equal."""
        batch, _ = self.neutral["plain"]
        up, down = (self.loss.read({**batch, "advantage": sign * batch["advantage"]}) for sign in (1, -1))
        return -(up.by_advantage + down.by_advantage).sum(1) / 2

    @cached_property
    def gradient_if_logps_equal(self) -> Tensor:
        """`policy_gradient` if all log-probs are equal, and nearly 0, so that a shift of tokens changes nothing."""
        batch, _ = self.neutral["plain"]
        same = {name: torch.full_like(batch[name], -1e-6) for name in (*POLICIES, "reference")}
        return self.loss.policy_gradient({**batch, **same})

    @cached_property
    def aggregation(self) -> tuple[str, float]:
        """The denominator that explains the gradients if all policies are equal, and the factor that is left."""
        best = (UNKNOWN, math.nan, 1e-6)
        for name, denominator in DENOMINATORS.items():
            products = []
            for batch, gradient in self.neutral.values():
                lengths = batch["mask"].sum(1).double()
                products.append((gradient[:, 0] * denominator(lengths, batch["mask"].shape[1]))[lengths > 0])
            middle = torch.cat(products).median()
            spread = float((torch.cat(products) - middle).abs().max() / (middle.abs() or 1.0))
            if spread < best[2] - 1e-9:
                best = (name, float(middle), spread)
        return best[:2]

    @cached_property
    def scale(self) -> float:
        """The gradient of a token of `of_rows(8, ...)` if all policies are equal."""
        return float(self.loss.policy_gradient(probes.of_rows(8, 1.0))[0, MOVED]) or 1.0

    def homogeneity(self, factor: int) -> float:
        """Returns the factor by which gradients grow if advantages grow by `factor`, at the token farthest from it."""
        batch, gradient = self.neutral["plain"]
        more = self.loss.policy_gradient({**batch, "advantage": factor * batch["advantage"]})
        times = (factor * more / gradient)[batch["mask"]]
        return float(times[(times - factor).abs().nan_to_num().argmax()])

    @cached_property
    def exponents(self) -> Mapping[tuple[bool, str, str, int], float]:
        """d log weight / d log-prob by sign of A, policy, place of the token (`PLACES`) and side (1 or -1)."""
        result, moves = {}, list(product(POLICIES, (1, -1)))
        for positive, advantage in ADVANTAGES.items():
            batch = probes.of_rows(1 + len(moves), advantage)
            for row, (policy, side) in enumerate(moves, 1):
                batch[policy][row, MOVED] += side * STEP
            gradient = self.loss.policy_gradient(batch)
            for (row, (policy, side)), (place, column) in product(enumerate(moves, 1), PLACES.items()):
                share = float(gradient[row, column] / gradient[0, column])
                change = math.log(share) if share > 0 else share - 1
                result[positive, policy, place, side] = change / (side * STEP)
        return result

    def exponent(self, positive: bool, policy: str, place: str = "own") -> float:
        """Returns the mean of the exponents above and below 1."""
        return sum(self.exponents[positive, policy, place, side] for side in (1, -1)) / 2

    def kink(self, positive: bool, policy: str) -> float:
        """Returns how far the exponents above and below 1 are apart, at the moved token."""
        above, below = (self.exponents[positive, policy, "own", side] for side in (1, -1))
        return abs(above - below)

    def level(self, positive: bool = True, policy: str = "current") -> str:
        """Returns over which tokens the ratio to a policy is taken, near a ratio of 1: a level of `Ratio`."""
        before, after = (abs(self.exponent(positive, policy, place)) for place in ("before", "after"))
        if max(before, after) < 1e-4:
            return "token"
        if before < 1e-4:
            return "prefix" if after > 0.5 else "prefix_geometric"
        return "sequence" if before > 0.5 else "geometric"

    def weights(self, probe: Probe, shifts: Tensor, advantage: float) -> Tensor:
        """Returns the weights of the moved token at these shifts."""
        gradient = self.loss.policy_gradient(probe.batch(shifts, advantage))[:, MOVED]
        return gradient[1:] / gradient[0]

    def bends(self, probe: Probe) -> dict[tuple[bool, int], Bends]:
        """Returns the bends of a probe by whether A > 0 and the direction of the shift, 1 or -1."""
        if probe not in self._bends:
            points = CURVE_SHIFTS[probe.highest >= CURVE_SHIFTS]
            self._bends[probe] = {
                (positive, direction): find_bends(partial(self.weights, probe, advantage=advantage), shifts)
                for positive, advantage in ADVANTAGES.items()
                for direction, shifts in ((1, points), (-1, -CURVE_SHIFTS))
            }
        return self._bends[probe]

    @cached_property
    def padding(self) -> Mapping[str, Mapping[str, float]]:
        """Value at padding ("nan" or "number") -> policy by which it changes loss or gradient -> change of the loss."""
        batch, _ = self.neutral["plain"]
        before = self.loss.read(batch)
        result: dict[str, dict[str, float]] = {"nan": {}, "number": {}}
        for name, (kind, value) in product((*POLICIES, "reference"), (("nan", torch.nan), ("number", -0.7))):
            after = self.loss.read({**batch, name: torch.where(batch["mask"], batch[name], value)})
            change = after.loss - before.loss
            if not abs(change) + float((after.gradient - before.gradient).abs().max()) <= 1e-9:
                result[kind][name] = change
        return result

    @cached_property
    def micro_batch_ratios(self) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of two micro-batches / gradients of the whole batch, if policies are nearly equal.

        Then the same if policies of some responses differ, relative to the first, and last with more padding.
        """
        near, apart = (probes.of_lengths([6, 3, 4, 1, 5]) for _ in range(2))
        near["current"] = near["current"] + STEP / 10
        for count, name in enumerate(POLICIES, 1):
            apart[name] = apart[name] + 0.2 * torch.tensor([0, 3, 1, 4, 2])[:, None] * (9 * count * apart[name]).sin()
        parts = [self._parts(batch) for batch in (near, apart)]
        return parts[0][:2], [(b / a).nan_to_num(1.0, math.inf) for a, b in zip(*parts, strict=True)]

    def _parts(self, batch: Batch) -> list[Tensor]:
        """Returns, at trained tokens, gradients of two micro-batches and with more padding, / those of the batch."""
        before, result = self.loss.read(batch).gradient, []
        for rows in (slice(2), slice(2, None)):
            part = {key: value[rows] for key, value in batch.items()}
            result.append((self.loss.read(part, Update(batch, 2)).gradient / before[rows])[part["mask"]])
        columns = batch.keys() - {"advantage"}
        wide = batch | {key: torch.cat([batch[key], batch[key][:, -2:]], 1) for key in columns}
        return [*result, (self.loss.read(wide).gradient[:, :-2] / before)[batch["mask"]]]

    @cached_property
    def effect_of_other_advantages(self) -> Tensor:
        """The gradients of responses if the advantage of another response is doubled, / gradients before."""
        batch, _ = self.neutral["plain"]
        twice = {**batch, "advantage": torch.cat([2 * batch["advantage"][:1], batch["advantage"][1:]])}
        before, after = (self.loss.read(changed).gradient for changed in (batch, twice))
        return (after / before)[1:][batch["mask"][1:]].nan_to_num(1.0, math.inf)

    @cached_property
    def kl_curve(self) -> Tensor:
        """The gradient of a token at A = 0 if log π_ref - log π is `TO_REFERENCE`, in units of `scale`.

        Then twice at 0.5: with the sampler 0.5 nats away, and with the proximal policy 0.5 nats away.
        """
        batch = probes.of_rows(8, 0.0)  # as for `scale`
        batch["reference"][:, MOVED] += torch.cat([TO_REFERENCE, TO_REFERENCE.new_full((2,), 0.5)])
        batch["behavior"][-2, MOVED] -= 0.5
        batch["proximal"][-1, MOVED] -= 0.5
        return self.loss.at_zero(batch)[:, MOVED] / self.scale

    @property
    def kl_weights(self) -> Tensor:
        """The factors by which the KL term grows if the sampler, and if the proximal policy, is 0.5 nats away."""
        return self.kl_curve[-2:] / self.kl_curve[TO_REFERENCE.tolist().index(0.5)]

    @property
    def kl_form(self) -> tuple[str, float]:
        """The estimator of the KL term and its coefficient: ("none", 0) without KL, ("other", nan) if it is unknown."""
        curve = self.kl_curve[: len(TO_REFERENCE)]
        if float(curve.abs().max()) < 1e-9:
            return "none", 0.0
        for kind, form in FORMS.items():
            coefficient = float((curve * form).sum() / form.square().sum())
            if float((curve - coefficient * form).abs().max()) < 1e-7 * max(1.0, abs(coefficient)):
                weighted = float((self.kl_weights - 1).abs().max()) > 1e-9
                return "unbiased" if kind == "k2" and weighted else kind, coefficient
        return "other", math.nan

    @cached_property
    def gradient_change_at_zero_advantage(self) -> Tensor:
        """The changes of gradients at A = 0 if a whole response moves: the policy by four shifts, then the sampler."""
        shifts = torch.tensor([-1.0, -0.5, 0.5, 1.0, 0, 0, 0]).double()
        batches = (probe.batch(shifts, 1.0) for probe in (probes.DRIFT_ALL, probes.MISMATCH_ALL))
        found = [self.loss.at_zero(batch)[:, MOVED] / self.scale for batch in batches]
        return torch.cat([values[1:5] - values[0] for values in found])

    @cached_property
    def inputs(self) -> Mapping[str, Tensor]:
        """Input that few losses read -> the change of all gradients if it changes, in units of `scale`."""
        batch, before = RANDOM_BATCHES[-1], self.random[-1]
        changed = {"entropy": before.by_entropy.flatten() / self.scale}
        for name, value in {
            "off_policy": ~batch["off_policy"],
            "age": batch["age"] + 1,
            "turn": 0 * batch["turn"],
            "head_behavior": batch["head_behavior"] - torch.tensor([1.5, 0.0, 0.1]).double(),
        }.items():
            after = self.loss.read({**batch, name: value})
            gradients = [(after.gradient - before.gradient).flatten(), after.by_heads.flatten()]
            changed[name] = torch.cat(gradients) / self.scale
        return changed

    @cached_property
    def neighbors(self) -> Mapping[tuple[float, bool, Probe], Tensor]:
        """Gradients of three responses if the second one, or a token of it, moves, / gradients before: (3, tokens).

        By shift in nats, whether A > 0, and the probe that moves it.
        """
        result = {}
        for x, (positive, advantage), probe in product((0.4, 3.0, -3.0), ADVANTAGES.items(), RATIO_PROBES):
            batches = (probe.batch(torch.tensor([shift, 0.0]).double(), advantage) for shift in (0.0, x))
            before, after = map(self.loss.policy_gradient, batches)
            result[x, positive, probe] = (after / before)[:, :TOKENS]
        return result

    def curvature(self, probe: Probe, positive: bool) -> float:
        """Returns d^2 weight / d log-ratio^2 at a ratio of 1: p**2 for ratio**p, 0 for 1 + p * log-ratio."""
        near = self.weights(probe, torch.tensor([-5 * STEP, 5 * STEP]).double(), ADVANTAGES[positive])
        return float(near.sum() - 2) / (5 * STEP) ** 2

    @cached_property
    def rounded(self) -> bool:
        """Whether the loss computes in 16 bits: gradients have that few digits, or weights change in steps."""
        gradient = self.random[2].gradient
        kinds = (torch.bfloat16, torch.float16)
        if len(gradient.unique()) > 4 and any(torch.equal(gradient.to(kind).double(), gradient) for kind in kinds):
            return True
        for probe in (probes.DRIFT, probes.MISMATCH):
            changes = self.weights(probe, torch.linspace(0.01, 0.15, 300).double(), probes.POSITIVE).diff().abs() > 1e-9
            if int(changes.sum()) > 2 and not bool((changes[1:] & changes[:-1]).any()):
                return True
        return False

    def label(self, probe: Probe) -> str:
        """Returns the name of a probe; without proximal policy, π/μ stands for both ratios."""
        one_ratio = "proximal" not in self.loss.inputs
        return probe.name.replace("π/π_old", "π/μ").replace("π_old/μ", "π/μ") if one_ratio else probe.name

    def of_tokens(self, packed: bool) -> list[tuple[Tensor, Tensor]]:
        """Returns masks and gradients if advantages differ within a response; [] if the loss takes one for a response.

        packed: with `sequence_ids`. With these, an objective takes an advantage for each token.
        """
        result = []
        for batch in (*REJECTED_BATCHES, RANDOM_BATCHES[-1]):
            mask, ids = batch["mask"], torch.arange(len(batch["mask"]))[:, None].expand_as(batch["mask"])
            advantage = torch.where(torch.arange(mask.shape[1]) == MOVED, -batch["advantage"], batch["advantage"])
            given = {**batch, "advantage": advantage, **({"sequence_ids": ids} if packed else {})}
            try:
                reading = self.loss.read(given)
            except Exception:  # what others' code raises for another shape
                return []
            if not bool(reading.by_advantage[:, MOVED].any()):
                return []
            result.append((mask, reading.gradient))
        return result

    @cached_property
    def random(self) -> list[Reading]:
        """The readings of `RANDOM_BATCHES`."""
        return [self.loss.read(batch) for batch in RANDOM_BATCHES]
