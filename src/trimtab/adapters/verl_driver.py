"""What verl's functions do in place of, or beside, their own work; `trimtab.adapters.verl` installs it.

The first parameter, `original`, is verl's own function; the others are its parameters.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import refuse_standard_deviation
from trimtab.adapters.loss_settings import refuse_chosen
from trimtab.adapters.micro_batch import prefixed_metrics
from trimtab.adapters.recording import STOP_ON, stop_on
from trimtab.adapters.verl_loss import CARRY_LOGPS, KEYWORDS, LOSS_PREFIX, SET, PolicyLoss, given_keywords
from trimtab.adapters.verl_records import DUMP, MONITOR, SETTINGS
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.monitor.monitor import checked_signs
from trimtab.objectives import Objective, mismatch, objectives
from trimtab.objectives.presets import COMPOSED, is_custom

NAMES = (*objectives(), COMPOSED.objective.name)
"""Objectives that verl gets by name; `loss_mode=trimtab-NAME` chooses one."""
MISSING_LOGPS = (
    f"rollout_is={CARRY_LOGPS} reads the sampler's log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"
)


def carry_logps(original: Callable[..., Any], batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, Any]]:
    """Adds one more value of `rollout_is` to verl's `compute_rollout_correction_and_add_to_batch`.

    `rollout_is=trimtab` puts the sampler's log-probs into the batch, for the loss in the workers. Other values go to
    verl's own function.
    """
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


def _is_meant(value: str) -> bool:
    """Returns whether a value that Trimtab does not define was probably meant as one of Trimtab's."""
    return value in NAMES or value.lower().startswith(CARRY_LOGPS)


def validate_config(
    original: Callable[..., None], config: Any, *arguments: Any, verl_losses: Collection[str], **keywords: Any
) -> None:
    """Fills in the settings that a loss of Trimtab needs, and raises for wrong ones, before verl's own validation.

    The trainers V1 and v0 check their configuration at the start, in the process of the driver, before they use it.
    verl_losses: names of verl's own losses, some of which are also names of presets.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.get("actor", None) or {}
    correction = config.algorithm.get("rollout_correction", None) or {}
    policy_loss = actor.get("policy_loss", None) or {}
    mode = str(policy_loss.get("loss_mode", ""))
    if mode.startswith(LOSS_PREFIX):
        objective = _checked_objective(mode, config, correction)
        if "behavior" in objective.needs:
            _set_carrying(objective.name, rollout, correction)
    elif mode not in verl_losses and _is_meant(mode):
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
    elif _is_meant(rollout_is):
        raise TrimtabError(f"verl has no rollout_is={rollout_is}: a loss corrects, set loss_mode={LOSS_PREFIX}NAME")
    _check_readers(config, rollout, correction)
    original(config, *arguments, **keywords)


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


def _checked_objective(mode: str, config: Any, correction: Any) -> Objective:
    """Returns the objective of a loss. Raises `TrimtabError` if verl's settings would change what it computes."""
    actor = config.actor_rollout_ref.actor
    objective = find_own_loss(mode).validated_objective(actor, actor.get("loss_agg_mode", "token-mean"))
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


def _set_carrying(name: str, rollout: Any, correction: Any) -> None:
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


def find_loss(original: Callable[..., Any], name: str) -> Any:
    """Looks up a loss by its name in verl, where `trimtab-MODULE:FUNCTION` is a loss, too."""
    return find_own_loss(name) if name.startswith(LOSS_PREFIX) else original(name)


@functools.cache
def find_own_loss(setting: str) -> PolicyLoss:
    """Returns the loss that a value `trimtab-NAME` names; the same object at every call."""
    name = setting.removeprefix(LOSS_PREFIX)
    if name not in NAMES and not is_custom(name):
        raise TrimtabError(f"{setting}: no such objective{did_you_mean(name, NAMES)}")
    return PolicyLoss(name)


def hide_logps(original: Callable[..., Any], batch: Any, *arguments: Any, **keywords: Any) -> dict[str, float]:
    """Hides log-probs in `rollout_is_weights` from verl's gradient variance proxy, which squares the weights."""
    fields = batch.batch
    if "rollout_is_weights" in fields and _holds_log_probs(fields["rollout_is_weights"], fields["response_mask"]):
        batch = batch.select(batch_keys=[key for key in fields.keys() if key != "rollout_is_weights"])  # noqa: SIM118 - a TensorDict iterates over rows
    return original(batch, *arguments, **keywords)


def _holds_log_probs(weights: Tensor, mask: Tensor) -> bool:
    return bool((weights[mask.bool()] < 0).any())


def _log_probs_as_weights(loss: str) -> str:
    return (
        f"rollout_is={CARRY_LOGPS} carries log-probs for the losses {LOSS_PREFIX}NAME, and verl's {loss} would "
        f"multiply by them: set policy_loss.loss_mode={LOSS_PREFIX}NAME"
    )


def refuse_logps_as_weights(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Raises if a function of verl would multiply by log-probs in `rollout_is_weights`."""
    given = inspect.signature(original).bind(*arguments, **keywords).arguments
    weights = given.get("rollout_is_weights")
    if weights is not None and _holds_log_probs(weights, given["response_mask"]):
        raise TrimtabError(_log_probs_as_weights(original.__name__))
    return original(*arguments, **keywords)


def refuse_bypass_mode(
    original: Callable[..., None], batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None
) -> None:
    """Raises if v0's `apply_bypass_mode`, which replaces the loss, would replace a loss of Trimtab."""
    mode = str((policy_loss_config or {}).get("loss_mode", ""))
    if mode.startswith(LOSS_PREFIX):
        raise TrimtabError(f"bypass_mode would replace the loss {mode}: turn it off, and set rollout_is={CARRY_LOGPS}")
    original(batch, rollout_corr_config=rollout_corr_config, policy_loss_config=policy_loss_config)
