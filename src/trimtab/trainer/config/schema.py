"""All recipe sections with keys, defaults and ranges, as frozen pydantic models. Does not import torch.

The sections `[objective]`, `[task]` and `[[reward]]` name a part and contain its keywords. The part checks them when it
is built, before a model is loaded. In other sections, an unknown key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, field_validator, model_validator

from trimtab.trainer.config.sections import (
    MAX_FLOAT,
    AdvantageConfig,
    Count,
    Dtype,
    EngineConfig,
    GuardConfig,
    ObjectiveConfig,
    OptimConfig,
    Placement,
    PluginSection,
    Processes,
    RayConfig,
    RoutingConfig,
    Seconds,
    Section,
    TrainerConfig,
    Whole,
)

NoiseStd = Annotated[float, Field(ge=0, le=100)]

# Objectives that need a separate section, from which the trainer changes the data or the model.
REQUIRED_SECTIONS = {
    "token-alp": "perturbation",
    "seq-alp": "perturbation",
    "soup": "prefix",
    "luffy": "demonstrations",
}

# Keys that name a part, each with the sections that are reset if the name changes.
DEPENDENT_SECTIONS = {
    "objective.name": ("objective", "advantage", *sorted({*REQUIRED_SECTIONS.values()})),
    "task.name": ("task",),
}


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


class TaskConfig(PluginSection):
    """Where prompts come from: a kind of task and its own keywords."""

    name: str = Field(default="arithmetic", description="the kind of task; the tables of tasks below list all")


class EnvironmentConfig(PluginSection):
    """Multi-turn episodes: an environment whose tools the model calls, and keywords of the environment."""

    name: str = Field(
        description="`python`: a sandboxed interpreter; `swap`: rows to sort; `openenv`: a server of OpenEnv; or your "
        "own class as `module:Class`"
    )
    format: str = Field(
        default="tag", description="how a call is written: `tag`, `fence`, `chat`, or your own class as `module:Format`"
    )
    instructions: str = Field(
        default="",
        description="text before every prompt: worked examples of calls; default, with `tag` and `fence`: "
        "what the tools do",
    )
    max_turns: Count = Field(default=5, description="turns of the model; a call in the last one is not made")
    max_turn_tokens: Count | None = Field(default=None, description="tokens of a turn; default: sampling.max_tokens")
    max_observation_tokens: Count = Field(
        default=256, description="tokens of the result of a call; a longer one is cut in the middle"
    )
    timeout: Seconds = Field(default=10.0, description="seconds of one call, after which the episode is dropped")
    answer: str | None = Field(
        default=None,
        description="regular expression of an answer; a last turn with neither call nor answer is void; default: "
        "any text that is not blank is one",
    )
    void: Literal["mask", "keep"] = Field(
        default="mask", description="`mask`: no loss on responses that end in a void turn; their rewards count"
    )

    @field_validator("answer")
    @classmethod
    def _is_a_regular_expression(cls, answer: str | None) -> str | None:
        try:
            re.compile(answer or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{answer!r} is not a regular expression: {error}") from None
        return answer


class RewardConfig(PluginSection):
    """`name` is a built-in reward or a user's own `module:function`."""

    name: str = Field(description="a built-in reward, or your own function as `module:function`")
    weight: float = Field(default=1.0, ge=-MAX_FLOAT, le=MAX_FLOAT, description="factor of this reward in the sum")
    timeout: Seconds = Field(default=5.0, description="seconds one call may take")


class SamplingConfig(Section):
    """How training responses are drawn."""

    temperature: float = Field(default=1.0, ge=1e-3, le=1e3, description="of the sampler and the trainer's log-probs")
    top_p: float = Field(default=1.0, gt=0, le=1, description="probability mass tokens are drawn from; 1: all")
    top_k: Whole = Field(default=0, description="number of most likely tokens to draw from; 0: all")
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="most probable ids the sampler returns with each token; default: 128 where the objective centers "
        "scores, else none",
    )
    max_tokens: Count | None = Field(default=None, description="default: what the task needs")
    max_prompt_tokens: Count | None = Field(
        default=None,
        description="problems with longer prompts are left out, and counted; default: the context less max_tokens",
    )


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


class PrefixConfig(Section):
    """Responses whose prefix is from an older policy and the rest from the current one (SOUP).

    Needs an objective whose ratio is π/μ and that allows several samplers in a response.
    """

    rule: Literal["length", "entropy"] = Field(default="length", description="where a response is cut")
    ratio: float = Field(default=0.5, ge=0, lt=1, description="share of the response the prefix keeps (length rule)")
    top: Count = Field(default=32, description="highest-entropy positions to choose from (entropy rule)")
    refresh: Count = Field(default=8, description="batches between refreshes of the historical policy; 1: none")
    share: Count = Field(default=1, description="responses of a group that continue the same prefix")
    whole: bool = Field(default=False, description="sample whole historical responses and cut them, as the paper did")


GOLD = "gold"  # value of `demonstrations.path` for the task's own answers


class DemonstrationConfig(Section):
    """External traces in every group (LUFFY); needs an objective that trains tokens of no sampler."""

    path: str = Field(default=GOLD, description="JSONL file of prompt and response, or `gold`: the task's own answers")
    per_group: Count = Field(default=1, description="traces in a group; they count among `trainer.samples`")


class DiagnoseConfig(Section):
    """Measurements of the mismatch that cost an additional forward pass."""

    every: Count = Field(
        default=10, description="steps between measurements: update/policy_kl, clean probes of a perturbed policy"
    )


