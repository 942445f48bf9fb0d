"""Faults of engines and trainers that were reported in public, matched with a cause and with what made the data."""

from __future__ import annotations

import importlib.resources
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet

from trimtab.diagnosis.records import DataSummary

ENGINES = {"miles": "sglang", "prime-rl": "vllm", "open-instruct": "vllm"}
"""The sampler of trainers that have one only."""


@dataclass(frozen=True, kw_only=True)
class KnownFault:
    """One row of `known_faults.toml`, matched with some data.

    certain: whether the versions of the data are known to be affected. causes: names of causes that it shows as.
    engine, trainers: empty for any. versions: affected ones according to the source, by package. seen: versions it was
    observed with. family: a regular expression for the names of the models it occurs in, in lower case; "" for any.
    link, date: the post that describes it.
    """

    certain: bool = False
    causes: tuple[str, ...]
    symptom: str
    repair: str
    link: str
    date: str
    engine: str = ""
    trainers: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seen: str = ""
    models: str = ""
    family: str = ""
    feature: str = ""

    @property
    def where(self) -> str:
        """The trainer, engine, versions, models and feature that it needs."""
        needed = [f"{name} {versions}" for name, versions in self.versions.items()]
        return ", ".join(filter(None, (*self.trainers, *(needed or [self.engine]), self.models, self.feature)))

    @property
    def text(self) -> str:
        """One sentence each on where it occurs, what it does and what repairs it, and the source."""
        word = "known" if self.certain else "may apply"
        return f"{word} ({self.where}): {self.symptom}. Repair: {self.repair} ({self.link})"


@cache
def known_faults() -> tuple[KnownFault, ...]:
    """Returns the rows of the table, in its order."""
    file = importlib.resources.files("trimtab.diagnosis") / "known_faults.toml"
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["fault"]
    lists = ("causes", "trainers")
    return tuple(KnownFault(**row | {name: tuple(row.get(name, ())) for name in lists}) for row in rows)


def matches(cause: str, data: DataSummary) -> list[KnownFault]:
    """Returns the faults that a cause may come from: those of known versions first, then those of the same trainer.

    A fault is left out where the data is of another trainer or engine, or of versions that are not affected. One whose
    versions are unknown is left out, too, where it is not known whether the data is of its trainer, or its models.
    """
    # The columns of this package are also written by hooks in other trainers, but not with the recipe of a run.
    trainer = "" if data.framework in ("trimtab", "columns") and data.settings is None else data.framework
    engine = data.engine or ENGINES.get(data.framework, "")
    model = Path(data.model).name.lower()
    found = []
    for fault in known_faults():
        of_other_trainer = bool(fault.trainers and trainer) and trainer not in fault.trainers
        of_other_engine = bool(fault.engine and engine) and engine != fault.engine
        affected = [
            SpecifierSet(versions).contains(data.versions[name], prereleases=True) if name in data.versions else None
            for name, versions in fault.versions.items()
        ]
        if cause not in fault.causes or of_other_trainer or of_other_engine or False in affected:
            continue
        is_certain = bool(affected) and None not in affected
        is_known = trainer in fault.trainers if fault.trainers else bool(trainer or engine)
        if is_certain or (is_known and re.search(fault.family, model)):
            found.append(replace(fault, certain=is_certain))
    return sorted(found, key=lambda row: (not row.certain, data.framework not in row.trainers, row.trainers != ()))
