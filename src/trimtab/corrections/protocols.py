"""Interfaces through which a part describes itself: equation symbols, and options in other frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FRAMEWORKS = ("verl", "TRL", "Miles")

_SYMBOL = {"token": "{0}_t", "sequence": "{0}", "geometric": "{0}_geo"}
_VALUE = {"token": "{0} = {1}", "sequence": "{0} = Π_t {1}", "geometric": "{0} = (Π_t {1})^(1/T)"}


def symbol(letter: str, level: str) -> str:
    """A ratio's symbol at a level: ρ_t, ρ or ρ_geo."""
    return _SYMBOL[level].format(letter)


def definition(letter: str, level: str, numerator: str, denominator: str) -> str:
    """What a ratio's symbol stands for, such as `ρ_t = π_old(y_t)/μ(y_t)`."""
    return _VALUE[level].format(symbol(letter, level), f"{numerator}(y_t)/{denominator}(y_t)")


@dataclass(frozen=True)
class Setting:
    """A part in the configuration of another framework.

    options: values as they are written there, an empty one for a flag. verl: keys of `rollout_correction` (weights,
    masks) or `actor` (surrogates); TRL: arguments of `GRPOConfig`; Miles: flags, or keys of its mismatch helper's file.
    remarks: what is not the same there, or is missing.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


Peers = Mapping[str, Setting]
"""Settings by framework, one of `FRAMEWORKS`. One that is left out has no equivalent of the part."""
