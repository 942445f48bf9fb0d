"""Objectives of off-policy policy optimization: parts, named presets, advantages and corrections.

objective     the loss of a batch, from its parts, and its equation
presets       the named objectives; lookup builds one by its name; keywords: what changes one; calibrate: its bounds
surrogates    the per-token terms, with ratio_bounds and smooth_surrogates
regularizers  the KL term and score centering; aggregation: the denominators
policies      the log-probs that an objective reads; state: what is summed over an update
advantages    advantages from rewards
code          the loss as a function in plain PyTorch
correct       weights, masks and mismatch as functions, for any loss

To register a new mask or surrogate: export its class here, a mask from `corrections` too; give it a `kind` in `MASKS`
or `SURROGATES` of `keywords`. A new number of one is a field of its class, checked in `__post_init__` and written in
`equation` and `code`; presets get it by a line of `keywords.Keywords`. CONTRIBUTING.md: tests, pages and presets.
"""

import sys
from types import ModuleType

from trimtab.corrections import OPSM, Band, Divergence, Evidence, Mask, PrefixBudget, Veto, Weight
from trimtab.corrections.code_lines import Lines
from trimtab.objectives.advantages import advantages
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.correct import Correction, correct, mismatch
from trimtab.objectives.lookup import keywords_of, objective, objectives
from trimtab.objectives.objective import Objective, Output
from trimtab.objectives.policies import PolicyLogps, Ratio
from trimtab.objectives.ratio_bounds import AgedClip, Banded, GrowingClip, SecondMoment
from trimtab.objectives.regularizers import KL
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.state import Metrics, State
from trimtab.objectives.surrogates import (
    Clipped,
    LogProb,
    Regression,
    Reinforce,
    Shaped,
    Surrogate,
    Terms,
    Unclipped,
    Value,
)

__all__ = [
    "KL",
    "OPSM",
    "AgedClip",
    "Aggregation",
    "Band",
    "Banded",
    "Clipped",
    "Correction",
    "Divergence",
    "Evidence",
    "GammaWeight",
    "GeometricClip",
    "GrowingClip",
    "Lines",
    "LogProb",
    "Mask",
    "Metrics",
    "Objective",
    "Output",
    "PolicyLogps",
    "PrefixBudget",
    "QuadraticPenalty",
    "Ratio",
    "Regression",
    "Reinforce",
    "SecondMoment",
    "Shaped",
    "SoftGate",
    "State",
    "Surrogate",
    "Terms",
    "Unclipped",
    "Value",
    "Veto",
    "Weight",
    "advantages",
    "correct",
    "keywords_of",
    "mismatch",
    "objective",
    "objectives",
]


class _CallableModule(ModuleType):
    """Makes `trimtab.objectives` both this package and, when called, the function that lists the presets."""

    def __call__(self) -> list[str]:
        return objectives()


sys.modules[__name__].__class__ = _CallableModule
