"""The sections of a recipe about updates: `[objective]`, `[advantage]`, `[optim]`, `[trainer]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trimtab.trainer.config.section import Count, NotNegative, PluginSection, Positive, Section, Whole

COMPOSED = "composed"
"""Name of an objective of parts alone."""

OBJECTIVE_PARTS = ("ratio", "surrogate", "weight", "mask", "centering")
"""Keys of `[objective]` that are parts; `objectives.keywords`, which needs torch, builds them."""

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


Share = Annotated[float, Field(ge=0, lt=1)]


class GuardConfig(Section):
    """Returns to an earlier checkpoint when a rule of the monitor sees a collapse (docs/guard.md)."""

    on: list[Literal["reward", "ess", "length", "mismatch", "nonfinite"]] = Field(
        default_factory=list,
        description="what it watches: `reward` (of the steps, and held-out accuracy), `ess`, `length`, `mismatch`, "
        "`nonfinite`; empty: nothing",
    )
    every: Count = Field(default=10, description="steps between checkpoints that the run may return to")
    lr_factor: float = Field(default=0.25, gt=0, lt=1, description="factor of the learning rate at each return")
    times: Whole = Field(default=3, description="returns before the run stops, with the last of these checkpoints")


class OptimConfig(Section):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0, le=1e38, description="learning rate after the warm-up")
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), strict=False, description="decay rates of the two moments, each from 0 to below 1"
    )
    eps: Positive = Field(default=1e-8, description="added to the denominator of the update")
    weight_decay: NotNegative = Field(default=0.0, description="decoupled weight decay")
    grad_clip: Positive = Field(default=1.0, description="largest norm of the gradient of an update")
    schedule: Literal["constant", "cosine"] = Field(default="constant", description="of the learning rate")
    warmup: Whole = Field(default=0, description="updates of linear warm-up")
    min_lr: NotNegative = Field(default=0.0, description="where cosine ends")


class TrainerConfig(Section):
    """Steps, batches, and how old their data may be."""

    steps: Count = Field(default=30, description="steps of the run: batches that are sampled and trained on")
    prompts: Count = Field(default=16, description="prompts of a step")
    samples: Count = Field(default=8, description="responses to a prompt; together they are a group")
    minibatches: Count = Field(default=1, description="optimizer updates per epoch of a batch")
    epochs: Count = Field(default=1, description="passes over a batch")
    sync_every: Count | None = Field(
        default=None, description="updates between weight updates of the engine; default: every step"
    )
    max_lag: Whole | None = Field(
        default=None,
        description="largest allowed age of a consumed token, in updates; above 0 generation is asynchronous",
    )
    in_flight: Literal["finish", "continue"] = Field(
        default="finish",
        description="what happens to unfinished responses when new weights come (max_lag above 0)",
    )
    proximal: Literal["current", "snapshot"] = Field(
        default="current",
        description="weights of the proximal policy: `current`: those that a step begins with; `snapshot`: those that "
        "sampled the token (docs/asynchrony.md)",
    )
    micro_batch_tokens: Count | Literal["auto"] = Field(
        default="auto",
        description="token budget of one forward and backward; auto: what fits the device's free memory, 2048 on a CPU",
    )
    deterministic: bool = Field(
        default=True,
        description="on a GPU, updates add in a fixed order, so that a run can be repeated and resumed bit for bit; "
        "false: faster",
    )
    dynamic_sampling: bool = Field(default=False, description="replace groups whose first rewards are all equal (DAPO)")
    refill_rounds: Count = Field(default=4, description="how often dynamic sampling may sample again per step")
    mask_truncated: bool = Field(default=False, description="no loss on responses cut by the length limit")
    max_bad_steps: Count = Field(default=3, description="non-finite updates in a row before the run stops")
    max_idle_steps: Whole = Field(
        default=10, description="steps in a row in which no advantage differs from 0 before the run stops; 0: never"
    )

    @property
    def unfinished(self) -> Literal["finish", "continue"]:
        """What happens to unfinished responses when new weights come; without `max_lag` there are none."""
        return self.in_flight if self.max_lag else "finish"

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates on one batch."""
        return self.minibatches * self.epochs

    @property
    def max_age(self) -> int:
        """Largest age in updates of a consumed token; without `max_lag` that of the engine's weights."""
        return (self.sync_every or 1) - 1 if self.max_lag is None else self.max_lag
