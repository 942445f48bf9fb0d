"""The named objectives: one constructor each, with the defaults of its paper.

Keywords that all of them share (aggregation, denominator, length_max, kl, kl_coef, entropy_coef) and parts given beside
a preset are applied by `lookup.objective`. Sources and choices: docs/methods.md; which to use:
docs/choosing.md.
"""

# The order of these imports is the order of the presets in every table.
from trimtab.objectives.presets import (  # noqa: I001
    ratio_presets,
    decoupled_presets,
    mixed_data_presets,
    trust_region_presets,
    smooth_presets,
)
from trimtab.objectives.presets.registry import PRESETS, Preset

__all__ = [
    "PRESETS",
    "Preset",
    "decoupled_presets",
    "mixed_data_presets",
    "ratio_presets",
    "smooth_presets",
    "trust_region_presets",
]
