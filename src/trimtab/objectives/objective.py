"""The one idea: an objective is a frozen choice of parts.

loss = -(1/D) sum mask * keep * sg[weight] * surrogate(ratio, advantage)  +  kl_coef * KL  -  entropy_coef * entropy
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.correction import Sweep, sweep
from trimtab.corrections.masks import Mask
from trimtab.corrections.ratios import LEVELS, Number, at_level, beyond_bound, log_ratio
from trimtab.corrections.reduce import Selection, Sequences, select
from trimtab.corrections.statistics import Count, Histogram, Mean, Mergeable
from trimtab.corrections.weights import Weight, check_word
from trimtab.errors import TrimtabError
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.metrics import Metrics
from trimtab.objectives.policies import PolicyLogps
from trimtab.objectives.regularizers import KL
from trimtab.objectives.state import State
from trimtab.objectives.surrogates import Regression, SecondMoment, Shaped, Surrogate, Terms


@dataclass(frozen=True)
class Ratio:
    """current over `over`, at a level."""

    level: str = "token"
    over: str = "proximal"

    def __post_init__(self) -> None:
        check_word(self.level, LEVELS, "Ratio")
        check_word(self.over, ("proximal", "behavior"), "Ratio")


class Output(NamedTuple):
    """A scalar to run backward on, and what was seen on the way."""

    loss: Float[Tensor, ""]
    metrics: Metrics


@dataclass(frozen=True)
class Objective:
    """A method, as parts. Make one with `trimtab.objective(name, ...)` or from parts of your own.

    `advantage` is the kind of advantages it expects, `notes` what a reader of the equation should know.
    """

    name: str
    ratio: Ratio
    surrogate: Surrogate
    weight: Weight | None = None
    masks: tuple[Mask, ...] = ()
    aggregation: Aggregation = field(default_factory=Aggregation)
    kl: KL = field(default_factory=KL)
    entropy_coef: Number = 0.0
    advantage: str = "grpo"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weight is not None and self.ratio.over == "behavior":
            raise TrimtabError(f"{self.name}: current/behavior already contains proximal/behavior; drop the weight")
        if not self.entropy_coef >= 0:
            raise TrimtabError(f"entropy_coef = {self.entropy_coef:g} would reward certainty, use 0 or more")

    @property
    def _corrects(self) -> bool:
        """Whether proximal/behavior is looked at."""
        return self.weight is not None or bool(self.masks)

    @property
    def policy_needs(self) -> frozenset[str]:
        """What of `needs` the policy term reads; the KL may read more, which corrects nothing but itself."""
        reads = {self.ratio.over}
        if self._corrects:
            reads |= {"proximal", "behavior"}
        if isinstance(self.surrogate, Shaped):
            reads.add("off_policy")
        return frozenset(reads)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `PolicyLogps` the loss reads besides `current` and `mask`."""
        entropy = {"entropy"} if self.entropy_coef > 0 else set()
        return self.policy_needs | self.kl.needs | entropy

    @property
    def prepare_needs(self) -> frozenset[str]:
        """Which of `current` and `proximal` must be there in `prepare`; whoever needs neither saves a forward."""
        reads: set[str] = set()
        if isinstance(self.surrogate, SecondMoment):
            reads |= {"current"} | ({"proximal"} & {self.ratio.over})
        if self._spans:
            reads.add("proximal")
        if self._judges and any(rule.needs_current for rule in self.masks):
            reads.add("current")
        return frozenset(reads)

    @property
    def single_behavior(self) -> bool:
        """Whether one policy must have sampled a whole response: OAPL regresses the log-ratio to that one."""
        return isinstance(self.surrogate, Regression)

    @property
    def _judges(self) -> bool:
        """Whether rejection changes a denominator."""
        return self._corrects and self.aggregation.denominator == "kept"

    @property
    def _spans(self) -> bool:
        """Whether something the correction finds must be known for the whole update."""
        return self._judges or (self.weight is not None and self.weight.normalize)

    @torch.no_grad()
    def prepare(self, logps: PolicyLogps, advantage: Float[Tensor, "batch #time"]) -> State:
        """What spans the whole update, from all of it or from parts to be added with `+`. No gradient.

        `advantage` is (batch, 1) or (batch, time). Raises `ValueError` naming a field of `prepare_needs` that is None.
        """
        sequences = Sequences(logps.mask, logps.sequence_ids)
        found = self._sweep(logps, advantage, judge=self._judges) if self._spans else None
        terms = self._terms(logps, advantage, sequences) if isinstance(self.surrogate, SecondMoment) else None
        return self._state(sequences, found, terms)

    def __call__(
        self,
        logps: PolicyLogps,
        advantage: Float[Tensor, "batch #time"],
        *,
        state: State | None = None,
    ) -> Output:
        """Loss and metrics of a micro-batch of the update `state` describes; without state, of a whole update.

        `advantage` is (batch, 1) or (batch, time). Raises `ValueError` naming a field of `needs` that is None.
        """
        for name in sorted({"current", *self.needs}):
            logps.required(name, self.name)
        sequences = Sequences(logps.mask, logps.sequence_ids)
        found = self._sweep(logps, advantage) if self._corrects else None
        terms = self._terms(logps, advantage, sequences)
        if state is None:
            state = self._state(sequences, found, terms)
        keep = logps.mask if found is None else found.keep

        value, statistics = self.surrogate(terms, state)
        if found is not None and found.weight is not None and self.weight is not None:
            value = value * self.weight.normalized(found.weight, state.weight_total, state.weight_count)
        kept = sequences.count(keep)
        policy = -_weighted_sum(select(value, keep), self.aggregation.scale(sequences, kept, state))
        regularizer, seen = self._regularizers(logps, terms, self.aggregation.scale_original(sequences, state))
        loss = policy + regularizer + self._guard(logps, terms.on_policy)
        corrected = {} if found is None else found.statistics
        ours = _ratio_statistics(terms) | _loss_statistics(policy, logps.mask, keep, state)
        return Output(loss, Metrics({**statistics, **seen, **corrected, **ours}))

    def equation(self) -> str:
        """The resolved equation with its numbers."""
        from trimtab.objectives.equation import render

        return render(self)

    def _sweep(self, logps: PolicyLogps, advantage: Tensor, *, judge: bool = True) -> Sweep:
        """`judge=False` leaves out rules that read the current policy, which may be absent in `prepare`."""
        reads_current = any(rule.needs_current for rule in self.masks)
        return sweep(
            logps.required("proximal", self.name).detach(),
            logps.required("behavior", self.name).detach(),
            logps.mask,
            weight=self.weight,
            masks=self.masks if judge else tuple(rule for rule in self.masks if not rule.needs_current),
            current=logps.required("current", self.name).detach() if judge and reads_current else None,
            advantage=advantage,
            sequence_ids=logps.sequence_ids,
        )

    def _terms(self, logps: PolicyLogps, advantage: Tensor, sequences: Sequences) -> Terms:
        mask = logps.mask
        if advantage.shape not in ((mask.shape[0], 1), mask.shape):
            raise ValueError(f"advantage has shape {tuple(advantage.shape)}, expected {(mask.shape[0], 1)}")
        on_policy = mask & ~logps.required("off_policy", self.name) if "off_policy" in self.needs else mask
        current = logps.required("current", self.name)
        logp = select(current, mask)
        token = log_ratio(current, logps.required(self.ratio.over, self.name).detach(), on_policy)
        return Terms(
            log_ratio=select(at_level(token, sequences, self.ratio.level), on_policy),
            token_log_ratio=token,
            logp=logp,
            advantage=select(advantage.to(logp.dtype).expand(mask.shape), mask),
            mask=mask,
            on_policy=on_policy,
            sequences=sequences,
        )

    def _state(self, sequences: Sequences, found: Sweep | None, terms: Terms | None) -> State:
        tokens = sequences.lengths.sum().double()
        nothing = torch.zeros_like(tokens)
        surrogate = self.surrogate
        evidence = surrogate.evidence(terms) if isinstance(surrogate, SecondMoment) and terms is not None else None
        kept = sequences.lengths if found is None else sequences.count(found.keep)
        weight = None if found is None else found.weight_statistics
        return State(
            tokens=tokens,
            sequences=sequences.present.sum().double(),
            sequences_trained=sequences.trained.sum().double(),
            tokens_kept=kept.sum().double(),
            sequences_rejected=(sequences.trained & (kept == 0)).sum().double(),
            weight_total=nothing if weight is None else weight.total,
            weight_count=nothing if weight is None else weight.count,
            evidence=tokens.new_zeros(0) if evidence is None else evidence,
        )

    def _regularizers(self, logps: PolicyLogps, terms: Terms, scale: Tensor) -> tuple[Tensor, dict[str, Mergeable]]:
        """kl_coef * KL - entropy_coef * entropy over the original mask, and what was seen."""
        total = terms.logp.new_zeros(())
        statistics: dict[str, Mergeable] = {}
        if self.kl.coef > 0:
            reference = logps.required("reference", self.name).detach()
            to_reference = log_ratio(reference, logps.required("current", self.name), terms.mask)
            to_sampler = self._to_sampler(logps, terms) if "behavior" in self.kl.needs else None
            kl = self.kl.per_token(to_reference, to_sampler)
            total = total + self.kl.coef * _weighted_sum(kl, scale)
            statistics["kl/mean"] = Mean.of(kl, terms.mask)
            statistics["kl/bounded"] = Mean.of(beyond_bound(to_reference), terms.mask)
        if logps.entropy is not None:
            entropy = select(logps.entropy, terms.mask)
            if self.entropy_coef > 0:
                total = total - self.entropy_coef * _weighted_sum(entropy, scale)
            statistics["entropy/mean"] = Mean.of(entropy, terms.mask)
        return total, statistics

    def _to_sampler(self, logps: PolicyLogps, terms: Terms) -> Tensor:
        """log(current/behavior) of every token. External ones have no behavior policy: 0, with the policy's gradient."""
        sampled = terms.token_log_ratio
        if self.ratio.over != "behavior":
            behavior = logps.required("behavior", self.name).detach()
            sampled = log_ratio(logps.required("current", self.name), behavior, terms.on_policy)
        return torch.where(terms.mask & ~terms.on_policy, terms.logp - terms.logp.detach(), sampled)

    def _guard(self, logps: PolicyLogps, own: Tensor) -> Tensor:
        """0, or NaN when a policy is not finite at a trained token: a bounded exponent must not hide it."""
        assert logps.current is not None
        guard = _zero_or_nan(logps.current, logps.mask)
        for name in sorted(self.needs & {"proximal", "behavior"}):
            guard = guard + _zero_or_nan(logps.required(name, self.name), own)
        return guard if self.kl.coef == 0 else guard + _zero_or_nan(logps.required("reference", self.name), logps.mask)


def _weighted_sum(values: Tensor, scale: Tensor) -> Tensor:
    return (values * scale.to(values.dtype)).sum()


def _zero_or_nan(values: Tensor, mask: Tensor) -> Tensor:
    return (select(values.detach(), mask) * 0.0).sum()


def _ratio_statistics(terms: Terms) -> dict[str, Mergeable]:
    own = terms.log_ratio.detach()
    return {
        "ratio/": Histogram.of(own, Selection(terms.on_policy, own.dtype)),
        "ratio/bounded": Mean.of(beyond_bound(own), terms.on_policy),
    }


def _loss_statistics(policy: Tensor, mask: Tensor, keep: Tensor, state: State) -> dict[str, Mergeable]:
    """`loss/policy` counts a micro-batch as its share of the update's tokens, so that updates average."""
    share = torch.where(state.tokens > 0, mask.sum() / state.tokens, 1.0)
    return {
        "loss/policy": Mean(policy.detach().double(), share),
        "batch/empty": Count((~keep.any()).double()),
    }
