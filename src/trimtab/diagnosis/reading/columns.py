"""Assigns the columns of files to roles, and reports missing ones with a remedy: `resolve`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.diagnosis.reading.arrow_files import ArrowFile
from trimtab.diagnosis.reading.layouts import (
    LAYOUTS,
    LOGP_COLUMNS,
    ROLES,
    SAMPLING,
    TRAINER_COLUMNS,
    VERSIONS,
    Layout,
    layout_of_framework,
)
from trimtab.diagnosis.reading.row_files import RowFile
from trimtab.diagnosis.reading.torch_file import TorchFile
from trimtab.diagnosis.records import finding, read_table
from trimtab.errors import Finding, TrimtabError, did_you_mean

Table = ArrowFile | RowFile
"""A file of rows. `names` returns its columns; `batches` reads columns by role, about `tokens` tokens at a time."""
COSTS: Mapping[str, str] = read_table("texts.toml")["missing"]
"""What each column that files lack would allow."""
_MAX_LISTED = 12
_METRIC = re.compile(r"[^.]+/.+|_step|global_step|log_history|Wall time")
"""Names that loggers give to metrics, which have one number a step; below a structure they are a checkpoint's."""
_IDS = {name for layout in LAYOUTS.values() for name in layout.columns["response_ids"]}


@dataclass(frozen=True, eq=False)
class Resolved:
    """The layout and columns of the files."""

    framework: str
    layout: Layout
    columns: Mapping[str, str]  # column names by role, present in every file
    roles: frozenset[str]  # roles with a value for every response, from a column or otherwise
    anchor: str  # column of the trainer's log-probs: proximal or current
    missing: Mapping[str, str]  # absent columns, with the analysis that each would allow
    findings: tuple[Finding, ...]
    left_out: frozenset[Path] = frozenset()  # files without log-probs

    @property
    def assumes_current(self) -> bool:
        """Whether the files lack weight versions, but the trainer is synchronous, so that they can be assumed."""
        return bool(self.layout.synchronous) and "proximal_version" not in self.roles

    def step_in_name(self, path: Path) -> int | None:
        """Returns the step in the name of a file, if no column holds it."""
        by_name = "step" in self.roles and "step" not in self.columns
        found = re.search(self.layout.step_in_name, path.name) if by_name else None
        return int(found[1]) if found else None


def resolve(
    tables: Sequence[Table], framework: str | None, given: Mapping[str, str], *, found: frozenset[Path]
) -> Resolved:
    """Assigns columns to roles. Torch files have to be loaded for it, so only the first usable one is inspected.

    found: the files that were found in folders. Such a file is left out if it has no log-probs and another file has.
    """
    for role in given:
        if role not in ROLES:
            raise TrimtabError(f"--columns: no role {role!r}{did_you_mean(role, ROLES)}")
    torch_files = [table for table in tables if isinstance(table, TorchFile)]
    scanned = {table.path: table.names() for table in tables if not isinstance(table, TorchFile)}
    if scanned:
        logps = {*LOGP_COLUMNS, *given.values()}
        other = [path for path, names in scanned.items() if path in found and not names & logps]
        if not other or len(other) == len(scanned):
            return _resolve_names(scanned, framework, given)
        more = f" (nor do {len(other) - 1} more files)" if len(other) > 1 else ""
        left_out = finding("no-log-probs", file=other[0], more=more)
        rest = {path: names for path, names in scanned.items() if path not in other}
        resolved = _resolve_names(rest, framework, given)
        return replace(resolved, findings=(*resolved.findings, left_out), left_out=frozenset(other))
    # In Miles, a rank of an earlier pipeline stage has no trainer's log-probs; another file may have them.
    trainer = {*TRAINER_COLUMNS, given.get("logp_proximal"), given.get("logp_current")}
    for table in torch_files:
        if table.names() & trainer:
            break
        table.close()
    else:
        table = torch_files[0]
    return _resolve_names({table.path: table.names()}, framework, given)


def _resolve_names(scanned: Mapping[Path, frozenset[str]], framework: str | None, given: Mapping[str, str]) -> Resolved:
    filled = {path: names for path, names in scanned.items() if names}
    if not filled:
        raise TrimtabError(f"{next(iter(scanned))} holds no rows that can be read: nothing to diagnose")
    known = layout_of_framework(framework) if framework is not None else _detect_layout(filled)
    layout = known or LAYOUTS["trimtab"]
    if not given.keys().isdisjoint(VERSIONS):
        layout = replace(layout, synchronous="")
    columns, findings = _assign_columns(filled, layout, given)
    anchor = _find_anchor(filled, layout, columns)
    if layout.padded and not {"loss_mask", "padding_mask"} & columns.keys() and "loss_mask" not in given:
        raise _missing_column(filled, "loss_mask", layout, "which tells tokens from padding")
    absent = set(ROLES) - columns.keys() - given.keys()
    roles = set(columns)
    if layout.step_in_name and all(re.search(layout.step_in_name, path.name) for path in scanned):
        roles |= {"step"} & absent
    if layout.prompt_groups and "response_ids" in columns:
        roles |= {"group", "prompt"} & absent
    found = roles | ({"sampling"} if roles & set(SAMPLING) else set())
    return Resolved(
        framework=known.framework if known else "columns",
        layout=layout,
        columns=columns,
        roles=frozenset(roles),
        anchor=anchor,
        missing={role: cost for role, cost in COSTS.items() if role not in found},
        findings=tuple(findings),
    )


