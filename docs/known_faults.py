"""Generates the page of known faults from the table; it is built with the site (docs/site.py)."""

from __future__ import annotations

from trimtab.diagnosis.known_faults import known_faults
from trimtab.diagnosis.records import CAUSES, KnownFault

HEAD = """# Known faults

Faults of engines and trainers that make trainer and sampler disagree, each from a public thread, by the name that
`trimtab diagnose` gives to the data of such a run ([causes.md](causes.md)). Under a cause it shows at most three of
them: `known` where the run's versions are affected, `may apply` where versions are not in the files, but trainer (or
engine) and model are those of the fault.
A thread is proof that somebody met the fault, not that you did.

Versions are those that a thread calls affected; "seen" is where it was observed. Trainers that are not named may have
the fault too. This page is generated from `src/trimtab/diagnosis/known_faults.toml`.
"""
COLUMNS = "| where | what happens | repair | source |\n|---|---|---|---|"


def row(fault: KnownFault) -> str:
    where = f"{fault.where}{f' (seen: {fault.seen})' if fault.seen else ''}"
    owner, name, _, number = fault.link.removeprefix("https://github.com/").split("/")
    return f"| {where} | {fault.symptom} | {fault.repair} | [{owner}/{name}#{number}]({fault.link}), {fault.date} |"


def markdown() -> str:
    """Returns the page, without the last line break."""
    parts = [HEAD.strip()]
    for name in CAUSES:
        rows = [row(fault) for fault in known_faults() if name in fault.causes]
        parts.append(f"## {name}\n\n" + ("\n".join([COLUMNS, *rows]) if rows else "None yet."))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(markdown())
