"""What the loss hook of each trainer passes on, and which objectives it can carry.

Facts are those of docs/frameworks.md, with the versions read and how each was checked. A hook that lacks something an
objective needs refuses it by name, with the reason: a correction that silently does nothing is worse than none.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trimtab.adapters.dump import Dump
from trimtab.adapters.monitoring import OBSERVED, Observations
from trimtab.corrections.reduce import nan_below_minimum
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective, PolicyLogps, State
from trimtab.objectives import objective as preset

POLICIES = frozenset({"behavior", "proximal"})
ALWAYS = frozenset({"turn"})
"""Fields of `PolicyLogps` that the mask alone determines (`turns_of`)."""

MEANING = {
    "behavior": "the sampler's log-probs",
    "proximal": "the log-probs at the start of the update",
    "reference": "the reference policy's log-probs",
    "entropy": "the entropy of the current policy",
    "off_policy": "the tokens of external traces",
    "age": "the age of each token's policy",
    "head_current": "top-k log-probs",
    "head_behavior": "the sampler's top-k log-probs",
}
OWN_RUN = {
    "token-alp": "the noise in the model is that of Trimtab's trainer; without it this is token-alp-bypass: use that",
    "seq-alp": "the noise in the model is that of Trimtab's trainer; without it this is seq-bypass: use that",
    "soup": "an older policy begins the responses in Trimtab's rollouts; without it this is token-bypass: use that",
}
"""Presets of which another trainer would get the loss only, with the reason."""

METRICS = (
    *("clip/low", "clip/high", "clip/dual", "clip/turned", "clip/weight", "kl/mean", "weight/mean", "weight/changed"),
    *("reject/tokens", "reject/sequences", "ratio/bounded", "update/kl", "unscored", "unscored_tokens", *OBSERVED),
)
"""Shares and means that keep their meaning when a trainer averages them over micro-batches."""

OPTIMAL = "its advantages are those of OAPL's regression, which Trimtab's trainer computes from rewards"


@dataclass(frozen=True)
class Hook:
    """The loss hook of one trainer.

    trainer: its name, as messages print it.
    passes: the fields of `PolicyLogps` that the trainer gives the hook, besides current, mask and turn.
    whole_update: whether the hook sees all micro-batches of an update before the first loss, as mean weights, kept
        denominators and second moments need.
    aggregations: the kinds that the trainer's own denominators allow; empty for any.
    terms: whether the loss may hold terms without an advantage (KL, entropy).
    remedies: field -> what makes the trainer pass it.
    """

    trainer: str
    passes: frozenset[str]
    whole_update: bool = False
    aggregations: tuple[str, ...] = ()
    terms: bool = True
    remedies: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, objective: Objective) -> str | None:
        """Returns the reason why the hook cannot carry an objective, or None."""
        if objective.name in OWN_RUN:
            return OWN_RUN[objective.name]
        if objective.advantage == "optimal":
            return OPTIMAL
        if not self.terms and (objective.kl.coef > 0 or objective.entropy_coef > 0):
            return "kl_coef and entropy_coef have no place in this hook: use the trainer's own KL and entropy terms"
        for name in sorted(objective.needs - self.passes - ALWAYS):
            remedy = f": {self.remedies[name]}" if name in self.remedies else ""
            return f"it reads {name} ({MEANING[name]}), which this hook does not pass{remedy}"
        if objective.needs_update_statistics and not self.whole_update:
            return "it needs statistics of the whole update, and this hook sees a part of it"
        kind = objective.aggregation.kind
        if self.aggregations and kind not in self.aggregations:
            allowed = " or ".join(map(repr, self.aggregations))
            return f"its aggregation is {kind!r}, and this trainer's denominators give {allowed}: set aggregation"
        return None

    def check(self, objective: Objective) -> Objective:
        """Returns the objective. Raises `TrimtabError` with the reason where the hook cannot carry it."""
        reason = self.refusal(objective)
        if reason is not None:
            raise TrimtabError(f"{self.trainer} cannot train {objective.name}: {reason}")
        return objective


_CALCULATE = (
    "set actor_rollout_ref.rollout.calculate_log_probs=True and algorithm.rollout_correction.rollout_is=trimtab"
)

HOOKS: dict[str, Hook] = {
    "trl": Hook(
        "TRL",
        POLICIES | {"reference", "entropy"},
        whole_update=True,
        remedies={"behavior": "set use_vllm=True, or return logprobs from a rollout_func"},
    ),
    "trl-async": Hook(
        "AsyncGRPO",
        POLICIES | {"entropy", "age"},
        whole_update=True,
        remedies={"reference": "there is no reference model, leave kl_coef out"},
    ),
    "verl": Hook(
        "verl", POLICIES, remedies={"behavior": _CALCULATE, "reference": "use actor.use_kl_loss"}, terms=False
    ),
    "prime-rl": Hook("prime-rl", POLICIES | {"reference"}, aggregations=("token-mean",)),
    "skyrl": Hook("SkyRL", POLICIES, terms=False, remedies={"reference": "use trainer.algorithm.use_kl_loss"}),
    "nemo-rl": Hook(
        "NeMo-RL",
        POLICIES | {"reference"},
        aggregations=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    ),
    "miles": Hook("Miles", POLICIES | {"reference"}, aggregations=("token-mean", "seq-mean-token-mean")),
    "slime": Hook("slime", POLICIES | {"reference"}, aggregations=("token-mean", "seq-mean-token-mean")),
    "areal": Hook("AReaL", POLICIES | {"age"}, aggregations=("token-mean",), terms=False),
    "openrlhf": Hook("OpenRLHF", POLICIES, terms=False),
    "tinker": Hook("tinker", POLICIES | {"reference"}, whole_update=True),
}
"""Hooks by the name of the adapter."""


def hook(trainer: str) -> Hook:
    """Returns the hook of a trainer. Raises `TrimtabError` for an unknown name."""
    if trainer not in HOOKS:
        raise TrimtabError(f"unknown trainer {trainer!r}{did_you_mean(trainer, HOOKS)}")
    return HOOKS[trainer]


def build(trainer: str, objective: str | Objective | None, keywords: Mapping[str, Any]) -> Objective:
    """Returns a preset with some keywords changed, or the given objective, after the check of the trainer's hook.

    Raises `TrimtabError` without an objective: the loss of a run is never chosen here.
    """
    if objective is None:
        raise TrimtabError(
            f"{hook(trainer).trainer}: no objective is given, and this function would replace the trainer's loss: name "
            'one, such as objective="token-tis" (`trimtab explain` lists them)'
        )
    if not isinstance(objective, str):
        if keywords:
            raise TrimtabError(
                f"{', '.join(keywords)}: keywords belong to a name; the objective given here is complete"
            )
        return hook(trainer).check(objective)
    return hook(trainer).check(preset(objective, **keywords))


def peer_module(trainer: str, name: str) -> Any:
    """Returns a module of a trainer. Raises `TrimtabError` where the trainer is not installed, or lacks the module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise TrimtabError(
            f"{trainer} cannot be used here: {name} needs {error.name}, which is not installed: run this where "
            f"{trainer} is"
        ) from None


