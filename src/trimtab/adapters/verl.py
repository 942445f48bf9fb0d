"""Trimtab's objectives and corrections in verl. Checked against verl 0.9.1, trainers V1 and v0.

verl imports this module through the entry point `verl.plugins` in every process, and importing it registers:

    actor_rollout_ref.actor.policy_loss.loss_mode=trimtab-icepop    # an objective as the loss
    algorithm.rollout_correction.rollout_is=trimtab                 # carries the sampler's log-probs to it
    algorithm.rollout_correction.rollout_is=trimtab-token-tis       # a correction beside verl's own loss

TRIMTAB_OBJECTIVES names a TOML file with objectives of one's own: `[mine]` with `name = "icepop"` is `trimtab-mine`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import averaged, build, counted_state, per_response, reported, turns_of
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective, PolicyLogps, correct, keywords_of, mismatch, objectives

PREFIX, CARRY, FILE = "trimtab-", "trimtab", "TRIMTAB_OBJECTIVES"
CORE, HELPER = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"
DRIVER, BYPASS = "compute_rollout_correction_and_add_to_batch", "apply_bypass_mode"
V1 = "verl.trainer.ppo.v1.trainer_base"
MODES = {"constant": "seq-mean-token-sum-norm"}
"""verl's `loss_agg_mode` where its name is not that of the aggregation."""


class PolicyLoss:
    """An objective with the signature of verl's policy losses, built at its first call: some need numbers of verl."""

    def __init__(self, name: str, keywords: Mapping[str, Any]) -> None:
        self.name, self.keywords = name, dict(keywords)
        self._objective: Objective | None = None

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
        """Returns the share of a micro-batch in the loss of the mini-batch, and metrics. All tensors are (batch, time).

        Denominators are verl's own, of the whole mini-batch; without them, those of the given batch. Raises
        `TrimtabError` where `loss_agg_mode` is not the aggregation of the objective, and without log-probs it reads.
        """
        counts = dict(getattr(config, "global_batch_info", None) or {})
        mask = response_mask.bool()
        objective = self._built(counts.get("loss_scale_factor"))
        _check_aggregation(objective, loss_agg_mode)
        logps = PolicyLogps(
            current=log_prob,
            behavior=_carried(objective, rollout_is_weights, mask),
            mask=mask,
            proximal=old_log_prob,
            turn=turns_of(mask) if "turn" in objective.needs else None,
        )
        tokens, sequences = counts.get("batch_num_tokens"), counts.get("global_batch_size")
        state = counted_state(
            mask.sum() if tokens is None else tokens,
            mask.any(1).sum() if sequences is None else sequences,  # As verl counts them.
            like=log_prob,
        )
        output = objective(logps, per_response(objective, advantages, mask), state=state)
        metrics = {f"actor/{name}": value for name, value in averaged(output.metrics.finalize()).items()}
        return output.loss * (counts.get("dp_size") or 1), metrics

    def _built(self, factor: int | None) -> Objective:
        if self._objective is None:
            kind = self.keywords.get("aggregation", keywords_of(self.name).get("aggregation"))
            given = {} if kind != "constant" else {"length_max": self._length_max(factor)}
            self._objective = build("verl", self.name, self.keywords | given)
        return self._objective

    def _length_max(self, factor: int | None) -> int:
        """Returns the constant length, which is verl's: its KL and entropy terms divide by it too."""
        if factor is None:
            raise TrimtabError(f"{self.name} divides by a constant length: set actor.loss_scale_factor to it")
        if self.keywords.get("length_max", factor) != factor:
            raise TrimtabError(f"{self.name}: length_max is not actor.loss_scale_factor = {factor}: leave it out")
        return int(factor)


def _carried(objective: Objective, carried: Tensor | None, mask: Tensor) -> Tensor | None:
    """Returns the sampler's log-probs, which verl passes on in `rollout_is_weights`."""
    if "behavior" not in objective.needs:
        return None
    if carried is None:
        raise TrimtabError(
            f"{objective.name} reads the sampler's log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True "
            f"and algorithm.rollout_correction.rollout_is={CARRY}, without bypass_mode"
        )
    if bool((carried[mask] > 0).any()):
        raise TrimtabError(
            f"rollout_is_weights holds weights, not the sampler's log-probs that {objective.name} reads: set "
            f"algorithm.rollout_correction.rollout_is={CARRY}"
        )
    return carried


