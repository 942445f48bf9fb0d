"""Reads files of any known layout as a stream of token tables, and counts what was read.

`resolve` assigns columns of the files to roles and reports missing ones with a remedy; `LogSource` reads them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from trimtab.diagnosis.reading.batches import NO_LIST, ONE_NUMBER, UNEQUAL, WANTED, Batch, ReadCounts, ValueCounts
from trimtab.diagnosis.reading.file_formats import Table, find_files, open_table
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
from trimtab.diagnosis.reading.normalize import normalize
from trimtab.diagnosis.reading.run_files import made_with, settings_of
from trimtab.diagnosis.reading.torch_file import TorchFile
from trimtab.diagnosis.records import DataSummary, MaskedResponses, finding, read_table
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable
from trimtab.errors import Finding, TrimtabError, did_you_mean

COSTS: Mapping[str, str] = read_table("texts.toml")["missing"]
"""What each column that files lack would allow."""
_MAX_LISTED = 12
_METRIC = re.compile(r".+/.+|_step|global_step|log_history|Wall time")
"""Names that loggers give to metrics, which have one number a step."""
_IDS = {name for layout in LAYOUTS.values() for name in layout.columns["response_ids"]}


@dataclass(frozen=True, eq=False)
class Resolved:
    """The layout and columns of the files.

    columns: names by role, in every file. roles: those that every response has a value for, by a column or otherwise.
    anchor: proximal or current, empty without either. missing: absent columns, with the analysis that each would allow.
    left_out: files that hold no log-probs.
    """

    framework: str
    layout: Layout
    columns: Mapping[str, str]
    roles: frozenset[str]
    anchor: str
    missing: Mapping[str, str]
    findings: tuple[Finding, ...]
    left_out: frozenset[Path] = frozenset()

    @property
    def assumes_current(self) -> bool:
        """Whether versions of the weights are missing that a synchronous trainer decides."""
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

    found: the files that were found in folders. One of these without any log-probs is left out, if another has some.
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
    # A rank of Miles in an earlier pipeline stage has no log-probs of the trainer; another file may have them.
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
    columns, findings = _columns(filled, layout, given)
    anchor = _anchor(filled, layout, columns)
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


def _columns(
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


def _anchor(filled: Mapping[Path, frozenset[str]], layout: Layout, columns: Mapping[str, str]) -> str:
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
    called = "" if known[0] == role else f" ({layout.framework} calls it {known[0]})"
    return TrimtabError(
        f"{path} has no {role}, {use}{called}; {_list_columns(names, known[:1], taken)}. Name it with --columns "
        f"{role}=COLUMN, or: {(taken and layout.trainer_advice) or layout.advice}"
    )


def _list_columns(names: frozenset[str], known: Sequence[str], taken: frozenset[str] = frozenset()) -> str:
    """Lists the existing columns and suggests a similar name, except for `taken`, which have another role."""
    plain = sorted(" ".join(name.split())[:40] for name in names)
    free = [name for name in plain if name not in taken]
    close = [match for name in known for match in difflib.get_close_matches(name, free, n=1, cutoff=0.7)]
    more = f" and {len(plain) - _MAX_LISTED} more" if len(plain) > _MAX_LISTED else ""
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return f"its columns are {', '.join(plain[:_MAX_LISTED])}{more}{meant}"


NEEDED = ("logp_behavior", "loss_mask", "padding_mask", "sample_mask", "off_policy", "response_length", "sampling")
"""Roles, besides the trainer's log-probs, whose column decides which tokens count, or alone drops no response."""


