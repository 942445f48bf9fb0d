"""The section `[trainer]` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimtab.trainer.config.section import Count, Section, Whole


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
    window: Count = Field(
        default=1, description="with max_lag: a slow group is passed by at most window - 1 younger ones; 1: by none"
    )
    in_flight: Literal["finish", "discard", "continue"] = Field(
        default="finish",
        description="what happens to unfinished responses when new weights come (max_lag above 0)",
    )
    proximal: Literal["current", "snapshot", "ewma"] = Field(
        default="current",
        description="weights of the proximal policy: `current`: those that a step begins with; `snapshot`: those that "
        "sampled the token; `ewma`: a moving average (docs/asynchrony.md)",
    )
    proximal_decay: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="decay of the moving average at each update; default: n / (n + 1), whose mean age is n updates, "
        "n = the larger of max_lag and the updates of a step",
    )
    micro_batch_tokens: Count = Field(default=2048, description="token budget of one forward and backward")
    dynamic_sampling: bool = Field(default=False, description="replace groups whose rewards are all equal (DAPO)")
    oversample: float = Field(default=1.0, ge=1, le=1e6, description="groups sampled per missing one; the rest waits")
    refill_rounds: Count = Field(default=4, description="how often dynamic sampling may sample again per step")
    mask_truncated: bool = Field(default=False, description="no loss on responses cut by the length limit")
    max_bad_steps: Count = Field(default=3, description="non-finite updates in a row before the run stops")
    max_idle_steps: Whole = Field(
        default=10, description="steps in a row in which no advantage differs from 0 before the run stops; 0: never"
    )

    @property
    def unfinished(self) -> Literal["finish", "discard", "continue"]:
        """What happens to unfinished responses when new weights come; without `max_lag` there are none."""
        return self.in_flight if self.max_lag else "finish"

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates on one batch."""
        return self.minibatches * self.epochs

    @property
    def decay(self) -> float:
        """`proximal_decay`, or its default: the moving average is as old as the oldest tokens."""
        age = max(self.max_lag or 0, self.updates_per_step)
        return age / (age + 1) if self.proximal_decay is None else self.proximal_decay

    @property
    def max_age(self) -> int:
        """Largest age in updates of a consumed token; without `max_lag` that of the engine's weights."""
        return (self.sync_every or 1) - 1 if self.max_lag is None else self.max_lag
