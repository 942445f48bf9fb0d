"""Checks of recipes with asynchronous rollouts, before a model is loaded."""

from __future__ import annotations

from trimtab.config import Config
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective


def is_async(config: Config) -> bool:
    """Whether each engine has a thread of its own; otherwise one engine generates in the trainer's thread."""
    if config.prefix is not None or config.expert is not None:
        return False
    remote = config.engine.workers or config.engine.type == "server" or config.placement == "ray"
    return bool(config.trainer.max_lag or remote)


def check(config: Config, built: Objective) -> None:
    """Raise `TrimtabError` for settings that contradict each other or would be ignored."""
    trainer, name = config.trainer, built.name
    if not trainer.max_lag and trainer.in_flight != "finish":
        raise TrimtabError(
            f'trainer.in_flight = "{trainer.in_flight}" has no effect while generation and training take turns: leave '
            "it out, or set trainer.max_lag above 0"
        )
    if is_async(config) and trainer.oversample > 1:
        raise TrimtabError(
            "trainer.oversample has no effect where engines run beside the trainer, which replace groups without "
            "signal one by one: leave it out"
        )
    if not trainer.max_lag:
        return
    for section in ("prefix", "expert"):
        if getattr(config, section) is not None:
            raise TrimtabError(f"[{section}] makes its batches in step with training: leave trainer.max_lag out")
    updates = trainer.minibatches * trainer.epochs
    if trainer.max_lag < updates:
        raise TrimtabError(
            f"trainer.max_lag = {trainer.max_lag} is less than the {updates} updates of a step: nothing could ever be "
            f"generated beside training; set it to {updates} or more, or to 0"
        )
    if "behavior" not in built.policy_needs:
        raise TrimtabError(
            f"trainer.max_lag = {trainer.max_lag} gives objective {name!r} tokens of older policies, but it never "
            "reads their log-probs and would anchor to the trainer's own: choose one that corrects (token-tis, icepop, "
            "token-bypass, m2po, ...), or set max_lag = 0"
        )
    if trainer.in_flight == "continue" and built.single_behavior:
        raise TrimtabError(
            f'objective {name!r} needs one behavior policy per response, trainer.in_flight = "continue" makes several: '
            'use "finish" or "discard"'
        )