class LogSource:
    """The responses of one or several files; `tables` reads them, then `counts` and `summary` are complete.

    resolve: assigns columns to roles, given the names of some by role. with_prompts: whether tables have the ids of the
    prompts, and responses all of theirs.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        resolve: Callable[[Mapping[str, str]], Resolved],
        columns: Mapping[str, str],
        counts: ReadCounts,
        with_prompts: bool,
    ) -> None:
        columns = columns if with_prompts else {"prompt_ids": "", **columns}
        self._resolve, self._given, self._resolved = resolve, columns, resolve(columns)
        self._more_roles = {"prompt_ids"} if with_prompts else set[str]()
        self._tables = [table for table in tables if table.path not in self._resolved.left_out]
        self._valued: set[str] = set()  # roles of which some row has a value
        self.counts = counts
        self._masked = ReadCounts()  # of the responses that the trainer masks out of its loss

    @property
    def files(self) -> list[Path]:
        return [table.path for table in self._tables]

    def tables(self, tokens: int = 262_144) -> Iterator[TokenTable]:
        """Yields whole responses, about `tokens` tokens at a time, in the order of the files.

        Where columns without any value leave no response, the files are read again without them. Raises `TrimtabError`
        for a damaged file.
        """
        pending: list[TokenTable] = []
        for piece in self._pieces(max(1, tokens // 2)):
            pending.append(piece)
            if sum(part.tokens for part in pending) >= tokens:
                yield TokenTable.concat(pending)
                pending = []
        if pending:
            yield TokenTable.concat(pending)
        elif not self.counts.responses and (empty := [role for role in self._optional() if role not in self._valued]):
            left_out = finding("no-value", columns=", ".join(self._resolved.columns[role] for role in empty))
            resolved = self._resolve({**self._given, **dict.fromkeys(empty, "")})
            self._resolved = replace(resolved, findings=(*resolved.findings, left_out))
            self.counts, self._masked = self.counts.fresh(), ReadCounts()
            yield from self.tables(tokens)

    def _optional(self) -> list[str]:
        """Returns the roles whose column may be left out: one side of the trainer's log-probs where the other is."""
        trainer = {"logp_proximal", "logp_current"} & self._resolved.columns.keys()
        needed = {*NEEDED, *(trainer if len(trainer) < 2 or not trainer & self._valued else ())}
        return [role for role in self._resolved.columns if role not in needed]

    def summary(self) -> DataSummary:
        """Returns a summary of the data read. Raises `TrimtabError` without a usable response or before `tables`."""
        counts, resolved = self.counts, self._resolved
        if not counts.responses:
            raise self._nothing_usable()
        for wrong, of in counts.values.items():
            if 2 * of.above > counts.trained:
                raise TrimtabError(
                    f"{_files_text(self._tables)}: {wrong} is above 0 at {of.above / counts.trained:.0%} of the "
                    f"trained tokens (from {of.lowest:.3g} to {of.highest:.3g}), where a log-probability cannot be. "
                    f"{_what_is_above_zero(of)}, or name the right column with --columns {wrong}=COLUMN"
                )
        if counts.zero_trainer == counts.trained > counts.zero:
            name = resolved.columns[f"logp_{resolved.anchor}"]
            advice = resolved.layout.trainer_advice or "Write those of its own forward pass"
            raise TrimtabError(
                f"{_files_text(self._tables)}: {name} is 0 at every trained token, a placeholder for log-probs that "
                f"the trainer did not compute. {advice}"
            )
        settings, unread = settings_of(self.files)
        engine, model, versions, unknown = made_with(self.files, resolved.framework)
        remarks = (*resolved.findings, *(unread or unknown))
        if remarks and not counts.quotes:
            remarks = (finding("kept-back", count=len(remarks)),)
        if resolved.assumes_current:
            lacks = "policy_version" if "policy_version" not in resolved.roles else "proximal_version"
            remarks = (*remarks, finding("age-assumed", lacks=lacks, why=resolved.layout.synchronous))
        return DataSummary(
            framework=resolved.framework,
            files=len(self._tables),
            responses=counts.responses,
            tokens=counts.tokens,
            trained=counts.trained,
            anchor=resolved.anchor,
            dropped=dict(counts.dropped.most_common()),
            nonfinite=dict(counts.nonfinite),
            missing=resolved.missing,
            findings=(*counts.findings(f"logp_{resolved.anchor}"), *remarks),
            settings=settings,
            masked=self._masked_responses(),
            engine=engine,
            versions=versions,
            model=model,
            assumes_current=resolved.assumes_current,
        )

    def _nothing_usable(self) -> TrimtabError:
        """Returns the error that names why no response is usable, and the way out."""
        counts = self.counts
        why = counts.reasons(5)
        odd = "; ".join(f"{count} x {kind}" for kind, count in counts.nonfinite.items())
        causes = [text for text in (why, odd) if text] or ["the files hold no rows"]
        blamed = {word for reason in (*counts.dropped, *counts.nonfinite) for word in reason.split()}
        role = next((role for role in self._optional() if role in blamed), "NAME")
        advice = f"(a column that is not needed is left out with --columns {role}=)"
        if any(reason.endswith(NO_LIST) for reason in counts.dropped):
            advice = WANTED
        elif UNEQUAL in counts.dropped:
            advice = (
                "(wanted in each row: one value per token of the response in every list; where one begins with the "
                "prompt, cut it there, or name a column of the prompt's ids or length: --columns "
                "prompt_length=COLUMN; a list that is not needed is left out with --columns NAME=)"
            )
        elif counts.dropped and all(reason.endswith(ONE_NUMBER) for reason in counts.dropped):
            advice = (
                "and a row is read as a response, not as a token: join the tokens of each response to one row of "
                'lists, as "[-0.1, -0.2]"'
            )
        return TrimtabError(f"nothing to diagnose in {_files_text(self._tables)}: {'; '.join(causes)} {advice}")

    def _masked_responses(self) -> MaskedResponses | None:
        masked, trained = self._masked, self.counts
        if not masked.trained or not trained.trained:
            return None
        both = (masked.k3_sum + trained.k3_sum) / (masked.trained + trained.trained)
        share = masked.responses / (masked.responses + trained.responses)
        return MaskedResponses(masked.responses, share, masked.k3_sum / masked.trained, both)

    def _pieces(self, tokens: int) -> Iterator[TokenTable]:
        for number, table in enumerate(self._tables):
            self.counts.file = table.path
            columns = self._columns(table)
            if columns is None:
                self.counts.odd["no-trainer"] += 1
                continue
            is_empty = True
            for batch in table.batches(columns, tokens, self.counts):
                is_empty = False
                responses = self._normalize(batch, table.path, number)
                if responses is not None:
                    yield from responses.split(tokens)
            self.counts.odd["no-rows"] += is_empty

    def _normalize(self, batch: Batch, path: Path, number: int) -> TokenTable | None:
        roles, layout = self._resolved.roles | self._more_roles, self._resolved.layout
        for role in batch.roles() - self._valued:
            if batch.has_value(role):
                self._valued.add(role)
        step = self._resolved.step_in_name(path)
        if step is not None:
            steps = np.full(len(batch.numbers), float(step))
            batch = replace(batch, scalars={**batch.scalars, "step": steps})
        if "sample_mask" in batch.scalars:
            normalize(batch, roles, layout, self._masked, number, in_loss=False)
        return normalize(batch, roles, layout, self.counts, number)

    def _columns(self, table: Table) -> Mapping[str, str] | None:
        """Returns the columns of a file by role; None for the file of a rank without log-probs (Miles)."""
        resolved = self._resolved
        if not isinstance(table, TorchFile):  # `resolve` has seen the columns of all others
            return resolved.columns
        present = table.names()
        missing = [role for role, name in resolved.columns.items() if name not in present]
        if not missing:
            return resolved.columns
        if resolved.layout.framework == "miles" and f"logp_{resolved.anchor}" in missing:
            table.close()
            return None
        raise TrimtabError(
            f"{table.path} has no {resolved.columns[missing[0]]!r}, which {self._tables[0].path} has: "
            f"diagnose the files apart, or leave the column out with --columns {missing[0]}="
        )


