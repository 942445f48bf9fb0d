"""Recipe sections on updates and engines, and the base class of all sections, which is frozen and strict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16"]

# Values beyond these limits do not fit into 32-bit integers, float32 tensors, or the waits of operating systems, which
# count milliseconds in 32 bits.
MAX_INT = 2**31 - 1
MAX_FLOAT = 1e30
MAX_SECONDS = 1e6
Count = Annotated[int, Field(gt=0, le=MAX_INT)]
Whole = Annotated[int, Field(ge=0, le=MAX_INT)]
Processes = Annotated[int, Field(gt=0, le=1024)]
Positive = Annotated[float, Field(gt=0, le=MAX_FLOAT)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_FLOAT)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Share = Annotated[float, Field(ge=0, lt=1)]
Placement = Literal["local", "ray"]

# Keys of `[objective]` that are parts; `objectives.keywords`, which needs torch, builds them.
OBJECTIVE_PARTS = ("ratio", "surrogate", "weight", "mask", "centering")
COMPOSED = "composed"  # name of an objective that is given by its parts instead of a preset
TOKEN_BASELINE = "optimal-token"  # the kind of advantage with a value for each token
BATCH_BASELINE = "batch-mean"  # the kind of advantage whose baseline is over responses to different prompts
DISTILLATION = "distillation"  # the kind of advantage from the log-probs of a teacher at each token, without rewards


class Section(BaseModel):
    """A section: unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PluginSection(Section):
    """A section that names a part and contains the keywords of that part."""

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="after")
    def _check_magnitudes(self) -> PluginSection:
        """Raises an error for numbers that are too large to compute with; the part itself checks everything else."""
        for key, value in self.keywords.items():
            is_large_integer = isinstance(value, int) and abs(value) > MAX_INT
            is_large_real = isinstance(value, float) and math.isfinite(value) and abs(value) > MAX_FLOAT
            if is_large_integer or is_large_real:
                raise ValueError(f"{key} = {str(value)[:20]} is too large to compute with: lower it")
        return self

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


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


class VllmConfig(Section):
    """Options of vLLM (engine.type = "vllm")."""

    memory: Positive = Field(default=0.5, description="KV cache: share of the device's memory on a GPU, GiB on a CPU")
    context: Count | None = Field(default=None, description="longest sequence; default: the model's own")
    eager: bool = Field(default=True, description="no compilation and no CUDA graphs: starts in seconds")
    tensor_parallel: Processes = Field(default=1, description="devices one copy of the model is split over")
    quantization: str | None = Field(default=None, description="vLLM's name of a quantization of the weights")
    kv_cache_dtype: str = Field(default="auto", description="vLLM's name of the cache's type; auto: that of the engine")
    sampling_mask: bool = Field(
        default=False, description="return the set each token was drawn from, which top_k (and top_p with it) needs"
    )


class ServerConfig(Section):
    """Inference servers that run beside the trainer (engine.type = "server")."""

    urls: list[str] = Field(default_factory=list, description="base URLs, e.g. http://127.0.0.1:8000; work is shared")
    kind: Literal["vllm", "sglang"] = Field(default="vllm", description="whose protocol and weight update routes")
    model: str | None = Field(
        default=None, description="name under which they serve the model (vllm); default: the first one they list"
    )
    timeout: Seconds = Field(default=600.0, description="seconds one request may take")
    reconnect_timeout: Seconds = Field(default=120.0, description="seconds to wait for a server to come back")
    concurrency: int = Field(default=64, ge=1, le=65536, description="requests in flight at one server")
    folder: str | None = Field(
        default=None,
        description="where weights are written for the servers, on a file system of both; default: /dev/shm",
    )


class CanaryConfig(Section):
    """A few fixed prompts, sampled by the engine and scored by the trainer after weight updates."""

    every: Whole | None = Field(
        default=None, description="weight updates between checks; 0: never; default: 1, for embedded engines 0"
    )
    prompts: int = Field(default=4, ge=2, le=1024, description="every second one new at every check, the others fixed")
    tokens: Count = Field(default=16, description="positions checked of each prompt, at its end")
    bound: Positive | None = Field(
        default=None, description="largest mean |log-prob difference|; default: 3x that of the first check"
    )


class EngineConfig(Section):
    """The sampler, which generates the responses."""

    type: Literal["embedded", "vllm", "server"] = Field(
        default="embedded",
        description="`embedded`: transformers in this process; `vllm`: vLLM; `server`: inference servers over HTTP",
    )
    dtype: Dtype = Field(default="bfloat16", description="type of the sampler's weights and activations")
    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="engines in separate processes (embedded, vllm); default: 1 where max_lag is above 0, else 0",
    )
    hang_timeout: float = Field(
        default=900.0,
        ge=3,
        le=MAX_SECONDS,
        description="seconds without a heartbeat after which an engine's process is restarted; more than its longest "
        "prefill",
    )
    quantize: Literal["none", "int8", "int4", "int3"] = Field(
        default="none", description="rounding of the sampler's weight matrices, one scale a row (embedded)"
    )
    noise: NotNegative = Field(
        default=0.0, description="Gaussian noise on the sampler's weight matrices, relative to their RMS (embedded)"
    )
    vllm: VllmConfig = VllmConfig()
    server: ServerConfig = ServerConfig()
    canary: CanaryConfig = CanaryConfig()

    @property
    def context(self) -> int | None:
        """The context length of the engine in tokens, or None for the context length of the model."""
        return self.vllm.context if self.type == "vllm" else None

    @property
    def changes_weights(self) -> bool:
        """Whether the sampler's weights are quantized or noisy."""
        return self.quantize != "none" or self.noise > 0


class RayConfig(Section):
    """Actors on an existing Ray cluster, in one placement group with one bundle for each actor.

    Ray counts CPUs and GPUs but does not enforce them; an actor uses as many threads as it has whole CPUs.
    """

    address: str = Field(default="auto", description="the cluster: host:port, or `auto` for the one of this machine")
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="how Ray places the actors on its nodes"
    )
    start_timeout: Seconds = Field(default=300.0, description="seconds to wait for resources and for an actor to start")
    engines: Count = Field(default=1, description="actors that sample")
    engine_cpus: NotNegative = Field(default=1.0, description="of one engine")
    engine_gpus: NotNegative = Field(default=0.0, description="of one engine, on one node")
    trainers: Count = Field(default=1, description="ranks of the trainer; the model is sharded over them (FSDP2)")
    trainer_cpus: NotNegative = Field(default=1.0, description="of one rank")
    trainer_gpus: float = Field(default=0.0, ge=0, le=1, description="a rank uses one device at most")
    shard_mib: Count = Field(default=256, description="size of one object of a weight update")


class RoutingConfig(Section):
    """Routing replay. Gates come from the scores of the pass."""

    replay: Literal["none", "proximal", "rollout"] = Field(
        default="none",
        description="`proximal`: experts of the proximal pass, replayed in the update (R2); `rollout`: experts the "
        "engine used, replayed in every pass of the trained policy (R3)",
    )