def per_response(objective: Objective, advantage: Tensor, mask: Tensor) -> Tensor:
    """Returns the advantages as the objective reads them: (batch, 1) where it judges whole responses.

    advantage: (batch, time). Raises `TrimtabError` where those of a response differ and the objective needs one.
    """
    if not objective.one_advantage_per_response:
        return advantage
    if advantage.shape[1] == 0:
        return advantage.new_zeros(len(advantage), 1)
    lowest = torch.where(mask, advantage, math.inf).amin(1, keepdim=True)
    highest = torch.where(mask, advantage, -math.inf).amax(1, keepdim=True)
    trained = mask.any(1, keepdim=True)
    # Rounding of a scaled advantage is not a difference.
    if (trained & (highest - lowest > 1e-4 * highest.abs().clamp(min=1e-30))).any():
        raise TrimtabError(f"{objective.name} needs one advantage a response, and those of its tokens differ")
    return torch.where(trained, highest, 0.0)


def prefixed_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of an update as `trimtab/KEY`, without those by tenth of the response and without NaN."""
    values = metrics.items()
    return {
        f"trimtab/{key}": value for key, value in values if not key.startswith("clip/tenth/") and not math.isnan(value)
    }


def averaged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics of a micro-batch for a trainer that averages them: those of `METRICS`, named `trimtab/...`.

    A mean over nothing is 0, as in the trainers' own metrics: they reduce key by key over processes, and wait for ever
    where one of them has a key less.
    """
    kept = {key: metrics[key] for key in METRICS if key in metrics}
    return {f"trimtab/{key}": 0.0 if math.isnan(value) else value for key, value in kept.items()}


def require_correction(objective: Objective, where: str, remedy: str) -> None:
    """Raises `TrimtabError` unless the objective has a weight or masks that a hook of corrections alone can apply.

    Such a hook passes log-probs of the sampler and of the trainer, the current policy and advantages are not there.
    `where` begins the message and `remedy` ends it.
    """
    if objective.weight is None and not objective.masks:
        raise TrimtabError(f"{where}{objective.name} has no weight and no mask: this hook applies only these")
    unread = frozenset().union(*(rule.reads for rule in objective.masks)) & {"current", "advantage"}
    if unread:
        names = " and ".join(sorted(unread))
        raise TrimtabError(f"{where}{objective.name} reads {names}, which this hook does not pass: {remedy}")


def refuse_standard_deviation(objective: Objective, divides: object, remedy: str) -> None:
    """Raises `TrimtabError` where the trainer divides advantages that the objective only centers."""
    if objective.advantage == "dr-grpo" and divides:
        raise TrimtabError(f"{objective.name} has advantages without the standard deviation: {remedy}")


