"""Descriptions of parts: equation symbols, and settings in other frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FRAMEWORKS = ("verl", "TRL", "Miles")
PEER_LEVELS = ("token", "sequence", "geometric")
"""Levels that other frameworks have."""

_SYMBOL = {
    "token": "{0}_t",
    "sequence": "{0}",
    "geometric": "{0}_geo",
    "turn": "{0}_turn",
    "turn_geometric": "{0}_geo(turn)",
    "prefix": "{0}_≤t",
    "prefix_geometric": "{0}_geo(≤t)",
}
_VALUE = {
    "token": "{0} = {1}",
    "sequence": "{0} = Π_t {1}",
    "geometric": "{0} = (Π_t {1})^(1/T)",
    "turn": "{0} = Π_t {1} over the tokens of the turn",
    "turn_geometric": "{0} = (Π_t {1})^(1/n) over the n tokens of the turn",
    "prefix": "{0} = Π_t {1} over the tokens up to this one",
    "prefix_geometric": "{0} = (Π_t {1})^(1/n) over the n tokens up to this one",
}


def symbol(letter: str, level: str) -> str:
    """Returns the symbol of a ratio at a level: ρ_t, ρ, ρ_geo, ρ_turn, ρ_geo(turn), ρ_≤t or ρ_geo(≤t)."""
    return _SYMBOL[level].format(letter)


def definition(letter: str, level: str, numerator: str, denominator: str) -> str:
    """Returns the definition of a ratio's symbol, such as `ρ_t = π_old(y_t)/μ(y_t)`."""
    return _VALUE[level].format(symbol(letter, level), f"{numerator}(y_t)/{denominator}(y_t)")


@dataclass(frozen=True)
class Setting:
    """The settings of a part in another framework.

    options: values as written in its configuration, empty for a flag. verl: keys of `rollout_correction` (weights,
    masks) or `actor` (surrogates); TRL: arguments of `GRPOConfig`; Miles: flags, or keys of its mismatch helper's file.
    remarks: comments on what differs or is missing there.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


Peers = Mapping[str, Setting]
"""Settings by framework (one of `FRAMEWORKS`); a framework without an entry has no equivalent of the part."""
