"""The tokens an objective clips in the first update on a batch, from a trajectory file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.diagnosis.token_statistics import at_level, clipped
from trimtab.report.token_file import Tokens

if TYPE_CHECKING:
    from trimtab.objectives import Objective, SecondMoment


@dataclass(frozen=True, eq=False)
class Clipping:
    """Tokens (tokens,) below and above the bounds of the ratio, and the rule in words."""

    low: np.ndarray
    high: np.ndarray
    rule: str


def clipping(config: Mapping[str, Any], tokens: Tokens) -> Clipping | str:
    """The clipped tokens of one file, or in one sentence why there are none to show.

    The ratio is over the behavior policy and at the objective's own level; its numerator is the perturbed policy where
    the file has it (ALP), otherwise the clean one. Untrained tokens are never clipped.
    """
    built = _build(config)
    if isinstance(built, str):
        return built
    numerator = tokens.perturbed if tokens.perturbed is not None else tokens.clean
    if numerator is None:
        return "the files hold no log-prob of the trainer"
    if tokens.advantage is None:
        return "the files hold no advantages"
    own = np.where(tokens.trained, numerator.astype(np.float64) - tokens.behavior, 0.0)
    log_ratio = at_level(own, tokens.trained, tokens.starts, built.ratio.level)
    low, high, rule = _sides(built, log_ratio, tokens)
    over = f"r = {'perturbed ' if tokens.perturbed is not None else ''}π/μ"
    level = "" if built.ratio.level == "token" else f" of the {built.ratio.level} ratio"
    return Clipping(low & tokens.trained, high & tokens.trained, f"{over}{level}; {rule}")


def _build(config: Mapping[str, Any]) -> Objective | str:
    """The run's objective, if its ratio is over the behavior policy and has bounds."""
    from trimtab.objectives import Clipped, SecondMoment
    from trimtab.objectives.calibrate import from_section
    from trimtab.objectives.lookup import is_own

    section = config.get("objective", {})
    try:
        if "code" in section or is_own(section["name"]):
            return f"{section['name']} is no preset, and a report runs no code that a run names"
        built = from_section(section)
    except (KeyError, ValueError) as error:
        return f"this version of trimtab does not know the objective ({error})"
    if built.ratio.over == "proximal":
        return f"{built.name} clips π/π_old, which is 1 at the first look at a batch, so no token is clipped there"
    if not isinstance(built.surrogate, Clipped | SecondMoment):
        return f"{built.name} clips nothing"
    return built


def _sides(built: Objective, log_ratio: np.ndarray, tokens: Tokens) -> tuple[np.ndarray, np.ndarray, str]:
    from trimtab.objectives import Clipped, SecondMoment

    surrogate, advantage = built.surrogate, tokens.advantage
    assert advantage is not None
    if isinstance(surrogate, Clipped):
        low, high = 1.0 - surrogate.low, 1.0 + surrogate.high
        rule = f"clipped: A < 0 and r < {low:.4g}, or A > 0 and r > {high:.4g}"
        return *clipped(log_ratio, advantage, low, high), rule
    assert isinstance(surrogate, SecondMoment)
    bound = _second_moment(built, surrogate, log_ratio, tokens)
    if surrogate.form == "mask":
        outside = np.abs(log_ratio) > bound
        rule = f"left out: |log r| > {bound:.3g}, the limit of the whole batch"
        return outside & (log_ratio < 0), outside & (log_ratio >= 0), rule
    rule = f"clipped: A < 0 and log r < −{bound:.3g}, or A > 0 and log r > {bound:.3g}, the cap of the whole batch"
    if math.isinf(bound):
        rule = "the second moment of the whole batch is within tau, so nothing is clipped"
    low, high = (advantage < 0) & (log_ratio < -bound), (advantage > 0) & (log_ratio > bound)
    return low, high, rule


def _second_moment(built: Objective, surrogate: SecondMoment, log_ratio: np.ndarray, tokens: Tokens) -> float:
    """M2PO's bound on |log r|, found from all tokens of the file as one update."""
    import torch

    from trimtab.objectives import PolicyLogps

    ratio = torch.from_numpy(log_ratio)[None]
    logps = PolicyLogps(
        current=ratio, behavior=torch.zeros_like(ratio), mask=torch.from_numpy(np.asarray(tokens.trained))[None]
    )
    state = built.prepare(logps, torch.from_numpy(np.asarray(tokens.advantage))[None])
    found = state.second_moment_limit if surrogate.form == "mask" else state.second_moment_cap
    return float(found(surrogate.tau))