def turns_of(mask: Tensor) -> Tensor:
    """Returns (batch, time) the number of the run of trained tokens that each position is in or after, from 0.

    What lies between the turns of a model (observations, template) is untrained, so that runs of the mask are turns.
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask & ~before).cumsum(1) - 1).clamp(min=0)


CERTAIN = math.log(0.99)
"""Log-prob of the trainer from which a token that the sampler did not score is left out without its response."""


def missing_logps(mask: Tensor, behavior: Tensor) -> Tensor:
    """Returns (batch, time) bool: the trained tokens without a log-prob of the sampler."""
    return mask & ~torch.isfinite(nan_below_minimum(behavior))


def usable_tokens(mask: Tensor, behavior: Tensor, trainer: Tensor) -> Tensor:
    """Returns (batch, time) bool: the trained tokens whose log-prob the sampler reported, in responses that are usable.

    Some engines report none for a token of which they were certain. Where the trainer is too, only the token is left
    out: its ratio is close to 1, and its gradient close to 0. Any other token without a log-prob is an error of unknown
    size (an overflow, a token outside top-p): its response is left out whole.
    """
    missing = missing_logps(mask, behavior)
    unusable = missing & ~(trainer.detach() >= CERTAIN)
    return mask & ~missing & ~unusable.any(1, keepdim=True)


def dropped_shares(mask: Tensor, kept: Tensor) -> dict[str, float]:
    """Returns the shares of trained tokens that `usable_tokens` left out, and of responses without any other token."""
    responses, tokens = mask.any(1), mask.sum().clamp(min=1)
    return {
        "unscored": ((responses & ~kept.any(1)).sum() / responses.sum().clamp(min=1)).item(),
        "unscored_tokens": ((mask & ~kept).sum() / tokens).item(),
    }


def evaluate(
    objective: Objective,
    mask: Tensor,
    advantage: Tensor,
    *,
    current: Tensor,
    behavior: Tensor | None,
    proximal: Tensor | None,
    reference: Tensor | None = None,
    age: Tensor | None = None,
    state: State | None = None,
    dump: Dump | None = None,
    monitor: Observations | None = None,
    step: int | None = None,
) -> tuple[Tensor, dict[str, float], PolicyLogps]:
    """Returns the loss of a micro-batch, its metrics, and the log-probs as the objective read them.

    All tensors are (batch, time). Tokens whose log-prob the sampler did not report are left out and counted
    where the objective reads it; denominators of `state` stay. `dump` and `monitor` receive all tokens. step: the
    number of the update for `monitor`, where the trainer passes it.
    """
    logps = PolicyLogps(current, behavior, mask, proximal=proximal, reference=reference, turn=turns_of(mask), age=age)
    observed = record(logps, advantage, dump=dump, monitor=monitor, step=step)
    kept = mask
    if behavior is not None and "behavior" in objective.needs:
        kept = usable_tokens(mask, behavior, current if proximal is None else proximal)
    logps = replace(logps, mask=kept)
    output = objective(logps, per_response(objective, advantage, mask), state=state)
    return output.loss, output.metrics.finalize() | dropped_shares(mask, kept) | observed, logps


def record(
    logps: PolicyLogps,
    advantage: Tensor,
    *,
    dump: Dump | None = None,
    monitor: Observations | None = None,
    step: int | None = None,
) -> dict[str, float]:
    """Writes the log-probs of a micro-batch, shows them to a monitor, and returns its scalars; no loss is computed.

    advantage, step: as for `evaluate`. Raises `TrimtabError` without log-probs of the sampler.
    """
    used = "dump" if dump is not None else "monitor"
    if logps.behavior is None and (dump is not None or monitor is not None):
        raise TrimtabError(
            f"{used}: this trainer passes no log-probs of the sampler: turn them on as for an objective that reads "
            f"them (docs/adapters.md), or leave {used} out"
        )
    if dump is not None:
        dump.write_call(logps, advantage)
    return {} if monitor is None else monitor.show(logps, step)


def counted_state(tokens: Tensor | float, sequences: Tensor | float, like: Tensor) -> State:
    """Returns the state of an update of which only the trainer's own counts are known.

    tokens, sequences: trained tokens and sequences of the whole update, the denominators of the aggregation. With 1
    the loss is a sum over tokens, or over sequences of their means, to be divided by the trainer. like: a tensor on the
    device of the batch.
    """
    tokens, sequences = (
        torch.as_tensor(value, dtype=torch.float64, device=like.device) for value in (tokens, sequences)
    )
    zero = torch.zeros_like(tokens)
    return State(
        tokens=tokens,
        sequences=sequences,
        sequences_trained=sequences,
        tokens_kept=tokens,
        sequences_rejected=zero,
        weight_total=zero,
        weight_count=zero,
        magnitudes=zero.new_zeros(0),
    )
