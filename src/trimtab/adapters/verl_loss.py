"""A Trimtab objective with the signature of verl's policy losses (`trimtab.adapters.verl` registers them)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import build, hook
from trimtab.adapters.loss_settings import SETTINGS, chosen, refuse
from trimtab.adapters.micro_batch import averaged, evaluate
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps, keywords_of, objective
from trimtab.objectives.ratio_bounds import GeometricClip, SoftGate
from trimtab.objectives.surrogates import Clipped

LOSS_PREFIX = "trimtab-"
"""Prefix of the name of an objective in `policy_loss.loss_mode`."""
CARRY_LOGPS = "trimtab"
"""The value of `rollout_correction.rollout_is` that carries the sampler's log-probs to the loss."""
KEYWORDS = "trimtab"
"""The key of `policy_loss` that holds the keywords of the objective."""
SET = "+actor_rollout_ref.actor.policy_loss.trimtab"
"""Prefix of a keyword of the objective on verl's command line: SET.KEYWORD=VALUE."""
ACTOR = SETTINGS["VERL_ACTOR"]
"""Settings in verl's `actor` section that verl's own losses read."""
SAME_BOUNDS = (Clipped, GeometricClip, SoftGate)
"""Surrogates whose bounds have the same meaning as the bounds of verl's own losses of that kind."""
MODES = {"constant": "seq-mean-token-sum-norm"}
"""Aggregation -> verl's `loss_agg_mode`, if the names differ."""


class PolicyLoss:
    """An objective with the signature of verl's policy losses, built from verl's configuration at each call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns a micro-batch's share of the mini-batch's loss, and metrics. All tensors are (batch, time).

        config: verl's `ActorConfig`. Denominators are verl's counts of the whole mini-batch or, if verl passes none,
        counts of the given batch. Raises `TrimtabError` if `loss_agg_mode` is not the aggregation of the objective, or
        if log-probs that the objective reads are missing.
        """
        counts = dict(getattr(config, "global_batch_info", None) or {})
        mask = response_mask.bool()
        built = self.validated_objective(config, loss_agg_mode)
        tokens, sequences = counts.get("batch_num_tokens"), counts.get("global_batch_size")
        tokens = mask.sum() if tokens is None else tokens
        sequences = mask.any(1).sum() if sequences is None else sequences  # As verl counts them.
        behavior = _sampler_logps(built, rollout_is_weights, mask)
        logps = PolicyLogps(log_prob, behavior, mask, proximal=old_log_prob)
        loss, metrics, _ = evaluate(built, logps, advantages, counts=(tokens, sequences))
        return loss * (counts.get("dp_size") or 1), {f"actor/{key}": value for key, value in averaged(metrics).items()}

    def validated_objective(self, actor: Any, loss_agg_mode: str) -> Objective:
        """Returns the objective for verl's `actor` section, an `ActorConfig` or the section as composed by Hydra.

        Raises `TrimtabError` if verl aggregates or scales differently, and for settings without effect.
        """
        built = build("verl", self.name, loss_keywords(self.name, actor))
        wanted = MODES.get(built.aggregation.kind, built.aggregation.kind)
        if loss_agg_mode != wanted:
            raise TrimtabError(
                f"{built.name} aggregates by {wanted}, and verl by {loss_agg_mode}: set "
                f"actor_rollout_ref.actor.loss_agg_mode={wanted}, or give the objective another aggregation, such as "
                f"{SET}.aggregation={loss_agg_mode}"
            )
        return built


def loss_keywords(name: str, actor: Any) -> dict[str, Any]:
    """Returns the keywords of an objective that verl's `actor` section sets.

    These are the keywords under `policy_loss.trimtab`, the constant length, and verl's own bounds if the objective has
    them and they are not at verl's defaults. Raises `TrimtabError` for bounds that contradict a keyword, and for
    settings that only verl's own losses read.
    """
    keywords, known = given_keywords(getattr(actor, "policy_loss", None)), keywords_of(name)
    values, refused = _bounds(actor), []
    for key, value in values.items():
        keyword = ACTOR[key].keyword
        if keyword not in known or not isinstance(objective(name).surrogate, SAME_BOUNDS):
            refused.append(key)
        elif keywords.setdefault(keyword, value) != value:
            raise TrimtabError(
                f"actor.{key}={value} and policy_loss.trimtab.{keyword}={keywords[keyword]} contradict each other: "
                "leave one out"
            )
    refuse("verl", ACTOR, refused, f"As {SET}.KEYWORD")
    if keywords.get("aggregation", known.get("aggregation")) == "constant":
        # The constant length is verl's: its KL and entropy terms divide by it too.
        factor = getattr(actor, "loss_scale_factor", None)
        if factor is None:
            raise TrimtabError(f"{name} divides by a constant length: set actor.loss_scale_factor to it")
        if keywords.setdefault("length_max", int(factor)) != factor:
            raise TrimtabError(f"{name}: length_max is not actor.loss_scale_factor = {factor}: leave it out")
    return keywords


def _bounds(actor: Any) -> dict[str, Any]:
    """Returns the bounds of verl's losses that are not at verl's defaults; a null bound becomes `clip_ratio`."""
    values = chosen(ACTOR, actor)
    null = [key for key, value in values.items() if value is None]
    if not null:
        return values
    common = values.pop("clip_ratio", None)  # None also if it is verl's default
    filled = values | dict.fromkeys(null, common)
    return {key: value for key, value in filled.items() if value is not None}


def given_keywords(section: Any) -> dict[str, Any]:
    """Returns the keywords of an objective in a section of verl's configuration, as plain Python values."""
    given = (section.get(KEYWORDS) if isinstance(section, Mapping) else getattr(section, KEYWORDS, None)) or {}
    if not isinstance(given, dict):
        omega = importlib.import_module("omegaconf").OmegaConf
        given = omega.to_container(given, resolve=True) if omega.is_config(given) else given
    if not isinstance(given, dict) or "name" in given:
        raise TrimtabError(f"{KEYWORDS} has keywords of the objective that loss_mode names: {SET}.KEYWORD=VALUE")
    return dict(given)


def _sampler_logps(built: Objective, carried: Tensor | None, mask: Tensor) -> Tensor | None:
    """Returns the sampler's log-probs, which verl passes on in `rollout_is_weights`."""
    if "behavior" not in built.needs:
        return None
    if carried is None:
        raise hook("verl").absent(built.name, "behavior")
    if bool((carried[mask] > 0).any()):
        raise TrimtabError(
            f"rollout_is_weights holds weights, not the sampler's log-probs that {built.name} reads: set "
            f"algorithm.rollout_correction.rollout_is={CARRY_LOGPS}"
        )
    return carried
