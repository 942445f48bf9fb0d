"""Recipe sections on tasks, environments, engines, sampling and rewards."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from trimtab.trainer.config.base import (
    MAX_FLOAT,
    MAX_SECONDS,
    Count,
    Dtype,
    NotNegative,
    PluginSection,
    Positive,
    Processes,
    Seconds,
    Section,
    Whole,
)

GOLD = "gold"  # value of `demonstrations.path` for the task's own answers


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


class DemonstrationConfig(Section):
    """External traces in every group (LUFFY); needs an objective that trains tokens of no sampler."""

    path: str = Field(default=GOLD, description="JSONL file of prompt and response, or `gold`: the task's own answers")
    per_group: Count = Field(default=1, description="traces in a group; they count among `trainer.samples`")


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