class EvalTaskConfig(PluginSection):
    """A further task that is evaluated during training, with its keywords; its own rewards score it."""

    name: str = Field(description="the kind of task; the tables of tasks below list all")
    samples: Whole = Field(default=0, description="sampled responses to each problem, whose mean is avg@n; 0: none")
    problems: Count | None = Field(default=None, description="default: eval.problems")


class EvalConfig(Section):
    """Held-out accuracy during training: greedy, and the mean of sampled responses."""

    every: Whole = Field(default=0, description="steps between evaluations; 0: only before and after")
    problems: Count = Field(default=192, description="the first so many problems of the test split")
    skip: Whole = Field(default=0, description="problems of the run's own task that are left out before these")
    samples: Whole = Field(default=0, description="sampled responses to each problem, whose mean is avg@n; 0: none")
    best: str | list[str] | None = Field(
        default=None,
        description="metric whose best checkpoint is kept, `eval/<task>/greedy` or `eval/<task>/avg@<n>`; of several "
        "the mean",
    )
    task: list[EvalTaskConfig] = Field(default=[], description="further tasks")

    @field_validator("best")
    @classmethod
    def _names_a_metric(cls, best: str | list[str] | None) -> str | list[str] | None:
        if isinstance(best, list) and (not best or len(set(best)) < len(best)):
            raise ValueError("name at least one metric, and each once; leave it out to keep no best checkpoint")
        return best

    @property
    def best_metrics(self) -> list[str]:
        """The metrics whose mean selects the best checkpoint."""
        return [self.best] if isinstance(self.best, str) else list(self.best or [])

    @property
    def best_label(self) -> str:
        """What selects the best checkpoint, in words."""
        names = self.best_metrics
        return names[0] if len(names) == 1 else f"mean of {', '.join(names)}"


class CheckpointConfig(Section):
    """Checkpoints to resume from: weights and optimizer state, 12 bytes for each trained parameter in float32."""

    every: Whole = Field(default=0, description="steps between checkpoints; 0: only at the end")
    keep: Count = Field(default=2, description="newest checkpoints that stay on the disk; the best one does too")


class LogConfig(Section):
    """What a run writes in addition to metrics.jsonl."""

    trajectories_every: Whole = Field(default=1, description="steps between trajectory files; 0: none")
    tensorboard: bool = Field(default=False, description="event files in the run directory (extra `tensorboard`)")
    wandb: str | None = Field(default=None, description="W&B project (extra `wandb`)")


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


class CompareConfig(Section):
    """If present, `trimtab train` trains every objective with every seed and compares them on one page."""

    objectives: list[str] = Field(
        min_length=1,
        description="names of objectives; that of the recipe has its keywords and sections, others their defaults",
    )
    seeds: list[int] = Field(min_length=1, description="seeds of the runs of each objective")
    workers: Processes = Field(default=2, description="runs at a time, one process each")


class Config(Section):
    """A whole run. The resolved copy is saved as `config.toml` in the run directory."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="of all random numbers")
    out: str | None = Field(default=None, description="run directory; default: runs/<recipe>")
    description: str = Field(default="", description="one line, shown by `trimtab recipes`")
    numerics: Literal["native", "invariant"] = Field(
        default="native", description="`invariant`: sampler and trainer agree bit for bit (docs/bitwise.md)"
    )
    threads: Processes | None = Field(default=None, description="threads of PyTorch; default: PyTorch's own choice")
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    environment: EnvironmentConfig | None = None
    reward: list[RewardConfig] = Field(default_factory=list, description="default: the task's own reward")
    objective: ObjectiveConfig = ObjectiveConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    perturbation: PerturbationConfig | None = None
    prefix: PrefixConfig | None = None
    demonstrations: DemonstrationConfig | None = None
    engine: EngineConfig = EngineConfig()
    routing: RoutingConfig = RoutingConfig()
    sampling: SamplingConfig = SamplingConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()
    guard: GuardConfig = GuardConfig()
    eval: EvalConfig = EvalConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    sft: SftConfig = SftConfig()
    sharding: ShardingConfig = ShardingConfig()
    placement: Placement = Field(default="local", description="where processes run: this machine, or a Ray cluster")
    ray: RayConfig = RayConfig()
    compare: CompareConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _add_required_section(cls, data: Any) -> Any:
        """Adds the section that the objective needs, with its defaults, so that the resolved copy shows it."""
        if isinstance(data, Mapping) and isinstance(data.get("objective"), Mapping):
            section = REQUIRED_SECTIONS.get(str(data["objective"].get("name")))
            if section is not None and data.get(section) is None:
                return {**data, section: {}}
        return data

    @property
    def engine_processes(self) -> int:
        """Number of worker processes for engines; by default one if generation is asynchronous, else none."""
        if self.engine.type == "server":
            return 0
        if self.engine.workers is not None:
            return self.engine.workers
        return 1 if self.trainer.max_lag else 0

    @property
    def has_engine_threads(self) -> bool:
        """Whether each engine has a separate thread; otherwise one engine generates in the trainer's thread."""
        if self.prefix is not None or self.demonstrations is not None:
            return False
        remote = self.engine.workers or self.engine.type == "server" or self.placement == "ray"
        return bool(self.trainer.max_lag or remote)

    def dump(self) -> str:
        """Returns the resolved recipe as TOML, which has no null: options that are None are left out."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
