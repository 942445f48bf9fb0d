"""Trimtab's objectives and corrections in verl. Checked against verl 0.9.1, trainers V1 and v0.

verl imports this module in every process, through the entry point `verl.plugins`. The import registers:

    actor_rollout_ref.actor.policy_loss.loss_mode=trimtab-token-tis   # an objective as the loss
    +actor_rollout_ref.actor.policy_loss.trimtab.weight_max=3.0       # a keyword of the objective

verl before 0.9 has no such entry point: set VERL_USE_EXTERNAL_MODULES=trimtab.adapters.verl in every process.
TRIMTAB_DUMP names a folder for the log-probs of sampler and trainer, which `trimtab diagnose` reads.
TRIMTAB_MONITOR names a folder for `trimtab.Monitor`, whose scalars join verl's metrics. With
TRIMTAB_STOP_ON=ess,mismatch, the monitor stops the run at a sign of a collapse (`stop_on`). Its message is then the
last line of verl's error; with HYDRA_FULL_ERROR=1 it is the only line, and the exit status is 3.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from trimtab.adapters import verl_driver, verl_records
from trimtab.adapters.recording import stop_on
from trimtab.adapters.verl_loss import KEYWORDS, LOSS_PREFIX, PolicyLoss
from trimtab.errors import TrimtabError
from trimtab.monitor.monitor import exit_when_stopped
from trimtab.objectives import objectives
from trimtab.objectives.presets import COMPOSED

PPO = "verl.trainer.ppo"


def register() -> list[str]:
    """Registers every preset, and `composed`, with verl, and returns their names there. Called on import."""
    core = importlib.import_module(f"{PPO}.core_algos")
    own = sorted(core.POLICY_LOSS_REGISTRY)
    named = {name: PolicyLoss(name) for name in (*objectives(), COMPOSED.objective.name)}
    for name, loss in named.items():
        core.register_policy_loss(LOSS_PREFIX + name)(loss)
    missing = [name for name in named if core.get_policy_loss_fn(LOSS_PREFIX + name) is not named[name]]
    if missing:
        raise TrimtabError(f"verl did not register {', '.join(missing)}")
    for registry in (core.POLICY_LOSS_REGISTRY, core.ADV_ESTIMATOR_REGISTRY):
        for name, function in registry.items():
            ours = isinstance(function, PolicyLoss)
            if not ours and "rollout_is_weights" in inspect.signature(function).parameters:
                registry[name] = verl_driver.refuse_logps_as_weights(function)
    helper = f"{PPO}.rollout_corr_helper"
    _replace(helper, "compute_rollout_correction_and_add_to_batch", verl_driver.wrap_correction)
    if folder := os.environ.get(verl_records.MONITOR):
        watch = verl_records.Watch(folder)
        _replace(helper, "compute_rollout_correction_and_add_to_batch", watch.wrap_correction)
        watch.follow()  # Imports the trainers, which then find the wrapped function.
        if stop_on():
            exit_when_stopped()  # Also in the process of the script, which receives the driver's error.
    _replace(helper, "apply_bypass_mode", verl_driver.wrap_bypass_mode)
    _replace(f"{PPO}.metric_utils", "compute_variance_proxy_metrics", verl_driver.wrap_variance_proxy)
    _replace(f"{PPO}.core_algos", "get_policy_loss_fn", partial(verl_driver.wrap_policy_loss_fn, named))
    _replace("verl.utils.config", "validate_config", partial(verl_driver.wrap_validate_config, named, own))
    _replace("verl.workers.config", "PolicyLossConfig", with_keywords)
    if folder := os.environ.get(verl_records.DUMP):
        verl_records.install_dump(folder)
    return [LOSS_PREFIX + name for name in named]


def with_keywords(policy_loss_config: type) -> type:
    """Returns verl's `PolicyLossConfig`, whose fields are fixed, with one more: `trimtab`, the objective's keywords."""
    return dataclasses.make_dataclass(
        policy_loss_config.__name__,
        [(KEYWORDS, dict, dataclasses.field(default_factory=dict))],
        bases=(policy_loss_config,),
        namespace={"__module__": policy_loss_config.__module__},  # where other processes look it up
    )


def _replace(module: str, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces a function or class of verl, also in modules that have already imported it by name."""
    original = getattr(importlib.import_module(module), name)
    wrapped = wrap(original)
    for key, loaded in list(sys.modules.items()):
        if key.partition(".")[0] == "verl" and vars(loaded).get(name) is original:
            setattr(loaded, name, wrapped)


try:
    register()
except Exception as error:
    # verl would log this at DEBUG level only, and report later that it does not know the loss.
    print(f"trimtab could not register its objectives with verl: {error}: use verl 0.9.1", file=sys.stderr, flush=True)
    raise
