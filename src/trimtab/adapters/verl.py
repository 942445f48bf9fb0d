"""Trimtab's objectives and corrections in verl. Checked against verl 0.9.1, trainers V1 and v0.

verl imports this module through the entry point `verl.plugins` in every process, and importing it registers:

    actor_rollout_ref.actor.policy_loss.loss_mode=trimtab-token-tis   # an objective as the loss
    algorithm.rollout_correction.rollout_is=trimtab-token-tis         # or: a correction beside verl's own loss

TRIMTAB_OBJECTIVES names a TOML file with your objectives: `[mine]` with `name = "icepop"` is `trimtab-mine`.
TRIMTAB_DUMP names a folder for the log-probs of both sides, which `trimtab diagnose` reads.
TRIMTAB_MONITOR names a folder for `trimtab.Monitor`, whose scalars join the metrics.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.adapters import verl_driver, verl_dump, verl_monitor
from trimtab.adapters.verl_loss import LOSS_PREFIX, OBJECTIVES_VARIABLE, PolicyLoss
from trimtab.errors import TrimtabError
from trimtab.objectives import objectives

PPO = "verl.trainer.ppo"


def own_objectives() -> dict[str, PolicyLoss]:
    """Returns the objectives of the file that TRIMTAB_OBJECTIVES names, by the names of its tables."""
    path = os.environ.get(OBJECTIVES_VARIABLE)
    if not path:
        return {}
    try:
        import tomllib
    except ImportError:
        raise TrimtabError(f"{OBJECTIVES_VARIABLE} is read with Python 3.11 or newer") from None
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TrimtabError(f"{OBJECTIVES_VARIABLE}={path} cannot be read: {error}") from error
    for key, table in tables.items():
        if not isinstance(table, dict) or "name" not in table:
            raise TrimtabError(f'{path}: [{key}] needs the name of an objective: name = "icepop"')
    return {key: PolicyLoss(table.pop("name"), table) for key, table in tables.items()}


def register() -> list[str]:
    """Registers every preset and every objective of the file with verl; returns their names. Called on import."""
    core = importlib.import_module(f"{PPO}.core_algos")
    named = {name: PolicyLoss(name, {}) for name in objectives()} | own_objectives()
    for name, loss in named.items():
        core.register_policy_loss(LOSS_PREFIX + name)(loss)
    missing = [name for name in named if core.get_policy_loss_fn(LOSS_PREFIX + name) is not named[name]]
    if missing:
        raise TrimtabError(f"verl did not register {', '.join(missing)}: use verl 0.9.1")
    for registry in (core.POLICY_LOSS_REGISTRY, core.ADV_ESTIMATOR_REGISTRY):
        for name, function in registry.items():
            own = isinstance(function, PolicyLoss)
            if not own and "rollout_is_weights" in inspect.signature(function).parameters:
                registry[name] = verl_driver.refuse_logps_as_weights(function)
    helper = f"{PPO}.rollout_corr_helper"
    _replace(helper, "compute_rollout_correction_and_add_to_batch", partial(verl_driver.wrap_correction, named))
    if folder := os.environ.get(verl_monitor.MONITOR):
        watch = verl_monitor.Watch(folder)
        _replace(helper, "compute_rollout_correction_and_add_to_batch", watch.wrap_correction)
        watch.follow()  # Imports the trainers, which find the wrapped function.
    _replace(helper, "apply_bypass_mode", verl_driver.wrap_bypass_mode)
    _replace(f"{PPO}.metric_utils", "compute_variance_proxy_metrics", verl_driver.wrap_variance_proxy)
    _replace("verl.utils.config", "validate_config", partial(verl_driver.wrap_validate_config, named))
    if folder := os.environ.get(verl_dump.DUMP):
        verl_dump.install(folder)
    return [LOSS_PREFIX + name for name in named]


def _replace(module: str, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of verl, also in modules that imported it by name; most do so later than this."""
    original = getattr(importlib.import_module(module), name)
    wrapped = wrap(original)
    for key, loaded in list(sys.modules.items()):
        if key.partition(".")[0] == "verl" and vars(loaded).get(name) is original:
            setattr(loaded, name, wrapped)


try:
    register()
except Exception as error:
    # verl would only note it at DEBUG level, and answer later that it does not know the loss.
    print(f"trimtab could not register its objectives with verl: {error}", file=sys.stderr, flush=True)
    raise
