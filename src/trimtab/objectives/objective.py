"""The `Objective`: ratio, surrogate, weight, masks, regularizers and aggregation, evaluated on a batch.

loss = -(1/D) sum mask * keep * sg[weight] * surrogate(ratio, advantage)  +  kl_coef * KL  -  entropy_coef * entropy
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.code_lines import Lines, write
from trimtab.corrections.correction import BatchCorrection, compute_correction
from trimtab.corrections.divergences import k3
from trimtab.corrections.fields import CheckedFields, one_of, within
from trimtab.corrections.masks import READABLE, Mask
from trimtab.corrections.policy_logps import PolicyLogps, check_advantage
from trimtab.corrections.ratios import (
    PER_TOKEN_LEVELS,
    TURN_LEVELS,
    Number,
    at_level,
    beyond_bound,
    definition,
    log_ratio,
    symbol,
)
from trimtab.corrections.reduce import Sequences, nan_below_minimum, select, widen
from trimtab.corrections.statistics import Count, Histogram, Mean, Mergeable
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.advantages import ADVANTAGE_KINDS
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.ratio import Ratio
from trimtab.objectives.regularizers import KL, Centering
from trimtab.objectives.state import Metrics, State
from trimtab.objectives.surrogates import Surrogate, Terms


class Output(NamedTuple):
    """The loss, a scalar to call `backward` on, and the metrics of the batch."""

    loss: Float[Tensor, ""]
    metrics: Metrics


@dataclass(frozen=True)
class Objective(CheckedFields):
    """A policy optimization objective, composed of parts. Built by `trimtab.objective(name, ...)` or from parts.

    Raises `TrimtabError` for values that are not parts and for combinations in which a part would have no effect.
    """

    name: str
    ratio: Ratio
    surrogate: Surrogate
    weight: Weight | None = None
    masks: tuple[Mask, ...] = ()
    aggregation: Aggregation = field(default_factory=Aggregation)
    kl: KL = field(default_factory=KL)
    centering: bool = False  # whether the expected score under the sampler is subtracted (regularizers.py)
    entropy_coef: Number = within("[0, inf)", 0.0)
    advantage: str = one_of(ADVANTAGE_KINDS, "grpo")  # the kind of advantages that the loss expects
    notes: tuple[str, ...] = ()  # remarks printed with the equation
    source: str = field(default="", compare=False, repr=False)  # where the objective is from, printed with its code

    def __post_init__(self) -> None:
        self.check_fields()
        _validate_parts(self)
        if self.weight is not None and self.ratio.over == "behavior":
            raise TrimtabError(
                "current/behavior already contains proximal/behavior: drop the weight (a recipe takes a method without "
                'one, or name = "composed")'
            )
        refused = self.surrogate.refusal(self.ratio, self.aggregation, corrected=self._has_correction)
        if refused is not None:
            raise TrimtabError(refused)
        if self.centering:
            Centering.of(self.ratio, self.surrogate, corrected=self._has_correction)
        if self._counts_kept and not self.rejects:
            raise TrimtabError('nothing is rejected, so denominator = "kept" has no effect: leave it out')

    @property
    def _has_correction(self) -> bool:
        """Whether it has a weight or a mask."""
        return self.weight is not None or bool(self.masks)

    @property
    def center(self) -> Centering | None:
        """The per-token term that `centering` adds. Raises `TrimtabError` if other parts exclude it."""
        return Centering.of(self.ratio, self.surrogate, corrected=self._has_correction) if self.centering else None

    @property
    def rejects(self) -> bool:
        """Whether a token can be rejected."""
        return bool(self.masks) or (self.weight is not None and self.weight.rejects)

    @property
    def policy_needs(self) -> frozenset[str]:
        """The part of `needs` that the policy term reads.

        Fields read by the KL term alone are excluded: they do not correct the mismatch.
        """
        turn = {"turn"} if self.ratio.level in TURN_LEVELS else set[str]()
        heads = {"head_current", "head_behavior"} if self.centering else set[str]()
        own = frozenset({self.ratio.over}) | turn | heads | self.surrogate.reads
        return own | (self._correction_needs(self.masks) - {"current"})

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `PolicyLogps` that the loss reads besides `current` and `mask`."""
        entropy = {"entropy"} if self.entropy_coef > 0 else set()
        return self.policy_needs | self.kl.needs | entropy

    @property
    def prepare_needs(self) -> frozenset[str]:
        """The subset of `current` and `proximal` that `prepare` reads. Fields not listed need no forward pass."""
        reads = {"current", self.ratio.over} if self.surrogate.collects else set()
        if self._correction_spans_update:
            reads |= self._correction_needs(self.masks if self._counts_kept else ())
        return frozenset(reads & {"current", "proximal"})

    @property
    def needs_update_statistics(self) -> bool:
        """Whether the loss needs statistics of the whole update besides the numbers of its tokens and sequences."""
        return self._correction_spans_update or self.surrogate.collects

    @property
    def learns_without_advantage(self) -> bool:
        """Whether the loss has a gradient even if every advantage is 0: a regression, a KL or an entropy term."""
        return self.surrogate.learns_without_advantage or self.kl.coef > 0 or self.entropy_coef > 0

    @property
    def single_behavior(self) -> bool:
        """Whether one policy must have sampled each whole response, as OAPL's regression on its log-ratio requires."""
        return self.surrogate.single_policy and self.ratio.over == "behavior"

    @property
    def one_advantage_per_response(self) -> bool:
        """Whether all tokens of a response must have the same advantage."""
        rules = any(rule.per_response for rule in self.masks)
        return rules or self.surrogate.per_response or self.ratio.level not in PER_TOKEN_LEVELS

    @property
    def _counts_kept(self) -> bool:
        """Whether rejection changes the denominator."""
        return self.aggregation.denominator == "kept"

    @property
    def _correction_spans_update(self) -> bool:
        """Whether the correction needs statistics of the whole update."""
        return self._counts_kept or (self.weight is not None and self.weight.normalize)

    def _correction_needs(self, masks: tuple[Mask, ...]) -> frozenset[str]:
        """Returns the fields of `PolicyLogps` that the weight and these masks read."""
        parts = (*masks, *([] if self.weight is None else [self.weight]))
        return frozenset({"behavior"} if parts else ()).union(*(part.reads for part in parts)) - {"advantage"}

    @torch.no_grad()
    def prepare(self, logps: PolicyLogps, advantage: Float[Tensor, "batch #time"]) -> State:
        """Returns the statistics of a whole update, or of a part of it; `+` adds parts. No gradient.

        `advantage` is (batch, 1) or (batch, time). Raises `ValueError` naming a field of `prepare_needs` that is None.
        """
        _check_arguments(logps, advantage, None)
        sequences = logps.sequences
        masks = self.masks if self._counts_kept else ()  # otherwise nothing reads what they keep
        correction = self._correct(logps, advantage, masks) if self._correction_spans_update else None
        terms = self._terms(logps, advantage, sequences) if self.surrogate.collects else None
        return self._state(sequences, correction, terms)

    def __call__(
        self, logps: PolicyLogps, advantage: Float[Tensor, "batch #time"], *, state: State | None = None
    ) -> Output:
        """Returns the loss and the metrics of a batch.

        The batch is a micro-batch of the update that `state` describes; without `state`, it is the whole update.
        `advantage` is (batch, 1) or (batch, time). Raises `ValueError` naming a field of `needs` that is None.
        """
        _check_arguments(logps, advantage, state)
        for name in sorted({"current", *self.needs}):
            logps.required(name, self.name)
        sequences = logps.sequences
        correction = self._correct(logps, advantage, self.masks) if self._has_correction else None
        terms = self._terms(logps, advantage, sequences)
        if state is None:
            state = self._state(sequences, correction, terms)
        keep = logps.mask if correction is None else correction.keep

        value, statistics = self.surrogate.checked(terms, state)
        if correction is not None and correction.weight is not None and self.weight is not None:
            value = value * self.weight.normalized(correction.weight, state.weight_total, state.weight_count)
        kept = sequences.count(keep)
        policy = -_weighted_sum(select(value, keep), self.aggregation.scale(sequences, kept, state))
        scale = self.aggregation.scale_original(sequences, state)
        regularizer, of_regularizers = self._regularizers(logps, terms, scale)
        loss = policy + regularizer + self._nan_if_not_finite(logps, terms.on_policy)
        of_correction = {} if correction is None else correction.statistics
        of_loss = _loss_statistics(terms, policy, keep, state)
        return Output(loss, Metrics({**statistics, **of_regularizers, **of_correction, **of_loss}))

    def equation(self, advantage: str | None = None) -> str:
        """Returns the loss as text: one line with its numbers, then one line for each symbol and note.

        advantage: the kind of a recipe's `[advantage]`; by default the kind that the objective expects.
        """
        ratio, weight = self.ratio, self.weight
        factors = ["m", *(["keep"] if self.masks else []), *([] if weight is None else [weight.equation()])]
        loss = f"loss = −1/D Σ {'·'.join(factors)}·{self.surrogate.equation(symbol('r', ratio.level))}"
        policy = {"proximal": "π_old", "behavior": "μ"}[ratio.over]
        lines = [definition("r", ratio.level, "π", policy)]
        lines += [] if weight is None else [weight.definition()]
        lines += [*(f"keep where {rule.equation()}" for rule in self.masks), *self.surrogate.notes()]
        lines += [] if self.center is None else [self.center.equation()]
        lines.append(f"D: {self.aggregation.equation(rejects=self.rejects)}")
        lines.append(f"A: {advantage or self.advantage} advantage")
        if self.kl.coef > 0:
            loss += f" + {self.kl.coef:g}·KL"
            lines.append(f"KL: {self.kl.equation(external='off_policy' in self.needs)}, over m")
        loss += " + 1/D Σ m·A·C" if self.centering else ""
        if self.entropy_coef > 0:
            loss += f" − {self.entropy_coef:g}·H"
            lines.append("H: entropy of π, over m")
        return "\n  ".join([loss, *lines, *(f"note: {note}" for note in self.notes)])

    def code(self, command: str = "") -> str:
        """Returns the loss as a Python function that needs only torch, and functions of whole-update statistics.

        command: the command that prints it, for the comment at the head. Raises `TrimtabError` if the class of a part
        inherits `code` instead of defining it: the class may compute something else than its base class.
        """
        for part in filter(None, (self.surrogate, *self.masks, self.aggregation, self.weight, self.kl)):
            if "code" not in vars(type(part)):
                raise TrimtabError(
                    f"objective {self.name!r}: {type(part).__name__} has no code to print: define its code(lines) "
                    "beside equation (docs/reference-objectives.md)"
                )
        lines = Lines(self.ratio.level, self.ratio.over)
        loss = self._loss_code(lines)
        command = command or f'trimtab.objective("{self.name}", ...).code()'
        source = self.source or "an objective of own parts"
        titles = (f"{self.name}: {source}", f"Printed by Trimtab (Apache-2.0): {command}")
        equation = [row.strip() for row in self.equation().splitlines() if not row.startswith("  A: ")]
        return write(lines, loss, self.name, titles, equation, f"{ADVANTAGE_KINDS[self.advantage]} ({self.advantage})")

    def _loss_code(self, lines: Lines) -> str:
        """Adds the lines of all parts, and returns the loss as an expression."""
        values, weight, policy = lines.values, self.weight, "-surrogate"
        if weight is not None:
            values["weight"] = weight.code(lines)
            policy = "-weight * surrogate"
            if weight.normalize:
                weight.add_mean(lines)
                policy = "-weight / mean_weight * surrogate"
        values["surrogate"] = self.surrogate.code(lines)
        conditions, keep = [rule.code(lines) for rule in self.masks], "mask"
        if self._counts_kept and weight is not None and weight.rejects:
            conditions.append("(weight > 0)")
        if conditions:
            keep, values["keep"] = "keep", "mask & " + "\nkeep = keep & ".join(conditions)
        terms = [f"torch.where({keep}, {policy}, 0.0)"]
        if self.kl.coef > 0:
            terms.append(f"{self.kl.coef} * {self.kl.code(lines)}")
        if self.center is not None:
            terms.append(f"advantage * {self.center.code(lines)}")
        if self.entropy_coef > 0:
            terms.append(f"{-self.entropy_coef} * entropy")
        groups = {"losses": terms}
        if self._counts_kept:
            groups = {"losses": terms[:1], "regularizers": terms[1:]}
        values |= {name: " + ".join(terms).replace("+ -", "- ") for name, terms in groups.items()}
        sums = [self.aggregation.code(lines, name, keep) for name in groups if values[name]]
        return " + ".join(sums)

    def _correct(self, logps: PolicyLogps, advantage: Tensor, masks: tuple[Mask, ...]) -> BatchCorrection:
        """Returns the correction by the weight and these masks."""
        for name in sorted(self._correction_needs(masks)):
            logps.required(name, self.name)
        return compute_correction(logps, advantage, weight=self.weight, masks=masks)

    def _terms(self, logps: PolicyLogps, advantage: Tensor, sequences: Sequences) -> Terms:
        mask = logps.mask
        if self.surrogate.per_response and sequences.ids is None and advantage.shape[1] != 1:
            raise ValueError(f"{self.name} needs one advantage per response, shape (batch, 1)")
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
            behavior=select(logps.required("behavior", self.name).detach(), on_policy)
            if "behavior" in self.surrogate.reads
            else None,
            age=logps.required("age", self.name) if "age" in self.surrogate.reads else None,
        )

    def _state(self, sequences: Sequences, correction: BatchCorrection | None, terms: Terms | None) -> State:
        tokens = sequences.lengths.sum().double()
        zero = torch.zeros_like(tokens)
        magnitudes = self.surrogate.magnitudes(terms) if self.surrogate.collects and terms is not None else None
        kept = sequences.lengths if correction is None else sequences.count(correction.keep)
        weight = None if correction is None else correction.weight_statistics
        return State(
            tokens=tokens,
            sequences=sequences.present.sum().double(),
            sequences_trained=sequences.trained.sum().double(),
            tokens_kept=kept.sum().double(),
            sequences_rejected=(sequences.trained & (kept == 0)).sum().double(),
            weight_total=zero if weight is None else weight.total,
            weight_count=zero if weight is None else weight.count,
            magnitudes=tokens.new_zeros(0) if magnitudes is None else magnitudes,
        )

    def _regularizers(self, logps: PolicyLogps, terms: Terms, scale: Tensor) -> tuple[Tensor, dict[str, Mergeable]]:
        """Returns kl_coef * KL - entropy_coef * entropy + A * C over the original mask, and its statistics."""
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
        if self.center is not None:
            sampled = terms.on_policy[..., None]
            heads = logps.required("head_current", self.name), logps.required("head_behavior", self.name).detach()
            current, behavior = (torch.where(sampled, widen(head), -torch.inf) for head in heads)
            total = total + _weighted_sum(self.center.per_token(current, behavior) * terms.advantage, scale)
            statistics["centering/head_mass"] = Mean.of(behavior.exp().sum(-1), terms.on_policy)
        return total, statistics

    def _to_sampler(self, logps: PolicyLogps, terms: Terms) -> Tensor:
        """Returns log(current/behavior); at tokens without a behavior policy 0, with the gradient of the log-prob."""
        to_behavior = terms.token_log_ratio
        if self.ratio.over != "behavior":
            behavior = logps.required("behavior", self.name).detach()
            to_behavior = log_ratio(logps.required("current", self.name), behavior, terms.on_policy)
        return torch.where(terms.mask & ~terms.on_policy, terms.logp - terms.logp.detach(), to_behavior)

    def _nan_if_not_finite(self, logps: PolicyLogps, on_policy: Tensor) -> Tensor:
        """Returns NaN if a log-prob at a trained token is not finite, else 0. The bounded exponent would hide it.

        A log-prob of the sampler below `MIN_BEHAVIOR` counts as not finite.
        """
        guard = _zero_or_nan(logps.required("current", self.name), logps.mask)
        if "proximal" in self.needs:
            guard = guard + _zero_or_nan(logps.required("proximal", self.name), on_policy)
        if "behavior" in self.needs:
            guard = guard + _zero_or_nan(nan_below_minimum(logps.required("behavior", self.name)), on_policy)
        return guard if self.kl.coef == 0 else guard + _zero_or_nan(logps.required("reference", self.name), logps.mask)


