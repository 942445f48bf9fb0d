"""Functions of verl, each with what Trimtab adds to it; `trimtab.adapters.verl` puts them in place."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import build, dropped_shares, prefixed_metrics, require_correction, turns_of, usable_tokens
from trimtab.adapters.verl_dump import DUMP, SETTINGS
from trimtab.adapters.verl_loss import CARRY_LOGPS, LOSS_PREFIX, PolicyLoss
from trimtab.adapters.verl_monitor import MONITOR
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import correct, mismatch


def wrap_correction(named: Mapping[str, PolicyLoss], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps verl's `compute_rollout_correction_and_add_to_batch` and gives `rollout_is` two more kinds of values.

    `trimtab` puts the sampler's log-probs into the batch, for the loss of the workers; `trimtab-NAME` the weights of an
    objective. Other values go to verl's own function.
    """

    def add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, Any]]:
        chosen = str(rollout_corr_config.get("rollout_is", None))
        if chosen != CARRY_LOGPS and not chosen.startswith(LOSS_PREFIX):
            return original(batch, rollout_corr_config)
        _check_correction(chosen, batch, rollout_corr_config)
        fields = batch.batch
        old, rollout, mask = fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"].bool()
        if chosen == CARRY_LOGPS:
            fields["rollout_is_weights"] = rollout
            return batch, _correction_metrics(mismatch(old, rollout, mask).finalize())
        loss = _named_loss(f"rollout_is={chosen}", named)
        objective = build("verl", loss.name, loss.keywords)
        require_correction(objective, f"rollout_is={chosen}: ", f"use loss_mode={chosen} with rollout_is={CARRY_LOGPS}")
        kept, turn = usable_tokens(mask, rollout, old), turns_of(mask)
        result = correct(old, rollout, kept, weight=objective.weight, masks=objective.masks, turn=turn)
        # Rejected and unscored tokens have the weight 0; the mask stays, and with it verl's denominators.
        fields["rollout_is_weights"] = result.weight.to(old) * result.keep
        return batch, _correction_metrics(result.metrics.finalize() | dropped_shares(mask, kept))

    return add_to_batch


def _check_correction(chosen: str, batch: Any, config: Any) -> None:
    """Raises `TrimtabError` for settings that would have no effect, and where the sampler's log-probs are absent."""
    for key in ("rollout_rs", "rollout_is_batch_normalize"):
        if config.get(key, None):
            raise TrimtabError(
                f"algorithm.rollout_correction.{key} has no effect beside rollout_is={chosen}: leave it out, the "
                "objective has masks and `normalize` itself"
            )
    if "rollout_log_probs" not in batch.batch:
        raise TrimtabError(_missing_logps_message(chosen))


def wrap_validate_config(named: Mapping[str, PolicyLoss], original: Callable[..., None]) -> Callable[..., None]:
    """Wraps verl's config validation: fills in the settings that a loss of Trimtab needs, and raises for wrong ones.

    The trainers V1 and v0 check their configuration at the start, in the process of the driver, before they use it.
    """

    @functools.wraps(original)
    def check(config: Any, *arguments: Any, **keywords: Any) -> None:
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.get("actor", None) or {}
        correction = config.algorithm.get("rollout_correction", None) or {}
        mode = str((actor.get("policy_loss", None) or {}).get("loss_mode", ""))
        if mode.startswith(LOSS_PREFIX):
            _enable_carrying(_named_loss(mode, named), actor, rollout, correction)
        chosen = str(correction.get("rollout_is", None))
        if chosen == CARRY_LOGPS or chosen.startswith(LOSS_PREFIX):
            if correction.get("bypass_mode", False):
                raise TrimtabError(f"rollout_is={chosen} has no effect with bypass_mode: turn bypass_mode off")
            if not rollout.get("calculate_log_probs", False):
                raise TrimtabError(_missing_logps_message(chosen))
        dumped = rollout.get("calculate_log_probs", False) and config.get("trainer", {}).get("rollout_data_dir", None)
        if os.environ.get(DUMP) and not dumped:
            raise TrimtabError(f"{DUMP} adds log-probs to the rollouts that verl writes: {SETTINGS}")
        scored = rollout.get("calculate_log_probs", False) and correction and not correction.get("bypass_mode", False)
        if os.environ.get(MONITOR) and not scored:
            raise TrimtabError(
                f"{MONITOR} compares log-probs of sampler and trainer: set "
                "actor_rollout_ref.rollout.calculate_log_probs=True, and leave algorithm.rollout_correction at verl's "
                "default, without bypass_mode"
            )
        original(config, *arguments, **keywords)

    return check