def _detect_layout(filled: Mapping[Path, frozenset[str]]) -> Layout | None:
    """Returns the first layout with a sign among the columns, or None; raises for files of different frameworks."""
    layouts = {
        path: next((layout for layout in LAYOUTS.values() if any(sign <= names for sign in layout.signs)), None)
        for path, names in filled.items()
    }
    frameworks = {layout.framework: path for path, layout in layouts.items() if layout}
    if len(frameworks) > 1:
        (framework, first), (other, second) = list(frameworks.items())[:2]
        raise TrimtabError(f"{first} is a file of {framework} and {second} one of {other}: diagnose them apart")
    return LAYOUTS[next(iter(frameworks))] if frameworks else None


def _assign_columns(
    filled: Mapping[Path, frozenset[str]], layout: Layout, given: Mapping[str, str]
) -> tuple[dict[str, str], list[Finding]]:
    """Returns column names by role that every file has, and a finding for each that only some files have."""
    columns, findings = {}, []
    for role in ROLES:
        name = given.get(role)
        if name:
            for path, names in filled.items():
                if name not in names:
                    raise TrimtabError(f"{path} has no column {name!r} for {role}; {_list_columns(names, [name])}")
            columns[role] = name
        elif name is None:
            for candidate in (*layout.columns.get(role, ()), *(name for name in VERSIONS if name == role)):
                if role in SAMPLING and candidate == columns.get("logp_behavior"):
                    continue  # `logprobs` of a server is not the setting of that name
                having = sum(candidate in names for names in filled.values())
                if having == len(filled):
                    columns[role] = candidate
                    break
                if having:
                    findings.append(finding("some-files", column=candidate, count=having, files=len(filled)))
    return columns, list(dict.fromkeys(findings))  # a column may serve two roles


def _find_anchor(filled: Mapping[Path, frozenset[str]], layout: Layout, columns: Mapping[str, str]) -> str:
    if "logp_behavior" not in columns:
        for path, names in filled.items():
            if any(map(_METRIC.fullmatch, names)) and not names & _IDS:
                raise TrimtabError(
                    f"{path} holds metrics of a run, not log-probs of tokens: trimtab diagnose --scalars {path}"
                )
        raise _missing_column(filled, "logp_behavior", layout, "the sampler's log-probs")
    for anchor in ("proximal", "current"):
        if f"logp_{anchor}" in columns:
            return anchor
    # The sampler's column is never suggested for the trainer's, however similar the names are.
    taken = frozenset({columns["logp_behavior"]})
    role = "logp_proximal" if "logp_proximal" in layout.columns else "logp_current"
    raise _missing_column(filled, role, layout, "the trainer's log-probs", taken)


def _missing_column(
    filled: Mapping[Path, frozenset[str]], role: str, layout: Layout, use: str, taken: frozenset[str] = frozenset()
) -> TrimtabError:
    known = layout.columns.get(role, (role,))
    path, names = next(
        ((path, names) for path, names in filled.items() if not names & set(known)), next(iter(filled.items()))
    )
    spelled = {_reduce_name(name) for one in LAYOUTS.values() for name in one.columns.get(role, ())}
    likely = next((name for name in sorted(names - taken) if _reduce_name(name) in spelled), known[0])
    called = "" if known[0] == role else f" ({layout.framework} calls it {known[0]})"
    return TrimtabError(
        f"{path} has no {role}, {use}{called}; {_list_columns(names, [likely], taken)}. Name it with --columns "
        f"{role}=COLUMN, or: {(taken and layout.trainer_advice) or layout.advice}"
    )


def _reduce_name(name: str) -> str:
    """Returns the letters and digits of a name in lower case: the same for rolloutLogProbs and rollout_log_probs."""
    return re.sub(r"\W|_", "", name).lower()


def _list_columns(names: frozenset[str], known: Sequence[str], taken: frozenset[str] = frozenset()) -> str:
    """Lists the existing columns and suggests a similar name, except for `taken`, which have another role."""
    plain = sorted(" ".join(name.split())[:40] for name in names)
    free = [name for name in plain if name not in taken]
    close = [match for name in known for match in difflib.get_close_matches(name, free, n=1, cutoff=0.7)]
    more = f" and {len(plain) - _MAX_LISTED} more" if len(plain) > _MAX_LISTED else ""
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return f"its columns are {', '.join(plain[:_MAX_LISTED])}{more}{meant}"
