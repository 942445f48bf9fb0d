"""What a reader of an issue needs besides the figures: versions, the command, the sampler's settings in the files."""

from __future__ import annotations

import importlib.metadata
import platform

import numpy as np

from trimtab.diagnosis.records import Diagnosis
from trimtab.diagnosis.tokens import TokenTable

PACKAGES = ("trimtab", "torch", "numpy", "pyarrow")


def issue_facts(diagnosis: Diagnosis, command: str = "") -> list[tuple[str, str]]:
    """Returns names and values. `command`: the command line that made the page, if one did."""
    measured = diagnosis.measured
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    facts = [
        ("versions", f"{versions}, Python {platform.python_version()}"),
        ("platform", f"{platform.system()} {platform.machine()}"),
        ("data", f"{measured.origin.framework}, trainer's log-probs of the {measured.origin.anchor} policy"),
        ("sampling in the files", _sampling(measured.sample)),
        ("run's recipe beside the files", str(measured.origin.settings or "none")),
        ("versions beside the files", ", ".join(map(" ".join, measured.origin.versions.items())) or "none"),
    ]
    return [("command", command), *facts] if command else facts


def _sampling(sample: TokenTable) -> str:
    """Returns the sampler's settings, each with all values that occur in the sample of the data."""
    columns = {"temperature": sample.temperature, "top_p": sample.top_p, "top_k": sample.top_k}
    known = {name: np.unique(values[np.isfinite(values)]) for name, values in columns.items() if values is not None}
    parts = [
        f"{name} {' or '.join(f'{value:g}' for value in values[:4])}" for name, values in known.items() if len(values)
    ]
    if sample.raw is not None:
        parts.append("log-probs before temperature and truncation" if sample.raw.any() else "processed log-probs")
    return ", ".join(parts) or "not in the files"
