"""The sections of a recipe about engines, Ray, and routing replay."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimtab.trainer.config.section import (
    MAX_SECONDS,
    Count,
    Dtype,
    NotNegative,
    Positive,
    Processes,
    Seconds,
    Section,
    Whole,
)


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
    prompts: int = Field(
        default=4, ge=2, le=1024, description="every second one is new at every check, the others are fixed"
    )
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
        default=0.0,
        description="Gaussian noise on the sampler's weight matrices, relative to their RMS (embedded)",
    )
    vllm: VllmConfig = VllmConfig()
    server: ServerConfig = ServerConfig()
    canary: CanaryConfig = CanaryConfig()

    @property
    def context(self) -> int | None:
        """The longest sequence of the engine, None for the model's."""
        return self.vllm.context if self.type == "vllm" else None

    @property
    def changes_weights(self) -> bool:
        """Whether the sampler's weights are quantized or noisy."""
        return self.quantize != "none" or self.noise > 0


Placement = Literal["local", "ray"]


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
