"""Exports a model of a run as a Hugging Face folder, or its LoRA adapter as a peft folder."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trimtab.errors import TrimtabError, did_you_mean, neighbors
from trimtab.files import new_folder
from trimtab.runs.layout import CHECKPOINTS, CONFIG, MODEL, best_checkpoint, checkpoint_folder, list_checkpoints
from trimtab.trainer.build_model import empty_model
from trimtab.trainer.checkpoint import state_tensors, store
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.models.load import silence_transformers
from trimtab.trainer.models.sharding import named_weights


def restore(run: Path, which: str = "last") -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """Returns model (master dtype, adapters merged, evaluation mode), tokenizer and step of a checkpoint.

    `which` is `last` (the newest intact checkpoint), `best` (by `eval.best`) or a name like `step-000010`.
    Raises `TrimtabError` if the run, the checkpoint or a part of it is missing.
    """
    config, checkpoint = _load_run(run, which)
    files, weights = run / MODEL, checkpoint.tensors["model"]
    model = empty_model(files, config)
    if config.model.lora.rank:
        untied = state_tensors.model_state(model)  # has each tied weight once
        adapted = _with_adapters(files, config, weights)
        weights = {name: weight for name, weight in named_weights(adapted) if name in untied}
    state_tensors.load_model_state(model, weights)
    return model.eval(), AutoTokenizer.from_pretrained(files, trust_remote_code=False), checkpoint.step


def _load_run(run: Path, which: str) -> tuple[Config, store.LoadedCheckpoint]:
    if not (run / CONFIG).is_file():
        raise TrimtabError(f"{run} holds no run ({CONFIG} is missing): check the path{neighbors(run)}")
    if not (run / MODEL / "config.json").is_file():
        raise TrimtabError(f"{run} has no {MODEL}/config.json: the run stopped before its first step")
    return load_config(run / CONFIG), _checkpoint(run, which)


def _with_adapters(files: Path, config: Config, weights: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    adapted = empty_model(files, config, adapters=True)
    state_tensors.load_model_state(adapted, weights)
    return adapted


def export_adapter(run: Path, dest: Path, which: str = "last") -> Path:
    """Writes the LoRA adapter of a checkpoint to the new folder `dest`, as peft loads it, and returns it.

    Raises `TrimtabError` if the run trained every weight.
    """
    if dest.exists():
        raise TrimtabError(f"{dest} already exists: choose another folder")
    config, checkpoint = _load_run(run, which)
    if not config.model.lora.rank:
        raise TrimtabError(f"{run} trained every weight (model.lora.rank = 0): export it without --adapter")
    adapted = _with_adapters(run / MODEL, config, checkpoint.tensors["model"])
    with new_folder(dest) as temporary:
        _save_adapter(adapted, temporary, config.model.path)
    return dest


def _save_adapter(model: Any, folder: Path, base: str) -> None:
    """Writes the adapters of `add_lora` in peft's format. `base`: name of the model that they were trained on."""
    config = copy.copy(model.peft_config["default"])
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    config.save_pretrained(folder)
    weights = {
        f"base_model.model.{name.replace('.default', '')}": weight.contiguous()
        for name, weight in model.state_dict().items()
        if ".lora_" in name
    }
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


def export(run: Path, dest: Path, which: str = "last") -> Path:
    """Writes `restore(run, which)` to the new folder `dest` and returns it; no partial folder is left on failure."""
    if dest.exists():
        raise TrimtabError(f"{dest} already exists: choose another folder")
    model, _, _ = restore(run, which)
    with new_folder(dest) as temporary, silence_transformers():
        model.save_pretrained(temporary)
        # Except config.json: save_pretrained wrote it with the dtype of the exported weights.
        shutil.copytree(run / MODEL, temporary, ignore=shutil.ignore_patterns("config.json"), dirs_exist_ok=True)
    return dest


def _checkpoint(run: Path, which: str) -> store.LoadedCheckpoint:
    root = run / CHECKPOINTS
    if which == "last":
        if checkpoint := store.latest(root, ["model"]):
            return checkpoint
        raise TrimtabError(f"{run} has no checkpoint yet: set checkpoint.every, or let the run finish")
    if which.startswith("step-"):
        saved = [folder.name for folder in list_checkpoints(root)]
        if which not in saved:
            there = f"choose one of {', '.join(saved)}" if saved else "set checkpoint.every, or let the run finish"
            raise TrimtabError(f"{run} has no checkpoint {which!r}: {there}")
        return store.load(root / which, ["model"])
    if which != "best":
        raise TrimtabError(f"unknown checkpoint {which!r}{did_you_mean(which, ['best', 'last', 'step-000010'])}")
    marked = best_checkpoint(root)
    if marked is None:
        raise TrimtabError(f"{run} has no best checkpoint: set eval.best to a metric, or ask for the last one")
    return store.load(checkpoint_folder(root, marked.step), ["model"])
