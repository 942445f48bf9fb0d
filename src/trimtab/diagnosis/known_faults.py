"""Faults of engines and trainers that were reported in public (known_faults.toml), and which of them fit the data."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet

from trimtab.diagnosis.reading.layouts import LAYOUTS
from trimtab.diagnosis.records import DataSummary, KnownFault, read_table


@cache
def known_faults() -> tuple[KnownFault, ...]:
    """Returns the rows of known_faults.toml, in its order."""
    lists = ("causes", "trainers")
    rows = read_table("known_faults.toml")["fault"]
    return tuple(KnownFault(**row | {name: tuple(row.get(name, ())) for name in lists}) for row in rows)


def find_matches(cause: str, data: DataSummary) -> list[KnownFault]:
    """Returns the faults that may be behind a cause: faults of the data's versions first, then of the same trainer.

    A fault is left out if the data is from another trainer or engine, or from versions that are not affected. If the
    versions cannot be compared, the data must be known to come from the fault's trainer and models.
    """
    # Hooks in other trainers write this package's columns too, but no recipe: without one, the trainer is unknown.
    trainer = "" if data.framework in ("trimtab", "columns") and data.numerics is None else data.framework
    layout = LAYOUTS.get(data.framework)
    engine = data.engine or (layout.engine if layout else "")
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
