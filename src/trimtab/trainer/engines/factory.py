"""Builds the engines of a run from its recipe: embedded, vLLM, in worker processes, or clients of servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import weight_quantization
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.trainer.engines.stopping import generation_config
from trimtab.trainer.models import invariant
from trimtab.trainer.models.load import LoadedModel, default_device, silence_transformers
from trimtab.trainer.models.matmul import use_fast_linear
from trimtab.types import Engine


def build_engines(
    config: Config, loaded: LoadedModel, folder: Path, notify: Callable[[str], None] | None = None
) -> list[Engine]:
    """Returns the engines of a run. Each needs published weights before it generates.

    Worker processes start at once and load while the caller continues; the number of threads of this process is reduced
    to its share.

    loaded: the model that is trained. folder: its config, generation config and tokenizer; weights are not read.
    notify: called with a line of text while this process waits for servers.
    """
    if config.engine.type == "server":
        from trimtab.trainer.engines.server.server_engine import ServerEngine

        # One engine for all servers: unfinished requests of a lost server move to the others.
        return [ServerEngine(config.engine.server.urls, loaded.tokenizer, config.engine, folder, notify)]
    if count := config.engine_processes:
        return _workers(config, folder, count)
    return [build_engine(config, folder, loaded)]


def build_engine(config: Config, folder: Path, loaded: LoadedModel | None = None) -> Engine:
    """Returns the embedded or the vLLM engine of a recipe, in this process.

    folder: config, generation config and tokenizer of the model. loaded: the model that is trained, or None if it is in
    another process. With None, the weights of the engine are arbitrary until the first update.
    """
    if config.engine.type == "vllm":
        from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

        tokenizer = _tokenizer(folder) if loaded is None else loaded.tokenizer
        return VllmEngine(folder, tokenizer, config.engine)
    model, tokenizer = loaded or _without_weights(config, folder)
    dtype, routes = getattr(torch, config.engine.dtype), config.routing.replay == "rollout"
    return EmbeddedEngine(model, tokenizer, dtype, quantization=weight_quantization(config), routes=routes)


def _without_weights(config: Config, folder: Path) -> LoadedModel:
    with silence_transformers():
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # Float32 whatever the engine's dtype: the engine casts the parameters itself and must get unrounded buffers.
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, trust_remote_code=False)
        # The generation config names the end-of-sequence ids.
        model.generation_config = generation_config(folder) or model.generation_config
        tokenizer = _tokenizer(folder)
    use_fast_linear(model.base_model)
    if config.numerics == "invariant":
        invariant.make_invariant(model)
    return LoadedModel(model.to(default_device()).eval(), tokenizer)


def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _workers(config: Config, folder: Path, count: int) -> list[Engine]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    each = config.engine.vllm.tensor_parallel if config.engine.type == "vllm" else 1
    devices = split_devices(visible.split(","), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), count, each)
    if config.threads:
        threads = config.threads
    else:
        trainer_threads, threads = split_threads(torch.get_num_threads(), count, is_async=bool(config.trainer.max_lag))
        torch.set_num_threads(trainer_threads)
    transports = [ProcessTransport(config, folder, threads=threads, devices=names) for names in devices]
    return [RemoteEngine(transport, hang_timeout=config.engine.hang_timeout) for transport in transports]


def split_threads(cores: int, workers: int, *, is_async: bool) -> tuple[int, int]:
    """Returns the number of threads of this process and of each worker.

    If `is_async`, this process computes while the workers do: all get equal shares, and this process the remainder.
    Otherwise the workers share all cores. More threads than cores slow all processes down: on two cores, two processes
    with two threads each reach a tenth of the throughput of two processes with one thread each.
    """
    if not is_async:
        return cores, max(1, cores // workers)
    each = max(1, cores // (workers + 1))
    return max(1, cores - workers * each), each


def split_devices(visible: Sequence[str], ranks: int, workers: int, each: int) -> list[str | None]:
    """Returns CUDA_VISIBLE_DEVICES for each worker: the GPUs that follow the GPUs of the trainer's ranks.

    Every entry is None if there is no GPU, or a single GPU, which all processes share.
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
