"""Loads a policy: a Hugging Face id, a local folder, the bundled model, or a laboratory model.

Only safetensors are read and no code from a model's repository is run. Every parameter must be in the files:
transformers would initialize missing ones at random and only log it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from logging import CRITICAL
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from trimtab.errors import TrimtabError, first_line, neighbors
from trimtab.files import parse_json
from trimtab.trainer.models import bundled, laboratory
from trimtab.trainer.models.architecture import check_architecture
from trimtab.trainer.models.matmul import use_fast_linear
from trimtab.trainer.models.packed_attention import PACKED_IMPLEMENTATION

BUNDLED = bundled.NAME
# Files that a tokenizer may be loaded from.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
INDEX = "model.safetensors.index.json"
MAX_TOKEN_ID = 1 << 24
"""Largest id of a token. The tokenizers library writes a vocabulary by counting from 0 to its largest id."""


class LoadedModel(NamedTuple):
    """A policy ready to score and to train."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def default_device() -> torch.device:
    """Returns the first CUDA device, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(path: str, *, dtype: torch.dtype, weights: bool = True, seed: int = 0) -> LoadedModel:
    """Loads a causal language model with its tokenizer, in evaluation mode, on the CPU.

    `path` is the bundled model's name (`BUNDLED`), one of the laboratory models (untrained, their weights drawn from
    `seed`), a local folder, or an HF id. `dtype` is for the master weights, whatever the files have. Dropout is
    disabled: a log-prob that changes between two forwards makes every importance ratio wrong. The tokenizer has a
    padding token of the vocabulary (its own, or else end of text, or else unknown); the embedding is never resized.
    Without `weights` the model is empty (on the meta device), for a rank that receives them from another rank.
    """
    if path in laboratory.NAMES:
        with nullcontext() if weights else torch.device("meta"):
            model, tokenizer = laboratory.build(seed, path)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        use_fast_linear(model.base_model)
        return LoadedModel(model, tokenizer)
    local = _local(path)
    if local.is_dir():
        return _from_folder(str(local), path, dtype, weights)
    if local.is_file():
        raise TrimtabError(f"model {path!r} is a file; give the folder that holds config.json and *.safetensors")
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise TrimtabError(f"model folder {path!r} does not exist{neighbors(local)}")
    return _from_folder(path, path, dtype, weights)


def load_plain(path: str) -> PreTrainedModel:
    """Loads a causal language model of any architecture that transformers knows, in float32 and with its own attention.

    `path` is the bundled model's name, a local folder, or an HF id. Raises `TrimtabError` if it is missing or broken.
    """
    local = _local(path)
    with _readable_errors(path), silence_transformers():
        _check_index(local)
        model, info = _load_weights(str(local), torch.float32, attn_implementation="sdpa")
    _check_complete(info, path)
    return model.eval()


def check_same_ids(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str) -> None:
    """Raises `TrimtabError` if `other`, of the model `name`, has another id than `tokenizer` for one of its tokens."""
    theirs = other.get_vocab()
    if wrong := next((token for token, id_ in tokenizer.get_vocab().items() if theirs.get(token) != id_), None):
        raise TrimtabError(
            f"{name} has another id for the token {wrong!r} than the trained model, whose ids it scores: use a model "
            "with the same tokenizer"
        )


def _local(path: str) -> Path:
    """Returns the folder of a model's files, if it is one; the bundled model is converted first if necessary."""
    with silence_transformers():
        return bundled.folder() if path == BUNDLED else Path(path).expanduser()


def _from_folder(source: str, name: str, dtype: torch.dtype, weights: bool) -> LoadedModel:
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise TrimtabError(f"model folder {name!r} has no config.json; give a folder written by save_pretrained")
    with _readable_errors(name), silence_transformers():
        _check_index(Path(source))
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    check_architecture(config.model_type, f"model {name!r}: ")
    for key, value in list(vars(config).items()):
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    with _readable_errors(name), silence_transformers():
        tokenizer = _tokenizer(source, name)
        attention = {"attn_implementation": PACKED_IMPLEMENTATION}
        if weights:  # parameters of a wrong shape are refused below, by name
            model, info = _load_weights(source, dtype, config=config, ignore_mismatched_sizes=True, **attention)
        else:
            info = {"missing_keys": (), "mismatched_keys": ()}
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **attention)
    _check_complete(info, name)
    _ensure_padding_token(tokenizer, model, name)
    use_fast_linear(model.base_model)
    return LoadedModel(model.eval(), tokenizer)


