"""Builds the engines of a run from its recipe: embedded, vLLM, in worker processes, or clients of servers.

A worker process builds its engine from a specification in JSON (`engine_spec`) and a folder of model files.
The specification is one of

    {"type": "embedded", "model": folder, "dtype": "bfloat16", "quantization": {"bits": null, "noise": 0.0, "seed": 0},
     "routes": false unless given, "gates": likewise, "numerics": "native" unless given}
    {"type": "vllm", "model": folder, "engine": the [engine] section of a recipe}

The folder needs no weights (config, generation config and tokenizer are enough): they arrive by
`Engine.update_weights`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.config import Config, EngineConfig
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import BITS, WeightQuantization
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.trainer.engines.stopping import generation_config
from trimtab.trainer.models import invariant
from trimtab.trainer.models.load import LoadedModel, default_device
from trimtab.trainer.models.matmul import use_fast_linear
from trimtab.trainer.models.quiet import silence_transformers
from trimtab.trainer.seeds import derive
from trimtab.types import Engine


def build_engines(
    config: Config, loaded: LoadedModel, folder: Path, notify: Callable[[str], None] | None = None
) -> list[Engine]:
    """Returns the engines of a run. Each needs published weights before it generates.

    Worker processes start at once and load while the caller continues; the thread count of this process is reduced to
    its share.

    Args:
        loaded: the model that is trained.
        folder: its config, generation config and tokenizer; weights are not read.
        notify: called with a line of text while servers are waited for.

    Raises:
        TrimtabError: more GPUs are needed than there are.
    """
    if config.engine.type == "server":
        from trimtab.trainer.engines.server.server_engine import ServerEngine

        # One engine for all servers: unfinished requests of a lost server move to the others.
        return [ServerEngine(config.engine.server.urls, loaded.tokenizer, config.engine, folder, notify)]
    if count := config.engine_processes:
        return _workers(config, folder, count)
    if config.engine.type == "vllm":
        from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

        return [VllmEngine(folder, loaded.tokenizer, config.engine)]
    dtype, quantization = getattr(torch, config.engine.dtype), weight_quantization(config)
    recorded = {"routes": config.routing.of_engine, "gates": config.routing.gates}
    return [EmbeddedEngine(loaded.model, loaded.tokenizer, dtype=dtype, quantization=quantization, **recorded)]


def engine_spec(config: Config, folder: Path) -> dict[str, Any]:
    """Returns the engine of the recipe as `build_from_spec` takes it: JSON, for another process."""
    if config.engine.type == "vllm":
        return {"type": "vllm", "model": str(folder.absolute()), "engine": config.engine.model_dump(mode="json")}
    quantization = weight_quantization(config)
    return {
        "type": "embedded",
        "model": str(folder.absolute()),
        "dtype": config.engine.dtype,
        "quantization": {"bits": quantization.bits, "noise": quantization.noise, "seed": quantization.seed},
        "routes": config.routing.of_engine,
        "gates": config.routing.gates,
        "numerics": config.numerics,
    }


def build_from_spec(spec: Mapping[str, Any]) -> Engine:
    """Returns the engine that `spec` describes. Its weights are arbitrary until weights are published.

    Raises:
        TrimtabError: an unknown type, a folder that holds no model, or what the engine itself refuses.
    """
    builders = {"embedded": _embedded, "vllm": _vllm}
    if spec["type"] not in builders:
        raise TrimtabError(f"unknown type of engine {spec['type']!r}{did_you_mean(spec['type'], builders)}")
    folder = Path(spec["model"])
    if not (folder / "config.json").is_file():
        raise TrimtabError(f"model folder {str(folder)!r} has no config.json; give a folder written by save_pretrained")
    return builders[spec["type"]](spec, folder)


def _embedded(spec: Mapping[str, Any], folder: Path) -> Engine:
    with silence_transformers():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # Float32 whatever the engine's dtype: the engine casts the parameters itself and must get unrounded buffers.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        # It names the end-of-sequence ids.
        model.generation_config = generation_config(folder) or model.generation_config
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    use_fast_linear(model.base_model)
    if spec.get("numerics") == "invariant":
        invariant.make_invariant(model)
    model.to(default_device())
    quantization = WeightQuantization(**spec["quantization"])
    recorded = {name: spec.get(name, False) for name in ("routes", "gates")}
    return EmbeddedEngine(model.eval(), tokenizer, spec["dtype"], quantization=quantization, **recorded)


def _vllm(spec: Mapping[str, Any], folder: Path) -> Engine:
    from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return VllmEngine(folder, tokenizer, EngineConfig.model_validate(spec["engine"]))


def _workers(config: Config, folder: Path, count: int) -> list[Engine]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    each = config.engine.vllm.tensor_parallel if config.engine.type == "vllm" else 1
    devices = split_devices(visible.split(","), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), count, each)
    if config.threads:
        threads = config.threads
    else:
        trainer_threads, threads = split_threads(torch.get_num_threads(), count, is_async=bool(config.trainer.max_lag))
        torch.set_num_threads(trainer_threads)
    spec = engine_spec(config, folder)
    transports = [ProcessTransport(spec, threads=threads, devices=names) for names in devices]
    return [RemoteEngine(transport, hang_timeout=config.engine.hang_timeout) for transport in transports]


def split_threads(cores: int, workers: int, *, is_async: bool) -> tuple[int, int]:
    """Returns the number of threads of this process and of each worker.

    Shares are equal, and the remainder goes to this process. `is_async`: this process computes at the same time as the
    workers. More threads than cores slow all of them down: two processes of two threads on two cores reach a tenth of
    the throughput of one thread each.
    """
    if not is_async:
        return cores, max(1, cores // workers)
    each = max(1, cores // (workers + 1))
    return max(1, cores - workers * each), each


def split_devices(visible: Sequence[str], ranks: int, workers: int, each: int) -> list[str | None]:
    """Returns CUDA_VISIBLE_DEVICES of each worker: the GPUs after those of the trainer's ranks.

    A single GPU is shared by all; then, and without a GPU, every entry is None.

    Raises:
        TrimtabError: there are several GPUs, but too few.
    """
    gpus = [name for name in visible if name]
    if len(gpus) <= 1:
        return [None] * workers
    needed = ranks + workers * each
    if needed > len(gpus):
        raise TrimtabError(
            f"{ranks} trainer ranks and {workers} engines of {each} GPUs need {needed} GPUs, {len(gpus)} are visible: "
            "lower engine.workers or engine.vllm.tensor_parallel, or start fewer ranks"
        )
    starts = range(ranks, needed, each)
    return [",".join(gpus[start : start + each]) for start in starts]


def weight_quantization(config: Config) -> WeightQuantization:
    """Returns the quantization and noise that the recipe applies to the sampler's weights."""
    return WeightQuantization(BITS[config.engine.quantize], config.engine.noise, derive(config.seed, "rounding"))
