"""The Ray section of a recipe (`placement = "ray"`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from trimtab.config.section import Count, NotNegative, Positive, Seconds, Section, Whole

Placement = Literal["local", "ray"]


class RayConfig(Section):
    """Actors on an existing Ray cluster. One placement group holds them all, with one bundle for each actor.

    CPUs and GPUs are what Ray counts, not what it enforces; an actor uses as many threads as it has whole CPUs.
    """

    address: str = Field(default="auto", description="the cluster: host:port, or `auto` for the one of this machine")
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="how Ray lays the actors over its nodes"
    )
    patience: Seconds = Field(default=300.0, description="seconds to wait for resources and for an actor to start")
    engines: Count = Field(default=1, description="actors that sample")
    engine_cpus: NotNegative = Field(default=1.0, description="of one engine")
    engine_gpus: NotNegative = Field(default=0.0, description="of one engine, on one node")
    trainers: Count = Field(default=1, description="ranks of the trainer; the model is sharded over them (FSDP2)")
    trainer_cpus: NotNegative = Field(default=1.0, description="of one rank")
    trainer_gpus: float = Field(default=0.0, ge=0, le=1, description="a rank uses one device at most")
    rewards: Whole = Field(default=0, description="actors that score; 0: the trainer's first rank scores")
    reward_cpus: Positive = Field(default=1.0, description="of one actor that scores")
    shard_mib: Count = Field(default=256, description="size of one object of a publication of weights")

    @model_validator(mode="after")
    def _something(self) -> RayConfig:
        for kind in ("engine", "trainer"):
            if not getattr(self, f"{kind}_cpus") and not getattr(self, f"{kind}_gpus"):
                raise ValueError(f"{kind}_cpus and {kind}_gpus are both 0: Ray cannot reserve nothing, set one")
        return self