def open_log(
    paths: Sequence[Path],
    *,
    framework: str | None = None,
    columns: Mapping[str, str] | None = None,
    counts: ReadCounts | None = None,
    with_prompts: bool = False,
) -> LogSource:
    """Opens files and directories as one source.

    framework: its name in layouts.toml, or slime; None detects it by the columns. columns: column names by role
    where they differ (`logp_behavior="rollout_lp"`); an empty name omits the column. counts: to add to, new by default.
    with_prompts: whether the ids of prompts are read too, in which case responses with a bad value are dropped whole.
    Raises `TrimtabError` for a missing path, an unsupported file, or a missing required column.
    """
    counts = counts or ReadCounts()
    by_path: dict[Path, Table] = {}  # the files of several ranks may be one table
    for file in find_files([Path(path) for path in paths]):
        table = open_table(file)
        if table is None:
            counts.odd["empty"] += 1
        else:
            by_path.setdefault(table.path, table)
    tables = list(by_path.values())
    if not tables:
        empty = f"{paths[0]} is empty" if len(paths) == 1 else "all files are empty"
        raise TrimtabError(f"{empty}: name files that the training has written")
    found = frozenset(table.path for table in tables) - {Path(path) for path in paths}
    return LogSource(tables, partial(resolve, tables, framework, found=found), columns or {}, counts, with_prompts)


def _what_is_above_zero(values: ValueCounts) -> str:
    """Returns what values of this range may be, with what to do."""
    if values.lowest >= -MAX_ROUNDED_LOGP:
        is_share = values.highest <= 1 + MAX_ROUNDED_LOGP
        return "Take their logarithm if they are probabilities" if is_share else "Change their sign if they are losses"
    return (
        "Look at how they are computed, as raw logits or a fused cross-entropy kernel without its normalizer "
        "(log-sum-exp) give: compare one response with log_softmax of its logits and compute them without that kernel"
    )


def _files_text(tables: Sequence[Table]) -> str:
    return str(tables[0].path) if len(tables) == 1 else f"{len(tables)} files"
