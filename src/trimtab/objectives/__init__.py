"""Objectives of off-policy policy optimization: parts, named presets, advantages and corrections.

objective     the loss of a batch, from its parts, and its equation
presets       the named objectives; lookup builds them by name, keywords changes them, calibrate fits their bounds
surrogates    the per-token terms, with ratio_bounds
regularizers  the KL term and score centering; aggregation: the denominators
ratio         the policy ratio; alp_noise: the noise of ALP; state: sums over an update
advantages    advantages from rewards
correct       weights, masks and mismatch as functions, for any loss

To register a new mask or surrogate: export its class here (a mask also from `corrections`) and give it a `kind` in
`MASKS` or `SURROGATES` of `keywords`. A new parameter is a field of the class with its range (`within`), and appears in
`equation` and `code`; a line in `keywords.Keywords` adds it to presets. Tests, pages and presets: CONTRIBUTING.md.
"""

import sys
from types import ModuleType

from trimtab.corrections import OPSM as OPSM
from trimtab.corrections import Band as Band
from trimtab.corrections import Divergence as Divergence
from trimtab.corrections import Mask as Mask
from trimtab.corrections import PrefixBudget as PrefixBudget
from trimtab.corrections import RuleInputs as RuleInputs
from trimtab.corrections import Veto as Veto
from trimtab.corrections import Weight as Weight
from trimtab.corrections.code_lines import Lines as Lines
from trimtab.corrections.policy_logps import PolicyLogps as PolicyLogps
from trimtab.objectives.advantages import advantages as advantages
from trimtab.objectives.aggregation import Aggregation as Aggregation
from trimtab.objectives.correct import Correction as Correction
from trimtab.objectives.correct import correct as correct
from trimtab.objectives.correct import mismatch as mismatch
from trimtab.objectives.lookup import keywords_of as keywords_of
from trimtab.objectives.lookup import objective as objective
from trimtab.objectives.lookup import objectives as objectives
from trimtab.objectives.objective import Objective as Objective
from trimtab.objectives.objective import Output as Output
from trimtab.objectives.ratio import Ratio as Ratio
from trimtab.objectives.ratio_bounds import AgedClip as AgedClip
from trimtab.objectives.ratio_bounds import Banded as Banded
from trimtab.objectives.ratio_bounds import GammaWeight as GammaWeight
from trimtab.objectives.ratio_bounds import GeometricClip as GeometricClip
from trimtab.objectives.ratio_bounds import GrowingClip as GrowingClip
from trimtab.objectives.ratio_bounds import QuadraticPenalty as QuadraticPenalty
from trimtab.objectives.ratio_bounds import SecondMoment as SecondMoment
from trimtab.objectives.ratio_bounds import SoftGate as SoftGate
from trimtab.objectives.regularizers import KL as KL
from trimtab.objectives.state import Metrics as Metrics
from trimtab.objectives.state import State as State
from trimtab.objectives.surrogates import Clipped as Clipped
from trimtab.objectives.surrogates import LogProb as LogProb
from trimtab.objectives.surrogates import Regression as Regression
from trimtab.objectives.surrogates import Reinforce as Reinforce
from trimtab.objectives.surrogates import Shaped as Shaped
from trimtab.objectives.surrogates import Surrogate as Surrogate
from trimtab.objectives.surrogates import Terms as Terms
from trimtab.objectives.surrogates import Unclipped as Unclipped
from trimtab.objectives.surrogates import Value as Value


class _CallableModule(ModuleType):
    """Makes `trimtab.objectives` callable: the package is also the function that lists the presets."""

    def __call__(self) -> list[str]:
        return objectives()


sys.modules[__name__].__class__ = _CallableModule
