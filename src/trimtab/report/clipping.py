"""Recomputes from a trajectory file which tokens the objective clips in the first update on a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.diagnosis.tokens import TokenTable
from trimtab.report.token_statistics import at_level, clipped

if TYPE_CHECKING:
    from trimtab.objectives import Objective, SecondMoment


ONE_UPDATE = "clips π/π_old, which is 1 in the first update on a batch, so no token is clipped"


@dataclass(frozen=True, eq=False)
class Clipping:
    """Masks (tokens,) of the tokens below and above the bounds of the ratio, and the rule in words."""

    low: np.ndarray
    high: np.ndarray
    rule: str


def clipping(config: Mapping[str, Any], tokens: TokenTable) -> Clipping | str:
    """Returns the clipped tokens of one file, or a clause that says why they cannot be shown.

    The ratio is over the behavior policy and at the level of the objective (token or sequence). Its numerator is the
    perturbed policy where the file has it (ALP), otherwise the clean one. Untrained tokens are never clipped.
    """
    from trimtab.objectives import Clipped, SecondMoment

    objective = objective_of(config)
    if isinstance(objective, str):
        return objective
    if objective.ratio.over == "proximal":
        return f"{objective.name} {ONE_UPDATE}"
    if not isinstance(objective.surrogate, Clipped | SecondMoment):
        return f"{objective.name} clips nothing"
    if tokens.perturbed is None and tokens.anchor is None:
        return "the files hold no log-prob of the trainer"
    if tokens.advantage is None:
        return "the files hold no advantages"
    numerator = tokens.perturbed if tokens.perturbed is not None else tokens.trainer
    token_log_ratio = np.where(tokens.mask, numerator.astype(np.float64) - tokens.behavior, 0.0)
    log_ratio = at_level(token_log_ratio, tokens.mask, tokens.starts, objective.ratio.level)
    low, high, rule = _clipped_sides(objective, log_ratio, tokens)
    ratio = f"r = {'perturbed ' if tokens.perturbed is not None else ''}π/μ"
    level = "" if objective.ratio.level == "token" else f" of the {objective.ratio.level} ratio"
    return Clipping(low & tokens.mask, high & tokens.mask, f"{ratio}{level}; {rule}")


def objective_of(config: Mapping[str, Any]) -> Objective | str:
    """Returns the objective of a run, or a clause that says why it is not known."""
    from trimtab.objectives.from_section import from_section
    from trimtab.objectives.lookup import is_custom

    section = config.get("objective", {})
    try:
        if "code" in section or is_custom(section["name"]):
            return f"{section['name']} is not a preset, and a report runs no code that a run names"
        return from_section(section)
    except (KeyError, ValueError) as error:
        return f"this version of trimtab does not know the objective ({error})"


def _clipped_sides(
    objective: Objective, log_ratio: np.ndarray, tokens: TokenTable
) -> tuple[np.ndarray, np.ndarray, str]:
    from trimtab.objectives import Clipped, SecondMoment

    assert tokens.advantage is not None
    surrogate, advantage = objective.surrogate, tokens.at_tokens(tokens.advantage)
    if isinstance(surrogate, Clipped):
        low, high = 1.0 - surrogate.low, 1.0 + surrogate.high
        rule = f"clipped: A < 0 and r < {low:.4g}, or A > 0 and r > {high:.4g}"
        return *clipped(log_ratio, advantage, low, high), rule
    assert isinstance(surrogate, SecondMoment)
    bound = _second_moment(objective, surrogate, log_ratio, tokens.mask, advantage)
    if surrogate.form == "mask":
        outside = np.abs(log_ratio) > bound
        rule = f"left out: |log r| > {bound:.3g}, the limit of the whole batch"
        return outside & (log_ratio < 0), outside & (log_ratio >= 0), rule
    rule = f"clipped: A < 0 and log r < −{bound:.3g}, or A > 0 and log r > {bound:.3g}, the cap of the whole batch"
    if math.isinf(bound):
        rule = "the second moment of the whole batch is within tau, so nothing is clipped"
    low, high = (advantage < 0) & (log_ratio < -bound), (advantage > 0) & (log_ratio > bound)
    return low, high, rule


def _second_moment(
    objective: Objective, surrogate: SecondMoment, log_ratio: np.ndarray, mask: np.ndarray, advantage: np.ndarray
) -> float:
    """Returns M2PO's bound on |log r|, computed from all tokens of the file as one update."""
    import torch

    from trimtab.objectives import PolicyLogps

    ratio = torch.from_numpy(log_ratio)[None]
    logps = PolicyLogps(current=ratio, behavior=torch.zeros_like(ratio), mask=torch.from_numpy(mask)[None])
    state = objective.prepare(logps, torch.from_numpy(advantage)[None])
    limit_function = state.second_moment_limit if surrogate.form == "mask" else state.second_moment_cap
    return float(limit_function(surrogate.tau))
