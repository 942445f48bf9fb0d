"""Objectives of off-policy policy optimization: parts, named presets, advantages and corrections."""

import sys
from types import ModuleType

from trimtab.corrections import OPSM, Band, Divergence, Evidence, Mask, Peers, PrefixBudget, Setting, Veto, Weight
from trimtab.objectives.advantages import advantages
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.correct import Correction, correct, mismatch
from trimtab.objectives.lookup import keywords_of, objective, objectives
from trimtab.objectives.metrics import Metrics
from trimtab.objectives.objective import Objective, Output
from trimtab.objectives.policies import PolicyLogps, Ratio
from trimtab.objectives.ratio_bounds import AgedClip, Banded, GrowingClip
from trimtab.objectives.regularizers import KL
from trimtab.objectives.second_moment import SecondMoment
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.state import State
from trimtab.objectives.surrogate import Surrogate, Terms, Value
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Shaped, Unclipped

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
    "LogProb",
    "Mask",
    "Metrics",
    "Objective",
    "Output",
    "Peers",
    "PolicyLogps",
    "PrefixBudget",
    "QuadraticPenalty",
    "Ratio",
    "Regression",
    "Reinforce",
    "SecondMoment",
    "Setting",
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