def _check_arguments(logps: object, advantage: object, state: object) -> None:
    """Raises `ValueError` for a wrong type or shape. `PolicyLogps` has checked its own tensors already."""
    if not isinstance(logps, PolicyLogps) or not isinstance(state, State | None):
        raise ValueError(
            "an objective takes PolicyLogps, advantages and the State of `prepare` or none, not "
            f"{type(logps).__name__} and {type(state).__name__}"
        )
    check_advantage(advantage, logps.mask)


def _validate_parts(objective: Objective) -> None:
    masks = objective.masks
    if not isinstance(masks, tuple) or not all(isinstance(rule, Mask) for rule in masks):
        raise TrimtabError(f"masks = {masks!r} must be a tuple of rejection rules (Mask)")
    kinds = {"ratio": Ratio, "surrogate": Surrogate, "aggregation": Aggregation, "kl": KL}
    kinds |= {} if objective.weight is None else {"weight": Weight}
    for name, kind in kinds.items():
        part = getattr(objective, name)
        if not isinstance(part, kind):
            raise TrimtabError(f"{name} = {part!r} is not an instance of {kind.__name__}")
    if len(set(masks)) < len(masks):
        raise TrimtabError("the same rejection rule is given twice: leave one out")
    for rule in masks:
        for name in sorted(rule.reads - set(READABLE)):
            raise TrimtabError(f"{rule.rule} reads {name!r}{did_you_mean(name, READABLE)}")


def _weighted_sum(values: Tensor, scale: Tensor) -> Tensor:
    return (values * scale.to(values.dtype)).sum()


def _zero_or_nan(values: Tensor, mask: Tensor) -> Tensor:
    return (select(values.detach(), mask) * 0.0).sum()


def _loss_statistics(terms: Terms, policy: Tensor, keep: Tensor, state: State) -> dict[str, Mergeable]:
    """Returns the metrics of the loss. Micro-batches of an update add up in `loss/policy`, a mean over updates."""
    log, on_policy = terms.log_ratio.detach(), terms.on_policy
    share = torch.where(state.tokens > 0, terms.mask.sum() / state.tokens, 1.0)
    return {
        "ratio/": Histogram.of(log, on_policy),
        "ratio/bounded": Mean.of(beyond_bound(log), on_policy),
        "update/kl": Mean.of(k3(terms.token_log_ratio.detach()), on_policy),
        "loss/policy": Mean(policy.detach().double(), share),
        "batch/empty": Count((~keep.any()).double()),
    }
