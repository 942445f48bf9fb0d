"""The policy ratio of an objective."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.corrections.fields import CheckedFields, one_of
from trimtab.corrections.ratios import LEVELS


@dataclass(frozen=True)
class Ratio(CheckedFields):
    """The ratio current/proximal or current/behavior.

    level: token; the products sequence, turn (a model turn) or prefix (the tokens up to this one); or their geometric
        means geometric, turn_geometric or prefix_geometric.
    over: the denominator, proximal or behavior.
    """

    level: str = one_of(LEVELS, "token")
    over: str = one_of(("proximal", "behavior"), "proximal")
