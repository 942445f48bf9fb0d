"""The table of named objectives, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.objective import Objective

LENGTH_MAX = 1024
"""Response budget of `dr-grpo` and `luffy` in tokens; a recipe may set another `length_max`."""

SEQUENCE_MEAN = Aggregation("seq-mean-token-mean")
FIXED_LENGTH = Aggregation("constant", length_max=LENGTH_MAX)

Preset = Callable[..., Objective]
PRESETS: dict[str, Preset] = {}


def preset(function: Preset) -> Preset:
    """Registers a constructor under its name with hyphens."""
    PRESETS[function.__name__.replace("_", "-")] = function
    return function
