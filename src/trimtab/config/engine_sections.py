"""The sections of a recipe about engines, Ray, and replayed expert choices."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field, model_validator

from trimtab.config.section import TIME, Count, Dtype, NotNegative, Positive, Processes, Seconds, Section, Whole


class VllmConfig(Section):
    """What only vLLM understands (engine.type = "vllm")."""

    memory: Positive = Field(default=0.5, description="KV cache: share of the device's memory on a GPU, GiB on a CPU")
    context: Count | None = Field(default=None, description="longest sequence; default: the model's own")
    eager: bool = Field(default=True, description="no compilation and no CUDA graphs: starts in seconds")
    tensor_parallel: Processes = Field(default=1, description="devices one copy of the model is split over")
    quantization: str | None = Field(default=None, description="vLLM's name of a quantization of the weights")
    kv_cache_dtype: str = Field(default="auto", description="vLLM's name of the cache's type; auto: that of the engine")
    keep_sets: bool = Field(
        default=False, description="return the set each token was drawn from, which top_k (and top_p with it) needs"
    )


class ServerConfig(Section):
    """Inference servers that run beside the trainer (engine.type = "server")."""

    urls: list[str] = Field(default_factory=list, description="base URLs, e.g. http://127.0.0.1:8000; work is shared")
    kind: Literal["vllm", "sglang"] = Field(default="vllm", description="whose wire format and weight routes")
    model: str | None = Field(
        default=None, description="the name they serve the model under (vllm); default: what they serve first"
    )
    timeout: Seconds = Field(default=600.0, description="seconds one request may take")
    patience: Seconds = Field(default=120.0, description="seconds to wait for a server to come back")
    concurrency: int = Field(default=64, ge=1, le=65536, description="requests in flight at one server")
    folder: str | None = Field(
        default=None, description="where weights are handed over, seen by trainer and servers; default: /dev/shm"
    )

    @model_validator(mode="after")
    def _nothing_idle(self) -> ServerConfig:
        if self.model is not None and self.kind != "vllm":
            raise ValueError(
                f"model has no effect with kind = {self.kind!r}, whose servers have one model: leave it out"
            )
        twice = [url for url, count in Counter(url.rstrip("/") for url in self.urls).items() if count > 1]
        if twice:
            raise ValueError(f"urls names {twice[0]} twice: name each server once and raise concurrency")
        return self


class CanaryConfig(Section):
    """A few fixed prompts, sampled by the engine and scored by the trainer after every publication of weights."""

    every: Whole | None = Field(
        default=None, description="publications between looks; 0: never; default: 1, for embedded engines 0"
    )
    prompts: int = Field(
        default=4, ge=2, le=1024, description="every second one is new at every look, the others are not"
    )
    tokens: Count = Field(default=16, description="contexts to each prompt, at its end")
    bound: Positive | None = Field(
        default=None, description="largest mean |log-prob difference|; default: 3x that of the first look"
    )


class EngineConfig(Section):
    """The sampler: what writes the responses."""

    type: Literal["embedded", "vllm", "server"] = Field(
        default="embedded",
        description="`embedded`: transformers in this process; `vllm`: vLLM; `server`: inference servers over HTTP",
    )
    dtype: Dtype = Field(default="bfloat16", description="type of the sampler's weights and activations")
    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="engines in processes of their own (embedded, vllm); default: 1 where max_lag is above 0, else 0",
    )
    patience: float = Field(
        default=900.0,
        ge=3,
        le=TIME,
        description="seconds without a sign of life after which an engine's process is ended and started again; more "
        "than its longest prefill",
    )
    quantize: Literal["none", "int8", "int4", "int3"] = Field(
        default="none", description="rounding of the sampler's weight matrices, one scale a row (embedded)"
    )
    noise: NotNegative = Field(
        default=0.0,
        description="Gaussian noise on the sampler's weight matrices, relative to their RMS (embedded)",
    )
    vllm: VllmConfig = VllmConfig()
    server: ServerConfig = ServerConfig()
    canary: CanaryConfig = CanaryConfig()

    @model_validator(mode="after")
    def _nothing_idle(self) -> EngineConfig:
        parts: dict[str, tuple[Any, Any]] = {"vllm": (self.vllm, VllmConfig()), "server": (self.server, ServerConfig())}
        for name, (given, default) in parts.items():
            if self.type != name and given != default:
                raise ValueError(f'{name} has no effect with type = {self.type!r}: leave it out or set type = "{name}"')
        if self.type == "server" and not self.server.urls:
            raise ValueError('server.urls is empty: name at least one server, e.g. ["http://127.0.0.1:8000"]')
        return self


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


class RoutingConfig(Section):
    """Routing replay (METHODS 8.1). Only the choice is replayed: gates come from the scores of the pass itself."""

    replay: Literal["none", "proximal", "rollout"] = Field(
        default="none",
        description="`proximal`: experts of the proximal pass, replayed in the update (R2); `rollout`: experts the "
        "engine used, replayed in every pass of the trained policy (R3)",
    )
