"""Recipe sections on the model and its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trimtab.trainer.config.base import Count, Dtype, NotNegative, PluginSection, Positive, Section, Share, Whole

# Keys of `[objective]` that are parts; `objectives.keywords`, which needs torch, builds them.
OBJECTIVE_PARTS = ("ratio", "surrogate", "weight", "mask", "centering")
COMPOSED = "composed"  # name of an objective that is given by its parts instead of a preset
TOKEN_BASELINE = "optimal-token"  # the kind of advantage with a value for each token
BATCH_BASELINE = "batch-mean"  # the kind of advantage whose baseline is over responses to different prompts
DISTILLATION = "distillation"  # the kind of advantage from the log-probs of a teacher at each token, without rewards
NoiseStd = Annotated[float, Field(ge=0, le=100)]


class LoraConfig(Section):
    """Low-rank adapters through peft; rank 0 trains every weight."""

    rank: int = Field(default=0, ge=0, le=65536, description="rank of the adapters; 0: none, every weight is trained")
    alpha: Count = Field(default=16, description="adapters are scaled by alpha / rank")
    targets: str | list[str] = Field(
        default="all-linear", description="names of the layers that get adapters; `all-linear`: all but the head"
    )


class ModelConfig(Section):
    """The model that is trained, and its numerics in the trainer."""

    path: str = Field(
        default="smollm2-135m-instruct",
        description="HF id, folder, the bundled model, `laboratory`, `laboratory-moe`, `laboratory-switch`, "
        "`laboratory-tools` or `laboratory-long`",
    )
    reference: str | None = Field(
        default=None,
        description="a model with the same tokenizer, written as `path`: the anchor of the KL term, or the teacher of "
        '`advantage.kind = "distillation"`; default: the weights that `path` names',
    )
    dtype: Dtype = Field(default="float32", description="master weights and optimizer state")
    autocast: Literal["bfloat16", "none"] = Field(default="bfloat16", description="forward precision in the trainer")
    gradient_checkpointing: bool = Field(
        default=False, description="compute activations again in the backward pass instead of keeping them"
    )
    compile: bool = Field(
        default=False,
        description="compile the decoder layers (torch.compile): fewer operations on a GPU, a slow first step",
    )
    lora: LoraConfig = LoraConfig()


class ObjectiveConfig(PluginSection):
    """What is minimized: a named method, or your own `module:function` that returns an `Objective`, and keywords."""

    name: str = Field(
        default="token-tis",
        description="the method (the table of objectives below lists all), `module:function`, or `composed` of parts "
        "alone, the default beside a `surrogate`",
    )
    calibrate: bool = Field(default=False, description="take the bounds of weights and masks from the ratios of step 0")
    code: str | None = Field(default=None, description="written by a run whose objective is code: what it was")
    equation: str | None = Field(default=None, description="written by a run whose objective is not a preset")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_name(cls, data: Any) -> Any:
        """Names a section of parts without a name: parts must not change the default preset implicitly."""
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


class PerturbationConfig(Section):
    """Learnable noise on the hidden states of the trained policy (ALP); needs an objective whose ratio is π/μ."""

    layers: int | str = Field(default="all", description="`all`, ranges such as `0-4,12-16`, or `logits`")
    std: NoiseStd | list[NoiseStd] = Field(
        default=1e-4, description="initial standard deviation, or a list with one for each perturbed layer; 0: no noise"
    )
    lr: float = Field(default=5e-4, ge=0, le=1, description="learning rate of log sigma, without decay and warm-up")
    per_response: bool = Field(
        default=False,
        description="draw the noise on a prompt anew for each response, as the paper, and compute the prompt as often; "
        "false: once for a group",
    )


class RoutingConfig(Section):
    """Makes the trainer use the experts that the sampler (or proximal pass) chose, with gate weights computed anew."""

    replay: Literal["none", "proximal", "rollout"] = Field(
        default="none",
        description="`proximal`: experts of the proximal pass, replayed in the update (R2); `rollout`: experts the "
        "engine used, replayed in every pass of the trained policy (R3)",
    )


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
        default="finish", description="what happens to unfinished responses when new weights come (max_lag above 0)"
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
        """What happens to unfinished responses when new weights arrive; without `max_lag` all are finished by then."""
        return self.in_flight if self.max_lag else "finish"

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates on one batch."""
        return self.minibatches * self.epochs

    @property
    def max_age(self) -> int:
        """Largest age in updates of a token that is trained on; without `max_lag`, the age of the engine's weights."""
        return (self.sync_every or 1) - 1 if self.max_lag is None else self.max_lag


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


class SftConfig(Section):
    """Supervised warm start on the task's gold answers (`trimtab sft`)."""

    steps: Count = Field(default=80, description="updates")
    batch: Count = Field(default=128, description="problems of an update")
    lr: float = Field(default=2e-3, gt=0, le=1e38, description="learning rate after the warm-up")
    warmup: Whole = Field(default=0, description="updates of linear warm-up")
    until: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="ends earlier, at the first batch whose gold answers have this probability on average",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="of the order of problems, and of a laboratory model's first weights; default: `seed`, and weights "
        "of seed 0",
    )


class ShardingConfig(Section):
    """How the trained model is sharded over the ranks (FSDP2); not for one process."""

    offload: bool = Field(default=False, description="parameters, gradients and optimizer state wait in CPU memory")
    reshard: bool = Field(default=True, description="free gathered weights after a layer's forward")
