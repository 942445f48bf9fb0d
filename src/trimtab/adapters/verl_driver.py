"""Wrappers of verl's functions; `trimtab.adapters.verl` installs them."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import refuse_chosen, refuse_standard_deviation
from trimtab.adapters.micro_batch import prefixed_metrics
from trimtab.adapters.recording import STOP_ON, stop_on
from trimtab.adapters.verl_loss import CARRY_LOGPS, KEYWORDS, LOSS_PREFIX, SET, PolicyLoss, given_keywords
from trimtab.adapters.verl_records import DUMP, MONITOR, SETTINGS
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.monitor.monitor import checked_signs
from trimtab.objectives import Objective, mismatch
from trimtab.objectives.presets import is_custom

MISSING_LOGPS = (
    f"rollout_is={CARRY_LOGPS} reads the sampler's log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"
)


def wrap_correction(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps verl's `compute_rollout_correction_and_add_to_batch` so that it knows one more value of `rollout_is`.

    `rollout_is=trimtab` puts the sampler's log-probs into the batch, for the loss in the workers. Other values go to
    verl's own function.
    """

    def add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, Any]]:
        if rollout_corr_config.get("rollout_is", None) != CARRY_LOGPS:
            return original(batch, rollout_corr_config)
        refuse_chosen("verl", "VERL_CORRECTION", rollout_corr_config, f"As {SET}.KEYWORD")
        fields = batch.batch
        if "rollout_log_probs" not in fields:
            raise TrimtabError(MISSING_LOGPS)
        fields["rollout_is_weights"] = fields["rollout_log_probs"]
        figures = mismatch(fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"].bool())
        named = prefixed_metrics(figures.finalize()).items()
        return batch, {f"rollout_corr/{key}": value for key, value in named}

    return add_to_batch


def _is_meant(value: str, named: Collection[str]) -> bool:
    """Returns whether a value that Trimtab does not define was probably meant as one of Trimtab's."""
    return value in named or value.lower().startswith(CARRY_LOGPS)


def wrap_validate_config(
    named: Mapping[str, PolicyLoss], verl_losses: Collection[str], original: Callable[..., None]
) -> Callable[..., None]:
    """Wraps verl's config validation: fills in the settings that a loss of Trimtab needs, and raises for wrong ones.

    The trainers V1 and v0 check their configuration at the start, in the process of the driver, before they use it.
    verl_losses: names of verl's own losses, some of which are also names of presets.
    """

    @functools.wraps(original)
    def check(config: Any, *arguments: Any, **keywords: Any) -> None:
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.get("actor", None) or {}
        correction = config.algorithm.get("rollout_correction", None) or {}
        policy_loss = actor.get("policy_loss", None) or {}
        mode = str(policy_loss.get("loss_mode", ""))
        if mode.startswith(LOSS_PREFIX):
            objective = _checked_objective(mode, named, config, correction)
            if "behavior" in objective.needs:
                _carry_logps(objective.name, rollout, correction)
        elif mode not in verl_losses and _is_meant(mode, named):
            raise TrimtabError(f"verl has no loss {mode}: Trimtab's are loss_mode={LOSS_PREFIX}NAME")
        elif given_keywords(policy_loss):
            raise TrimtabError(f"policy_loss.{KEYWORDS} has no effect with loss_mode={mode}: use {LOSS_PREFIX}NAME")
        rollout_is = str(correction.get("rollout_is", None))
        if rollout_is == CARRY_LOGPS:
            if mode in verl_losses:
                raise TrimtabError(_log_probs_as_weights(mode))
            if correction.get("bypass_mode", False):
                raise TrimtabError(f"rollout_is={rollout_is} has no effect with bypass_mode: turn bypass_mode off")
            if not rollout.get("calculate_log_probs", False):
                raise TrimtabError(MISSING_LOGPS)
            refuse_chosen("verl", "VERL_CORRECTION", correction, f"As {SET}.KEYWORD")
        elif _is_meant(rollout_is, named):
            raise TrimtabError(f"verl has no rollout_is={rollout_is}: a loss corrects, set loss_mode={LOSS_PREFIX}NAME")
        _check_readers(config, rollout, correction)
        original(config, *arguments, **keywords)

    return check


def _check_readers(config: Any, rollout: Any, correction: Any) -> None:
    """Raises `TrimtabError` if the dump, the monitor or TRIMTAB_STOP_ON would not receive what it reads."""
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
    if checked_signs(stop_on()) and not os.environ.get(MONITOR):
        raise TrimtabError(f"{STOP_ON} needs {MONITOR}=FOLDER, whose monitor sees the signs")


def _checked_objective(mode: str, named: Mapping[str, PolicyLoss], config: Any, correction: Any) -> Objective:
    """Returns the objective of a loss. Raises `TrimtabError` if verl's settings would change what it computes."""
    actor = config.actor_rollout_ref.actor
    objective = _named_loss(mode, named).validated_objective(actor, actor.get("loss_agg_mode", "token-mean"))
    estimator, by_std = (config.algorithm.get(key, None) for key in ("adv_estimator", "norm_adv_by_std_in_grpo"))
    divides = str(estimator).startswith("grpo") and by_std
    refuse_standard_deviation(objective, divides, "set algorithm.norm_adv_by_std_in_grpo=False")
    if correction.get("bypass_mode", False):
        raise TrimtabError(
            f"bypass_mode puts the sampler's log-probs in the place of those at the start of the update: with {mode} "
            f"turn it off, and choose loss_mode={LOSS_PREFIX}token-bypass or another loss that reads the sampler's"
        )
    if "behavior" in objective.needs and not correction:
        raise TrimtabError(
            f"algorithm.rollout_correction is empty, and carries the sampler's log-probs that {objective.name} reads: "
            "leave it at verl's default"
        )
    carrying = correction.get("rollout_is", None)
    if "behavior" in objective.needs and carrying not in (None, CARRY_LOGPS):
        raise TrimtabError(
            f"rollout_is={carrying} takes the place of the sampler's log-probs, which {objective.name} reads: leave it "
            f"out, or set algorithm.rollout_correction.rollout_is={CARRY_LOGPS}"
        )
    return objective


def _carry_logps(name: str, rollout: Any, correction: Any) -> None:
    """Sets verl to pass the sampler's log-probs to a loss that reads them, and prints the changed settings.

    Such a run is not possible with other values of these settings.
    """
    changed = []
    if not rollout.get("calculate_log_probs", False):
        rollout.calculate_log_probs = True
        changed.append("actor_rollout_ref.rollout.calculate_log_probs=True")
    if correction.get("rollout_is", None) is None:
        correction.rollout_is = CARRY_LOGPS
        changed.append(f"algorithm.rollout_correction.rollout_is={CARRY_LOGPS}")
    if changed:
        print(f"trimtab: set {' and '.join(changed)}, as {name} reads the sampler's log-probs")


def wrap_policy_loss_fn(named: Mapping[str, PolicyLoss], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps verl's function that looks up a loss by its name: it then also finds `trimtab-MODULE:FUNCTION`."""

    @functools.wraps(original)
    def get(name: str) -> Any:
        return _named_loss(name, named) if name.startswith(LOSS_PREFIX) else original(name)

    return get


_custom_loss = functools.cache(PolicyLoss)


def _named_loss(setting: str, named: Mapping[str, PolicyLoss]) -> PolicyLoss:
    """Returns the loss that a value `trimtab-NAME` names."""
    name = setting.removeprefix(LOSS_PREFIX)
    if is_custom(name):
        return _custom_loss(name)
    if name not in named:
        raise TrimtabError(f"{setting}: no such objective{did_you_mean(name, named)}")
    return named[name]


def wrap_variance_proxy(original: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Wraps verl's gradient variance proxy, which squares `rollout_is_weights`: hides them if they are log-probs."""

    @functools.wraps(original)
    def measure(batch: Any, *arguments: Any, **keywords: Any) -> dict[str, float]:
        fields = batch.batch
        if "rollout_is_weights" in fields and _holds_log_probs(fields["rollout_is_weights"], fields["response_mask"]):
            batch = batch.select(batch_keys=[key for key in fields.keys() if key != "rollout_is_weights"])  # noqa: SIM118 - a TensorDict iterates over rows
        return original(batch, *arguments, **keywords)

    return measure


def _holds_log_probs(weights: Tensor, mask: Tensor) -> bool:
    return bool((weights[mask.bool()] < 0).any())


def _log_probs_as_weights(loss: str) -> str:
    return (
        f"rollout_is={CARRY_LOGPS} carries log-probs for the losses {LOSS_PREFIX}NAME, and verl's {loss} would "
        f"multiply by them: set policy_loss.loss_mode={LOSS_PREFIX}NAME"
    )


def refuse_logps_as_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of verl that multiplies by `rollout_is_weights`: raises if they are log-probs."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        weights = given.get("rollout_is_weights")
        if weights is not None and _holds_log_probs(weights, given["response_mask"]):
            raise TrimtabError(_log_probs_as_weights(function.__name__))
        return function(*arguments, **keywords)

    return call


def wrap_bypass_mode(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps v0's `apply_bypass_mode`, which replaces the loss: raises if it would replace a loss of Trimtab."""

    def apply(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
        mode = str((policy_loss_config or {}).get("loss_mode", ""))
        if mode.startswith(LOSS_PREFIX):
            raise TrimtabError(
                f"bypass_mode would replace the loss {mode}: turn it off, and set rollout_is={CARRY_LOGPS}"
            )
        original(batch, rollout_corr_config=rollout_corr_config, policy_loss_config=policy_loss_config)

    return apply
