"""The sections `[objective]` and `[advantage]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from trimtab.trainer.config.section import PluginSection, Positive, Section

COMPOSED = "composed"
"""Name of an objective of parts alone."""

OBJECTIVE_PARTS = ("ratio", "surrogate", "weight", "mask", "centering")
"""Keys of `[objective]` that are parts; `objectives.composition`, which needs torch, builds them."""

TOKEN_BASELINE = "optimal-token"
"""The kind of advantage with a value for each token."""

BATCH_BASELINE = "batch-mean"
"""The kind of advantage that compares responses to different prompts with each other."""

DISTILLATION = "distillation"
"""The kind of advantage that reads no rewards but the log-probs of a teacher, at each token."""


class ObjectiveConfig(PluginSection):
    """What is minimized: a named method, or your own `module:function` that returns an `Objective`, and keywords."""

    name: str = Field(
        default="token-tis",
        description="the method (the table of objectives below lists all), `module:function`, or `composed` of parts "
        "alone, the default beside a `surrogate`",
    )
    calibrate: bool = Field(default=False, description="take the bounds of weights and masks from the ratios of step 0")
    code: str | None = Field(
        default=None, description="written by a run whose objective was given in code: what it was"
    )
    equation: str | None = Field(default=None, description="written by a run whose objective is not a preset")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_name(cls, data: Any) -> Any:
        """Names a section of parts that has no name; parts never change the default preset unsaid."""
        if not isinstance(data, Mapping) or "name" in data:
            return data
        if "surrogate" in data:
            return {**data, "name": COMPOSED}
        given = [part for part in OBJECTIVE_PARTS if part in data]
        if given:
            raise ValueError(
                f"{', '.join(given)} without a name: set objective.name to the method that it changes, or give a "
                "surrogate for an objective of parts alone"
            )
        return data


class AdvantageConfig(Section):
    """How the rewards of a group become advantages."""

    kind: Literal["grpo", "dr-grpo", "rloo", "optimal", "batch-mean", "optimal-token", "distillation"] | None = Field(
        default=None,
        description="default: the kind the objective expects; `optimal`: the reward less OAPL's soft value; "
        "`optimal-token`: less the baseline of least variance at each token (OTB), with a proximal pass; "
        "`distillation`: log π_ref/π_old of each token, without rewards, where model.reference is the teacher",
    )
    value_beta: Positive | None = Field(default=None, description="temperature of the soft value (`optimal`)")
