"""Functions of verl, each with what Trimtab adds to it; `trimtab.adapters.verl` puts them in place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import build, reported, require_correction, turns_of
from trimtab.adapters.verl_loss import CARRY, PREFIX, PolicyLoss
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective, correct, mismatch


def corrected(named: Mapping[str, PolicyLoss], plain: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, dict]]:
    """Wraps verl's `compute_rollout_correction_and_add_to_batch` and gives `rollout_is` two more kinds of values.

    `trimtab` puts the sampler's log-probs into the batch, for the loss of the workers; `trimtab-NAME` the weights of an
    objective. Other values go to verl's own function.
    """

    def add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, Any]]:
        chosen = str(rollout_corr_config.get("rollout_is", None))
        if chosen != CARRY and not chosen.startswith(PREFIX):
            return plain(batch, rollout_corr_config)
        _check_correction(chosen, batch, rollout_corr_config)
        fields = batch.batch
        old, rollout, mask = fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"].bool()
        if chosen == CARRY:
            fields["rollout_is_weights"] = rollout
            return batch, _named(mismatch(old, rollout, mask).finalize())
        objective = _correction(chosen.removeprefix(PREFIX), named)
        turn = turns_of(mask)
        result = correct(old, rollout, mask, weight=objective.weight, masks=objective.masks, turn=turn)
        # Rejected tokens have the weight 0; the mask stays, and with it verl's denominators.
        fields["rollout_is_weights"] = result.weight.to(old) * result.keep
        return batch, _named(result.metrics.finalize())

    return add_to_batch


def _check_correction(chosen: str, batch: Any, config: Any) -> None:
    """Raises `TrimtabError` for settings that would have no effect, and where the sampler's log-probs are absent."""
    for key in ("rollout_rs", "rollout_is_batch_normalize"):
        if config.get(key, None):
            raise TrimtabError(
                f"algorithm.rollout_correction.{key} has no effect beside rollout_is={chosen}: leave it out, the "
                "objective has masks and `normalize` of its own"
            )
    if "rollout_log_probs" not in batch.batch:
        raise TrimtabError(_without_sampler(chosen))


def checked(plain: Callable[..., None]) -> Callable[..., None]:
    """Wraps verl's check of its configuration: it refuses settings under which the driver would not call `corrected`.

    The trainers V1 and v0 check their configuration at the start, in the process of the driver.
    """

    @functools.wraps(plain)
    def check(config: Any, *arguments: Any, **keywords: Any) -> None:
        correction = config.algorithm.get("rollout_correction", None) or {}
        chosen = str(correction.get("rollout_is", None))
        if chosen == CARRY or chosen.startswith(PREFIX):
            if correction.get("bypass_mode", False):
                raise TrimtabError(f"rollout_is={chosen} has no effect with bypass_mode: turn bypass_mode off")
            if not config.actor_rollout_ref.rollout.get("calculate_log_probs", False):
                raise TrimtabError(_without_sampler(chosen))
        plain(config, *arguments, **keywords)

    return check


def _without_sampler(chosen: str) -> str:
    return f"rollout_is={chosen} reads the sampler's log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"


def without_carried(plain: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Wraps verl's proxy of the gradient's variance: it gets no `rollout_is_weights` where these are log-probs.

    It would square them as weights.
    """

    @functools.wraps(plain)
    def measure(batch: Any, *arguments: Any, **keywords: Any) -> dict[str, float]:
        fields = batch.batch
        if "rollout_is_weights" in fields and _holds_log_probs(fields["rollout_is_weights"], fields["response_mask"]):
            batch = batch.select(batch_keys=[key for key in fields.keys() if key != "rollout_is_weights"])  # noqa: SIM118 - a TensorDict iterates over rows
        return plain(batch, *arguments, **keywords)

    return measure


def _holds_log_probs(weights: Tensor, mask: Tensor) -> bool:
    return bool((weights[mask.bool()] < 0).any())


def refusing_log_probs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of verl's that multiplies by `rollout_is_weights`: it refuses log-probs in their place."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        weights = given.get("rollout_is_weights")
        if weights is not None and _holds_log_probs(weights, given["response_mask"]):
            raise TrimtabError(
                f"rollout_is={CARRY} carries log-probs for the losses {PREFIX}NAME, and verl's {function.__name__} "
                f"would multiply by them: set policy_loss.loss_mode={PREFIX}NAME, or rollout_is={PREFIX}NAME"
            )
        return function(*arguments, **keywords)

    return call


def without_bypass(plain: Callable[..., None]) -> Callable[..., None]:
    """Wraps v0's `apply_bypass_mode`, which replaces the loss: it refuses to replace one of ours."""

    def apply(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
        mode = str(policy_loss_config.get("loss_mode", ""))
        if mode.startswith(PREFIX):
            raise TrimtabError(f"bypass_mode would replace the loss {mode}: turn it off, and set rollout_is={CARRY}")
        plain(batch, rollout_corr_config=rollout_corr_config, policy_loss_config=policy_loss_config)

    return apply


def _correction(name: str, named: Mapping[str, PolicyLoss]) -> Objective:
    if name not in named:
        raise TrimtabError(f"rollout_is={PREFIX}{name}: no such objective{did_you_mean(name, named)}")
    objective = build("verl", named[name].name, named[name].keywords)
    remedy = f"use loss_mode={PREFIX}{name} with rollout_is={CARRY}"
    require_correction(objective, f"rollout_is={PREFIX}{name}: ", remedy)
    return objective


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"rollout_corr/{key}": value for key, value in reported(metrics).items()}
