"""The loss hook of each trainer: the fields that it passes, and the objectives that it can carry.

docs/adapters.md has the same facts, with the versions read and how each was checked. A hook that lacks something an
objective needs refuses it by name, with the reason: a correction that silently does nothing is worse than none.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective
from trimtab.objectives import objective as preset

POLICIES = frozenset({"behavior", "proximal"})
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
"""Preset -> reason why only Trimtab's trainer can train it: another trainer would get nothing but the loss."""


@dataclass(frozen=True)
class Hook:
    """The loss hook of one trainer.

    trainer: its name, as messages print it.
    passes: the fields of `PolicyLogps` that the trainer gives the hook, besides current, mask and turn.
    whole_update: whether the hook sees all micro-batches of an update before it computes the first loss, which mean
        weights, denominators "kept" and second moments require.
    aggregations: the kinds of aggregation that the trainer's own denominators allow; empty for any.
    terms: whether the loss may hold terms without an advantage (KL, entropy).
    remedies: field of `PolicyLogps` -> setting that makes the trainer pass it.
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
            return "its advantages are those of OAPL's regression, which Trimtab's trainer computes from rewards"
        if not self.terms and (objective.kl.coef > 0 or objective.entropy_coef > 0):
            return "kl_coef and entropy_coef have no place in this hook: use the trainer's own KL and entropy terms"
        if missing := objective.needs - self.passes - {"turn"}:  # `micro_batch.turns_of` needs the mask alone
            name = min(missing)
            remedy = f": {self.remedies[name]}" if name in self.remedies else ""
            return f"it reads {name} ({MEANING[name]}), which this hook does not pass{remedy}"
        if objective.needs_update_statistics and not self.whole_update:
            return "it needs statistics of the whole update, and this hook sees a part of it"
        kind = objective.aggregation.kind
        if self.aggregations and kind not in self.aggregations:
            allowed = " or ".join(map(repr, self.aggregations))
            return f"its aggregation is {kind!r}, and this trainer's denominators give {allowed}: set aggregation"
        return None

    def absent(self, reader: str, policy: str) -> TrimtabError:
        """Returns the error for a policy, named in `remedies`, that `reader` reads and the trainer does not pass."""
        return TrimtabError(
            f"{reader} reads {MEANING[policy]}, which {self.trainer} does not have: {self.remedies[policy]}"
        )


_CALCULATE = (
    "set actor_rollout_ref.rollout.calculate_log_probs=True and algorithm.rollout_correction.rollout_is=trimtab, "
    "without bypass_mode"
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
    "verl": Hook("verl", POLICIES, terms=False, remedies={"behavior": _CALCULATE}),
    "prime-rl": Hook("prime-rl", POLICIES | {"reference"}, aggregations=("token-mean",)),
    "skyrl": Hook(
        "SkyRL",
        POLICIES,
        aggregations=("token-mean", "seq-mean-token-mean", "constant"),
        terms=False,
        remedies={"behavior": "set generator.sampling_params.logprobs=0 (0: that of the sampled token alone)"},
    ),
    "nemo-rl": Hook(
        "NeMo-RL", POLICIES | {"reference"}, aggregations=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    ),
    "miles": Hook("Miles", POLICIES | {"reference"}, aggregations=("token-mean", "seq-mean-token-mean")),
    "slime": Hook("slime", POLICIES | {"reference"}, aggregations=("token-mean", "seq-mean-token-mean")),
    "areal": Hook(
        "AReaL",
        POLICIES | {"age"},
        aggregations=("token-mean",),
        terms=False,
        remedies={
            "behavior": "set actor.use_decoupled_loss=true, without which it passes one policy for both",
            "proximal": "set actor.prox_logp_method=recompute",
        },
    ),
    "openrlhf": Hook(
        "OpenRLHF",
        POLICIES,
        terms=False,
        remedies={"behavior": "set --algo.advantage.is_correction_enable, with which vLLM returns them"},
    ),
    "tinker": Hook("tinker", POLICIES | {"reference"}, whole_update=True),
}
"""Hooks by the name of the adapter."""


def hook(trainer: str) -> Hook:
    """Returns the hook of a trainer. Raises `TrimtabError` for an unknown name."""
    if trainer not in HOOKS:
        raise TrimtabError(f"unknown trainer {trainer!r}{did_you_mean(trainer, HOOKS)}")
    return HOOKS[trainer]


def build(trainer: str, objective: str | Objective | None, keywords: Mapping[str, Any]) -> Objective:
    """Returns the preset of a name, with some keywords changed, or the given objective.

    Raises `TrimtabError` if the trainer's hook refuses it, and without an objective: no loss is chosen by default.
    """
    one = hook(trainer)
    if objective is None:
        raise TrimtabError(
            f"{one.trainer}: no objective is given, and this function would replace the trainer's loss: name one, such "
            'as objective="token-tis" (`trimtab explain` lists them)'
        )
    if not isinstance(objective, str) and keywords:
        raise TrimtabError(f"{', '.join(keywords)}: keywords belong to a name; the objective given here is complete")
    built = preset(objective, **keywords) if isinstance(objective, str) else objective
    if (reason := one.refusal(built)) is not None:
        raise TrimtabError(f"{one.trainer} cannot train {built.name}: {reason}")
    return built


def peer_module(trainer: str, name: str) -> Any:
    """Returns a module of a trainer. Raises `TrimtabError` if the trainer is not installed, or lacks the module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise TrimtabError(
            f"{trainer} cannot be used here: {name} needs {error.name}, which is not installed: run this where "
            f"{trainer} is"
        ) from None


def wrap(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `replacement(original, ...)`, with the name and the signature of the original."""

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return replacement(original, *arguments, **keywords)

    return call


def refuse_standard_deviation(objective: Objective, divides: object, remedy: str) -> None:
    """Raises `TrimtabError` if the trainer divides advantages by a standard deviation and the objective does not."""
    if objective.advantage == "dr-grpo" and divides:
        raise TrimtabError(f"{objective.name} has advantages without the standard deviation: {remedy}")