def _enable_carrying(loss: PolicyLoss, actor: Any, rollout: Any, correction: Any) -> None:
    """Has verl carry the sampler's log-probs to a loss that reads them; nothing else makes such a run possible."""
    objective = loss.validated_objective(actor.get("loss_agg_mode", "token-mean"), actor.get("loss_scale_factor", None))
    if "behavior" not in objective.needs:
        return
    if not correction:
        raise TrimtabError(
            f"algorithm.rollout_correction is empty, and carries the sampler's log-probs that {objective.name} reads: "
            "leave it at verl's default"
        )
    carrying = correction.get("rollout_is", None)
    if carrying not in (None, CARRY_LOGPS):
        raise TrimtabError(
            f"rollout_is={carrying} takes the place of the sampler's log-probs, which {objective.name} reads: leave it "
            f"out, or set algorithm.rollout_correction.rollout_is={CARRY_LOGPS}"
        )
    if carrying is None or not rollout.get("calculate_log_probs", False):
        rollout.calculate_log_probs = True
        correction.rollout_is = CARRY_LOGPS
        settings = f"calculate_log_probs=True and rollout_is={CARRY_LOGPS}"
        print(f"trimtab: set {settings}, as {objective.name} reads the sampler's log-probs")


def _named_loss(setting: str, named: Mapping[str, PolicyLoss]) -> PolicyLoss:
    """Returns the loss that a value `trimtab-NAME`, or a setting to it, names."""
    name = setting.rpartition("=")[2].removeprefix(LOSS_PREFIX)
    if name not in named:
        raise TrimtabError(f"{setting}: no such objective{did_you_mean(name, named)}")
    return named[name]


def _missing_logps_message(chosen: str) -> str:
    return f"rollout_is={chosen} reads the sampler's log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"


def wrap_variance_proxy(original: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Wraps verl's proxy of the gradient's variance, which squares `rollout_is_weights`: hides them if log-probs."""

    @functools.wraps(original)
    def measure(batch: Any, *arguments: Any, **keywords: Any) -> dict[str, float]:
        fields = batch.batch
        if "rollout_is_weights" in fields and _holds_log_probs(fields["rollout_is_weights"], fields["response_mask"]):
            batch = batch.select(batch_keys=[key for key in fields.keys() if key != "rollout_is_weights"])  # noqa: SIM118 - a TensorDict iterates over rows
        return original(batch, *arguments, **keywords)

    return measure


def _holds_log_probs(weights: Tensor, mask: Tensor) -> bool:
    return bool((weights[mask.bool()] < 0).any())


def refuse_logps_as_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of verl that multiplies by `rollout_is_weights`: raises for log-probs in their place."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        weights = given.get("rollout_is_weights")
        if weights is not None and _holds_log_probs(weights, given["response_mask"]):
            raise TrimtabError(
                f"rollout_is={CARRY_LOGPS} carries log-probs for the losses {LOSS_PREFIX}NAME, and verl's "
                f"{function.__name__} would multiply by them: set policy_loss.loss_mode={LOSS_PREFIX}NAME, or "
                f"rollout_is={LOSS_PREFIX}NAME"
            )
        return function(*arguments, **keywords)

    return call


def wrap_bypass_mode(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps v0's `apply_bypass_mode`, which replaces the loss: raises where that is a loss of Trimtab."""

    def apply(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
        mode = str(policy_loss_config.get("loss_mode", ""))
        if mode.startswith(LOSS_PREFIX):
            raise TrimtabError(
                f"bypass_mode would replace the loss {mode}: turn it off, and set rollout_is={CARRY_LOGPS}"
            )
        original(batch, rollout_corr_config=rollout_corr_config, policy_loss_config=policy_loss_config)

    return apply


def _correction_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"rollout_corr/{key}": value for key, value in prefixed_metrics(metrics).items()}