def _check_complete(info: Mapping[str, Any], name: str) -> None:
    """Raises `TrimtabError` if transformers' report `info` lists parameters that are not in the files."""
    absent = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if absent:
        raise TrimtabError(
            f"model {name!r}: {len(absent)} parameters are missing or misshapen in its files, first {absent[0]!r}; "
            "get a complete checkpoint of a causal language model"
        )


def _check_index(folder: Path) -> None:
    """Raises `ValueError` for a weight index that names a file outside of the folder."""
    files = _mapping(folder / INDEX, "weight_map").values() if (folder / INDEX).is_file() else ()
    for file in files:
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{INDEX} names {file!r}, which is not a file in this folder")


def _check_token_ids(file: Path) -> None:
    """Raises `ValueError` for a tokenizer.json with an id above `MAX_TOKEN_ID`."""
    vocabulary = _mapping(file, "model").get("vocab") if file.is_file() else None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    largest = max((id_ for id_ in ids if isinstance(id_, int)), default=0)
    if largest > MAX_TOKEN_ID:
        raise ValueError(f"{file.name} has the id {largest}, above {MAX_TOKEN_ID}")


def _mapping(file: Path, key: str) -> dict[str, Any]:
    """Returns the object at `key` of a JSON file; empty if there is none."""
    data = parse_json(file.read_bytes())
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, dict) else {}


def _tokenizer(source: str, name: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer. Raises `TrimtabError` for a folder without one; errors of the hub are not handled here."""
    try:
        _check_token_ids(Path(source) / TOKENIZERS[0])
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # for a damaged file, the tokenizers library raises Exception itself
        if not Path(source).is_dir():
            raise
        if not any((Path(source) / file).exists() for file in TOKENIZERS):
            raise TrimtabError(
                f"model folder {name!r} has no tokenizer ({TOKENIZERS[0]} is missing): save the model's own there "
                "with tokenizer.save_pretrained(folder)"
            ) from None
        raise TrimtabError(f"model folder {name!r}: its tokenizer cannot be loaded: {first_line(error)}") from error


def _load_weights(source: str, dtype: torch.dtype, **options: Any) -> Any:
    """Returns the model and transformers' report on its parameters."""
    options |= {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Disables transformers' progress bars and reports inside, because they would corrupt a live display.

    The content of the reports (missing or misshapen parameters) is checked by the caller and raised as an error.
    """
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = first_line(error)
        if Path(name).expanduser().is_dir() or name == BUNDLED:
            raise TrimtabError(f"model {name!r} cannot be loaded: {reason.rstrip(' :')}") from error
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") or "offline" in str(error)
        hint = "the hub is switched off (HF_HUB_OFFLINE)" if offline else f"from the hub: {reason}"
        raise TrimtabError(
            f"model {name!r} cannot be loaded: no such folder{neighbors(Path(name))}, and {hint}; "
            f"give a local folder, a reachable HF id, or the bundled {BUNDLED!r}"
        ) from error


def _ensure_padding_token(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Sets a padding token. The choice has no effect (masks exclude it), but its id must be in the embedding."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    embedding: Any = model.get_input_embeddings()
    index: Any = tokenizer.pad_token_id
    if index is None:
        raise TrimtabError(f"tokenizer of {name!r} has no padding, end-of-text or unknown token; set pad_token in it")
    if index >= len(embedding.weight):
        raise TrimtabError(
            f"padding token {tokenizer.pad_token!r} of {name!r} has id {index}, outside the embedding of "
            f"{len(embedding.weight)} rows; set pad_token to a token of the vocabulary"
        )
