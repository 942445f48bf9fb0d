"""A whole recipe, `Config`, and its sections on evaluation, files, Ray and comparisons. Does not import torch.

`[objective]`, `[task]` and `[[reward]]` name a part and contain its keywords. The part checks them when it is built,
before a model is loaded. In other sections, an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import tomli_w
from pydantic import Field, field_validator, model_validator

from trimtab.trainer.config import rollout_sections as rollout
from trimtab.trainer.config import training_sections as training
from trimtab.trainer.config.base import Count, NotNegative, Placement, PluginSection, Processes, Seconds, Section, Whole

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


class DiagnoseConfig(Section):
    """Measurements of the mismatch that cost an additional forward pass."""

    every: Count = Field(
        default=10, description="steps between measurements: update/policy_kl, clean probes of a perturbed policy"
    )


class CheckpointConfig(Section):
    """Checkpoints to resume from: weights and optimizer state, 12 bytes for each trained parameter in float32."""

    every: Whole = Field(default=0, description="steps between checkpoints; 0: only at the end")
    keep: Count = Field(default=2, description="newest checkpoints that stay on the disk; the best one does too")


class LogConfig(Section):
    """What a run writes in addition to metrics.jsonl."""

    trajectories_every: Whole = Field(default=1, description="steps between trajectory files; 0: none")
    tensorboard: bool = Field(default=False, description="event files in the run directory (extra `tensorboard`)")
    wandb: str | None = Field(default=None, description="W&B project (extra `wandb`)")


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
    model: training.ModelConfig = training.ModelConfig()
    task: rollout.TaskConfig = rollout.TaskConfig()
    environment: rollout.EnvironmentConfig | None = None
    reward: list[rollout.RewardConfig] = Field(default_factory=list, description="default: the task's own reward")
    objective: training.ObjectiveConfig = training.ObjectiveConfig()
    advantage: training.AdvantageConfig = training.AdvantageConfig()
    perturbation: training.PerturbationConfig | None = None
    prefix: rollout.PrefixConfig | None = None
    demonstrations: rollout.DemonstrationConfig | None = None
    engine: rollout.EngineConfig = rollout.EngineConfig()
    routing: training.RoutingConfig = training.RoutingConfig()
    sampling: rollout.SamplingConfig = rollout.SamplingConfig()
    optim: training.OptimConfig = training.OptimConfig()
    trainer: training.TrainerConfig = training.TrainerConfig()
    guard: training.GuardConfig = training.GuardConfig()
    eval: EvalConfig = EvalConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    sft: training.SftConfig = training.SftConfig()
    sharding: training.ShardingConfig = training.ShardingConfig()
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
