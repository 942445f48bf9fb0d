"""Builds the pair that a command line or a recipe describes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.errors import TrimtabError
from trimtab.preflight.engine_pair import ATTENTION, FORWARDS, EnginePair, Trainer
from trimtab.runs.provenance import versions
from trimtab.trainer import tasks
from trimtab.trainer.build_model import build_model, prepare_model, save_model_files
from trimtab.trainer.config import Config, is_recipe, load_config
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.engines.stopping import eos_ids
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.types import Problem, Prompt, SamplingParams

PROMPTS = 64
TOP_LOGPROBS = 20
"""Ids whose log-probs vLLM and servers return by default at most."""
BOUNDS = {"invariant": 0.0, "float32": 1e-8, "16 bits": 1e-2, "quantized": 1e-1}
"""Largest k3 by numerics; the ranges of `metrics.toml`."""


def pair_config(
    model: str, sampler: str | None, dtype: str | None, urls: Sequence[str] | None, sets: Sequence[str]
) -> Config:
    chosen = [] if sampler is None else [f"engine.type={sampler}"]
    if dtype is not None:
        chosen += [f"engine.dtype={dtype}", f"model.autocast={'bfloat16' if dtype == 'bfloat16' else 'none'}"]
    if urls:
        chosen.append(f"engine.server.urls={json.dumps(list(urls))}")
    recipe: Any = model if is_recipe(model) else {"model": {"path": model}}
    config = load_config(recipe, [*chosen, *sets])
    if urls and config.engine.type != "server":
        raise TrimtabError(f"--url is where servers run, and the sampler is {config.engine.type}: add --sampler server")
    return config


def default_bound(config: Config, trainer: str) -> float:
    engine = config.engine
    if engine.changes_weights or engine.vllm.quantization or engine.vllm.kv_cache_dtype != "auto":
        return BOUNDS["quantized"]
    if config.numerics == "invariant" and engine.type == "embedded" and trainer == "trimtab":
        return BOUNDS["invariant"]
    return BOUNDS["float32" if {engine.dtype, _trainer_dtype(config)} == {"float32"} else "16 bits"]


def _trainer_dtype(config: Config) -> str:
    return config.model.dtype if config.model.autocast == "none" else config.model.autocast


def facts(config: Config, trainer: str) -> dict[str, str]:
    engine = config.engine
    quantized = "" if engine.quantize == "none" else f", {engine.quantize} weights"
    lora = f", LoRA rank {config.model.lora.rank}" if config.model.lora.rank else ""
    return {
        "model": config.model.path,
        "sampler": f"{engine.type}, {engine.dtype}{quantized}",
        "trainer": f"{trainer}, {_trainer_dtype(config)}{lora}",
        "numerics": config.numerics,
        "versions": ", ".join(f"{name} {version}" for name, version in versions(engine.type).items()),
    }


def build_pair(
    config: Config, trainer: str, file: Path | None, bound: float, folder: Path, notify: Callable[[str], None]
) -> EnginePair:
    """Loads the model and starts the engine.

    trainer: a key of `FORWARDS`. file: of prompts, one a line. folder: for the files from which an engine reads the
    model's config. notify: called with a line of text while servers are waited for.
    """
    if trainer == "transformers" and config.numerics == "invariant":
        raise TrimtabError('numerics = "invariant" is of the trimtab trainer: use --trainer trimtab')
    if config.threads:
        torch.set_num_threads(config.threads)
    loaded = build_model(config)
    save_model_files(loaded.model, loaded.tokenizer, folder / "model")
    engine = build_engines(config, loaded, folder / "model", notify)[0]
    model: Any = prepare_model(loaded.model, config)
    if trainer == "transformers":
        model.set_attn_implementation(ATTENTION)
    vocabulary = model.get_input_embeddings().num_embeddings
    limits = (getattr(model.config, "max_position_embeddings", None), config.engine.context)
    autocast = config.model.autocast == "bfloat16"
    pad_id: Any = loaded.tokenizer.pad_token_id
    return EnginePair(
        engine=engine,
        trainer=Trainer(
            model,
            FORWARDS[trainer],
            pad_id,
            vocabulary,
            lambda: torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=autocast),
        ),
        tokenizer=loaded.tokenizer,
        prompts=_prompts(config, loaded.tokenizer, file),
        sampling=SamplingParams(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k),
        context=min((limit for limit in limits if limit), default=None),
        bound=bound,
        top_logprobs={"embedded": vocabulary, "vllm": TOP_LOGPROBS, "server": 0}[config.engine.type],
        stop_ids=eos_ids(loaded.tokenizer, model.config, loaded.model.generation_config),
        lora=bool(config.model.lora.rank),
        weights_in_use=config.engine.type == "embedded" and not config.engine.changes_weights,
    )


def _prompts(config: Config, tokenizer: Any, file: Path | None) -> Sequence[Prompt]:
    """Returns `PROMPTS` prompts: those of the recipe's task, or the lines of a file, repeated as often as needed."""
    if file is None:
        stream = PromptStream(tasks.build(config.task.name, **config.task.keywords), tokenizer, config.seed)
        return stream.at(0, PROMPTS)
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TrimtabError(f"--prompts {file} cannot be read: {error}") from None
    if not lines:
        raise TrimtabError(f"--prompts {file} has no line with text: write a prompt into each line")
    # A template writes the special tokens that a prompt needs; the tokenizer would add a second one.
    texts = itertools.islice(itertools.cycle(lines), PROMPTS)
    ids = [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64) for text in texts]
    return [Prompt(Problem(f"line {number % len(lines) + 1}", "", ""), "", row) for number, row in enumerate(ids)]
