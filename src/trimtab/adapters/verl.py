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
from trimtab.adapters.hooks import wrap
from trimtab.adapters.recording import stop_on
from trimtab.adapters.verl_loss import KEYWORDS, LOSS_PREFIX, PolicyLoss
from trimtab.errors import TrimtabError
from trimtab.monitor.monitor import exit_when_stopped

PPO = "verl.trainer.ppo"


def register() -> list[str]:
    """Registers every preset, and `composed`, with verl, and returns their names there. Called on import."""
    core = importlib.import_module(f"{PPO}.core_algos")
    own = sorted(core.POLICY_LOSS_REGISTRY)
    losses = {LOSS_PREFIX + name: verl_driver.find_own_loss(LOSS_PREFIX + name) for name in verl_driver.NAMES}
    for name, loss in losses.items():
        core.register_policy_loss(name)(loss)
    if missing := [name for name, loss in losses.items() if core.get_policy_loss_fn(name) is not loss]:
        raise TrimtabError(f"verl did not register {', '.join(missing)}")
    for registry in (core.POLICY_LOSS_REGISTRY, core.ADV_ESTIMATOR_REGISTRY):
        for name, function in registry.items():
            ours = isinstance(function, PolicyLoss)
            if not ours and "rollout_is_weights" in inspect.signature(function).parameters:
                registry[name] = wrap(function, verl_driver.refuse_logps_as_weights)
    helper = f"{PPO}.rollout_corr_helper"
    _wrap(helper, "compute_rollout_correction_and_add_to_batch", verl_driver.carry_logps)
    if folder := os.environ.get(verl_records.MONITOR):
        watch = verl_records.Watch(folder)
        _wrap(helper, "compute_rollout_correction_and_add_to_batch", watch.observe)
        watch.follow()  # Imports the trainers, which then find the wrapped function.
        if stop_on():
            exit_when_stopped()  # Also in the process of the script, which receives the driver's error.
    _wrap(helper, "apply_bypass_mode", verl_driver.refuse_bypass_mode)
    _wrap(f"{PPO}.metric_utils", "compute_variance_proxy_metrics", verl_driver.hide_logps)
    _wrap(f"{PPO}.core_algos", "get_policy_loss_fn", verl_driver.find_loss)
    _wrap("verl.utils.config", "validate_config", partial(verl_driver.validate_config, verl_losses=own))
    _replace("verl.workers.config", "PolicyLossConfig", with_keywords)
    if folder := os.environ.get(verl_records.DUMP):
        verl_records.install_dump(folder)
    return list(losses)


def with_keywords(policy_loss_config: type) -> type:
    """Returns verl's `PolicyLossConfig`, whose fields are fixed, with one more: `trimtab`, the objective's keywords."""
    return dataclasses.make_dataclass(
        policy_loss_config.__name__,
        [(KEYWORDS, dict, dataclasses.field(default_factory=dict))],
        bases=(policy_loss_config,),
        namespace={"__module__": policy_loss_config.__module__},  # where other processes look it up
    )


def _wrap(module: str, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a function of verl by one that calls `replacement` with the original and its arguments."""
    _replace(module, name, lambda original: wrap(original, replacement))


def _replace(module: str, name: str, change: Callable[[Any], Any]) -> None:
    """Replaces a function or class of verl, also in modules that have already imported it by name."""
    original = getattr(importlib.import_module(module), name)
    changed = change(original)
    for key, loaded in list(sys.modules.items()):
        if key.partition(".")[0] == "verl" and vars(loaded).get(name) is original:
            setattr(loaded, name, changed)


try:
    register()
except Exception as error:
    # verl would log this at DEBUG level only, and report later that it does not know the loss.
    print(f"trimtab could not register its objectives with verl: {error}: use verl 0.9.1", file=sys.stderr, flush=True)
    raise