def _check_aggregation(objective: Objective, mode: str) -> None:
    wanted = MODES.get(objective.aggregation.kind, objective.aggregation.kind)
    if mode != wanted:
        raise TrimtabError(
            f"{objective.name} aggregates by {wanted}, and verl by {mode}: set actor.loss_agg_mode={wanted}, or give "
            f"the objective another aggregation in the file of {FILE}"
        )


def corrected(plain: Callable[..., Any], named: Mapping[str, PolicyLoss]) -> Callable[[Any, Any], tuple[Any, dict]]:
    """Returns verl's function of the driver with two values more of `rollout_is`; for all others it is `plain`."""

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
        raise TrimtabError(
            f"rollout_is={chosen} reads the sampler's log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True"
        )


def refusing_log_probs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of verl's that multiplies by `rollout_is_weights`, refusing log-probs in their place."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        weights = given.get("rollout_is_weights")
        if weights is not None and bool((weights[given["response_mask"].bool()] < 0).any()):
            raise TrimtabError(
                f"rollout_is={CARRY} carries log-probs for the losses {PREFIX}NAME, and verl's {function.__name__} "
                f"would multiply by them: set policy_loss.loss_mode={PREFIX}NAME, or rollout_is={PREFIX}NAME"
            )
        return function(*arguments, **keywords)

    return call


def without_bypass(plain: Callable[..., None]) -> Callable[..., None]:
    """Returns v0's `apply_bypass_mode`, which replaces the loss, refusing to replace one of ours."""

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
    if objective.weight is None and not objective.masks:
        raise TrimtabError(f"rollout_is={PREFIX}{name}: {name} has no weight and no mask")
    unread = frozenset().union(*(rule.reads for rule in objective.masks)) & {"current", "advantage"}
    if unread:
        raise TrimtabError(
            f"rollout_is={PREFIX}{name}: {name} reads {' and '.join(sorted(unread))}, which verl's driver does not "
            f"have there: use loss_mode={PREFIX}{name} with rollout_is={CARRY}"
        )
    return objective


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"rollout_corr/{key}": value for key, value in reported(metrics).items()}


def own_objectives() -> dict[str, PolicyLoss]:
    """Returns the objectives of the file that TRIMTAB_OBJECTIVES names, by the names of its tables."""
    path = os.environ.get(FILE)
    if not path:
        return {}
    try:
        import tomllib
    except ImportError:
        raise TrimtabError(f"{FILE} is read with Python 3.11 or newer") from None
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{FILE}={path} cannot be read: {error}") from error
    for key, table in tables.items():
        if not isinstance(table, dict) or "name" not in table:
            raise TrimtabError(f'{path}: [{key}] needs the name of an objective: name = "icepop"')
    return {key: PolicyLoss(table.pop("name"), table) for key, table in tables.items()}


def register() -> list[str]:
    """Registers every preset and every objective of the file with verl; returns their names. Called on import."""
    core, helper = importlib.import_module(CORE), importlib.import_module(HELPER)
    named = {name: PolicyLoss(name, {}) for name in objectives()} | own_objectives()
    for name, loss in named.items():
        core.register_policy_loss(PREFIX + name)(loss)
    missing = [name for name in named if core.get_policy_loss_fn(PREFIX + name) is not named[name]]
    if missing:
        raise TrimtabError(f"verl did not register {', '.join(missing)}: use verl 0.9.1")
    for registry in (core.POLICY_LOSS_REGISTRY, core.ADV_ESTIMATOR_REGISTRY):
        for name, function in registry.items():
            own = isinstance(function, PolicyLoss)
            if not own and "rollout_is_weights" in inspect.signature(function).parameters:
                registry[name] = refusing_log_probs(function)
    setattr(helper, BYPASS, without_bypass(getattr(helper, BYPASS)))
    plain = getattr(helper, DRIVER)
    for module in (helper, sys.modules.get(V1)):  # V1 imports the function by name, usually later than this.
        if module is not None:
            setattr(module, DRIVER, corrected(plain, named))
    return [PREFIX + name for name in named]


try:
    register()
except Exception as error:
    # verl would only note it at DEBUG level, and answer later that it does not know the loss.
    print(f"trimtab could not register its objectives with verl: {error}", file=sys.stderr, flush=True)
    raise
