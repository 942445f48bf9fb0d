"""A short supervised warm start on the gold answers of a task."""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from trimtab.errors import TrimtabError
from trimtab.files import new_folder, readable_errors
from trimtab.trainer import tasks
from trimtab.trainer.config import Config, OptimConfig, load_config
from trimtab.trainer.memory import choose_micro_batch_tokens
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.bundled import cache_root
from trimtab.trainer.models.load import LoadedModel, default_device, load, silence_transformers
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.observer import NullObserver, Observer
from trimtab.trainer.optim import build_optimizer, learning_rate, repeatable
from trimtab.trainer.packing import micro_batches, to_tensors
from trimtab.trainer.rollout.demonstrations import encode_demonstration
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.types import SamplingParams, Task, Trajectory

CACHE_FORMAT = 1
"""Increase it with every change of the code that trains other weights from the same recipe."""


def supervised_warm_start(config: Config, *, out: Path, observer: Observer | None = None) -> dict[str, Any]:
    """Trains on gold answers for `sft.steps` steps and writes the model to `out`, which must not exist yet.

    Returns the last step's metrics: the loss in nats per token and, with `sft.until`, the saved model's probability of
    a gold answer (mean over one batch). Raises `TrimtabError` if that probability has not reached `sft.until`.
    """
    observer = observer or NullObserver()
    with readable_errors(out):
        if out.exists() and any(out.iterdir()):
            raise TrimtabError(f"{out} is not empty: choose another --out")
    if config.threads:
        torch.set_num_threads(config.threads)
    task = tasks.build(config.task.name, **config.task.keywords)
    loaded = load(config.model.path, dtype=getattr(torch, config.model.dtype), seed=config.sft.seed or 0)
    observer.started(config, "loss = mean over gold tokens of -log π", config.sft.steps, out)
    with repeatable(default_device()):
        metrics = _fit(config, task, loaded, observer)
    with new_folder(out) as temporary, silence_transformers():
        loaded.model.save_pretrained(temporary)
        loaded.tokenizer.save_pretrained(temporary)
    observer.finished(metrics, None)
    return metrics


def laboratory_folder(name: str = laboratory.NAME, run: Config | None = None) -> Path:
    """Returns the folder of a warm-started laboratory model; the first call trains it, in seconds or two minutes.

    The folder name has a digest of the recipe and Trimtab's version. `run` sets `[sft]` and, if the model's characters
    can write it, the task. Runs that differ only in their seed share one model, unless `sft.seed` is given.
    """
    has_recipe = name in (laboratory.TOOLS, laboratory.LONG)
    config = load_config(name if has_recipe else laboratory.NAME, [f"model.path={name}"])
    if run is not None:
        task = run.task if run.task.name in (config.task.name, "mixture") else config.task
        config = config.model_copy(update={"task": task, "sft": run.sft})
    recipe = config.model_dump_json(include={"seed", "model", "task", "sft", "threads"})
    key = sha256(f"{version('trimtab')} {CACHE_FORMAT} {recipe}".encode()).hexdigest()[:12]
    folder = cache_root() / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            supervised_warm_start(config, out=folder)
    return folder


def _fit(config: Config, task: Task, loaded: LoadedModel, observer: Observer) -> dict[str, Any]:
    """Trains the model in place and returns the metrics of the last step."""
    model, sft, device = loaded.model.train(), config.sft, default_device()
    model.to(device)  # pyright: ignore[reportArgumentType]
    optim = OptimConfig(lr=sft.lr, warmup=sft.warmup)
    optimizer, budget = build_optimizer(model.parameters(), optim), 0
    stream = PromptStream(task, loaded.tokenizer, config.seed if sft.seed is None else sft.seed)
    metrics: dict[str, Any] = {}
    for step in range(sft.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(optim, step, sft.steps)
        rows = _gold_rows(loaded.tokenizer, stream, step * sft.batch, sft.batch)
        if step == 0:
            prompt, response = max(len(row.prompt.ids) for row in rows), max(map(len, rows))
            budget = choose_micro_batch_tokens(config, model, device, prompt=prompt, response=response)
        parts = micro_batches(rows, [[index] for index in range(len(rows))], budget)
        micros = [to_tensors(rows, chosen, stream.pad_id, device) for chosen in parts]
        tokens = sum(int(micro.mask.sum()) for micro in micros)
        loss = probability = 0.0
        for micro in micros:
            logp = score(model, micro.tokens).logp
            part = -logp.sum() / tokens
            part.backward()
            loss += float(part.detach())
            probability += float(logp.detach().sum(-1).exp().sum()) / sft.batch
        metrics = {"step": step + 1, "sft/loss": loss}
        if sft.until is not None:
            metrics["sft/gold_probability"] = probability
            if probability >= sft.until:  # the probability before this batch's update, which is skipped
                observer.step(metrics)
                return metrics
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip))
        if not (np.isfinite(loss) and np.isfinite(norm)):
            raise TrimtabError(f"sft step {step + 1}: the loss is {loss}, the gradient norm {norm}; lower sft.lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        observer.step(metrics)
    if sft.until is not None:
        raise TrimtabError(
            f"gold answers have probability {metrics['sft/gold_probability']:.3g} after {sft.steps} steps of warm "
            f"start, sft.until asks for {sft.until}: raise sft.steps or change sft.lr"
        )
    return metrics


def _gold_rows(tokenizer: Any, stream: PromptStream, position: int, count: int) -> list[Trajectory]:
    rows, sampling = [], SamplingParams(stop=stream.task.stop)
    for group, prompt in enumerate(stream.at(position, count)):
        completion = encode_demonstration(stream.task.gold(prompt.problem), tokenizer, sampling)
        mask = np.ones(len(completion.response_ids), dtype=np.bool_)
        rows.append(Trajectory(prompt, group, completion, sampling, mask, reward=1.0, rewards={}, off_policy=True))
    return rows
