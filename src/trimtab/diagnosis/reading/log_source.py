"""Finds the files of any known layout and reads them as a stream of token tables, with counts of what was read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from trimtab.diagnosis.reading import row_files
from trimtab.diagnosis.reading.arrow_files import ArrowFile
from trimtab.diagnosis.reading.batches import Batch
from trimtab.diagnosis.reading.columns import Resolved, Table, resolve
from trimtab.diagnosis.reading.counts import NO_LIST, ONE_NUMBER, UNEQUAL, ReadCounts
from trimtab.diagnosis.reading.layouts import LAYOUTS
from trimtab.diagnosis.reading.normalize import normalize
from trimtab.diagnosis.reading.row_files import RowFile
from trimtab.diagnosis.reading.run_files import read_facts
from trimtab.diagnosis.reading.torch_file import TorchFile
from trimtab.diagnosis.records import DataSummary, MaskedResponses, finding, read_table
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable
from trimtab.errors import TrimtabError
from trimtab.files import Unpacked, natural_key, opened
from trimtab.runs.layout import CONFIG, METRICS

_FOLDERS = tuple(layout.folder for layout in LAYOUTS.values() if layout.folder)
"""Folders in which runs store their tokens."""
_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What `save_to_disk` of the library datasets writes beside its arrow files."""
_NEMO_RL = "train_data_step"  # prefix of the files of NeMo-RL's training data
_PARQUET, _JSONL, _TORCH = (".parquet",), (".jsonl", ".ndjson", ".json"), (".pt", ".pth")
_ARROW = (".arrow", ".feather")
_CSV, _GZIP = (".csv",), ".gz"
_BOM = b"\xef\xbb\xbf"
_READABLE = _PARQUET + _JSONL + _TORCH + _ARROW
_KINDS = "a parquet, an arrow, a JSON, a CSV nor a torch file"


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files of the paths; files of a folder are in the order of the numbers in their names.

    Raises `TrimtabError` if there is none.
    """
    if not paths:
        raise TrimtabError("no file given: name trajectory files, or the directory of a run")
    files = [file for path in paths for file in ([path] if not path.is_dir() else _find_in_folder(path))]
    # A file named twice, in whatever spelling, is read once.
    return list({os.path.realpath(file): file for file in reversed(files)}.values())[::-1]


def _find_in_folder(folder: Path) -> list[Path]:
    known = [folder / name for name in _FOLDERS if (folder / name).is_dir()]
    if not known and (folder / METRICS).is_file() and (folder / CONFIG).is_file():
        raise TrimtabError(f"{folder} is a run that kept no trajectories: nothing to diagnose")
    items = [item for root in known or [folder] for item in root.rglob("*") if not item.name.startswith((".", "_"))]
    # NeMo-RL also writes tables of its evaluations, open-instruct also rollouts without the trainer's log-probs.
    items = [item for item in items if item.name.startswith(_NEMO_RL) or row_files.PACKED.search(item.name)] or items
    if any(_suffix(item) in _ARROW for item in items):
        items = [item for item in items if item.name not in _DATASETS]
    # CSV files of a folder are read only if there is nothing else: they are often tables of metrics.
    for suffixes in (_READABLE, _CSV):
        if files := [item for item in items if _suffix(item) in suffixes and item.is_file()]:
            return sorted(files, key=lambda file: natural_key(str(file)))
    raise TrimtabError(
        f"{folder} holds no parquet, arrow, JSONL, CSV or torch file: name the folder with the tokens of the training"
    )


def _suffix(path: Path) -> str:
    """Returns the suffix that determines the format: for gzipped text files, the suffix before `.gz`."""
    suffix = path.suffix.lower()
    if suffix != _GZIP:
        return suffix
    inner = Path(path.stem).suffix.lower()
    return inner if inner in _JSONL + _CSV else suffix


def open_table(path: Path) -> Table | None:
    """Returns the reader of a file by its first bytes and name, or None for an empty file.

    Raises `TrimtabError` for an unsupported format.
    """
    suffix = _suffix(path)
    with opened(path) as file:
        head, packed = file.read(4096), isinstance(getattr(file, "raw", None), Unpacked)
    if not head.strip(b" \t\r\n" + _BOM):
        return None
    if row_files.PACKED.search(path.name):
        return RowFile(row_files.find_slices(path)[0], row_files.read_packed)
    if packed:
        if head.startswith((b"PAR1", b"PK\x03\x04")):
            raise TrimtabError(f"{path} is compressed: unpack it first")
    elif head.startswith(b"PAR1") or suffix in _PARQUET:
        return ArrowFile(path, is_parquet=True)
    elif suffix in _ARROW or head.startswith(b"ARROW1"):
        return ArrowFile(path, is_parquet=False)
    elif suffix in (".npz", ".npy") or head.startswith(b"\x93NUMPY"):
        raise TrimtabError(
            f"{path} holds numpy arrays, whose rows and padding nothing tells: write a parquet or JSONL file with one "
            f"response a row (docs/frameworks.md), or torch.save a dictionary of (batch, time) tensors with a loss_mask"
        )
    elif head.startswith(b"PK\x03\x04") or suffix in _TORCH:
        return TorchFile(path)
    return _text_table(path, head, suffix, packed=packed)


def _text_table(path: Path, head: bytes, suffix: str, *, packed: bool) -> Table:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TrimtabError(f"{path} is UTF-16: write it as UTF-8")
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise TrimtabError(f"{path} is compressed with zstd: unpack it first (gzip is read as it is)")
    if head.startswith(b"\x80") or suffix in (".pkl", ".pickle"):
        raise TrimtabError(f"{path} is a pickle, which is not opened: save its tensors with torch.save instead")
    start = head.removeprefix(_BOM).lstrip()
    if start.startswith(b"["):
        return RowFile(path, row_files.read_json_array)
    if suffix in _CSV:
        return RowFile(path, row_files.read_csv)
    if start.startswith(b"{") or suffix in _JSONL:
        return RowFile(path, row_files.read_json_lines)
    raise TrimtabError(f"{path} is neither {_KINDS}{' below its gzip' if packed else ''}")


NEEDED = ("logp_behavior", "loss_mask", "padding_mask", "sample_mask", "off_policy", "response_length", "sampling")
"""Roles, besides the trainer's log-probs, whose column decides which tokens count, or alone drops no response."""
_ADVICE: Mapping[str, str] = read_table("texts.toml")["advice"]


class LogSource:
    """The responses of one or several files; `tables` reads them, then `counts` and `summary` are complete.

    resolve: assigns columns to roles, given the names of some by role. with_prompts: whether tables have the ids of
    prompts, and only responses with all of their ids.
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
        self._valued: set[str] = set()  # roles for which some row has a value
        self.counts = counts
        self._masked = ReadCounts()  # counts of responses that the trainer masks out of its loss

    @property
    def files(self) -> list[Path]:
        return [table.path for table in self._tables]

    def tables(self, tokens: int = 262_144) -> Iterator[TokenTable]:
        """Yields whole responses, about `tokens` tokens at a time, in the order of the files.

        If columns without any value leave no response, the files are read again without these columns. Raises
        `TrimtabError` for a damaged file.
        """
        pending: list[TokenTable] = []
        for piece in self._read_pieces(max(1, tokens // 2)):
            pending.append(piece)
            if sum(part.tokens for part in pending) >= tokens:
                yield TokenTable.concat(pending)
                pending = []
        if pending:
            yield TokenTable.concat(pending)
        elif not self.counts.responses and (
            empty := [role for role in self._list_optional() if role not in self._valued]
        ):
            left_out = finding("no-value", columns=", ".join(self._resolved.columns[role] for role in empty))
            resolved = self._resolve({**self._given, **dict.fromkeys(empty, "")})
            self._resolved = replace(resolved, findings=(*resolved.findings, left_out))
            self.counts, self._masked = self.counts.fresh(), ReadCounts()
            yield from self.tables(tokens)

    def _list_optional(self) -> list[str]:
        """Returns the roles whose column may be left out, such as logp_proximal if logp_current has values."""
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
                meant = "logits" if of.lowest < -MAX_ROUNDED_LOGP else "positive" if of.highest > 1 else "probabilities"
                raise TrimtabError(
                    f"{_files_text(self._tables)}: {wrong} is above 0 at {of.above / counts.trained:.0%} of the "
                    f"trained tokens (from {of.lowest:.3g} to {of.highest:.3g}), where a log-probability cannot be. "
                    f"{_ADVICE[meant]}, or name the right column with --columns {wrong}=COLUMN"
                )
        if counts.zero_trainer == counts.trained > counts.zero:
            name = resolved.columns[f"logp_{resolved.anchor}"]
            advice = resolved.layout.trainer_advice or "Write those of its own forward pass"
            raise TrimtabError(
                f"{_files_text(self._tables)}: {name} is 0 at every trained token, a placeholder for log-probs that "
                f"the trainer did not compute. {advice}"
            )
        beside, unknown = read_facts(self.files, resolved.framework)
        remarks = (*resolved.findings, *unknown)
        if remarks and not counts.quotes:
            remarks = (finding("redacted", count=len(remarks)),)
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
            numerics=beside.numerics,
            masked=self._masked_responses(),
            engine=beside.engine,
            versions=dict(sorted(beside.versions)),
            model=beside.model,
            assumes_current=resolved.assumes_current,
        )

    def _nothing_usable(self) -> TrimtabError:
        """Returns the error that says why no response is usable, and what to do."""
        counts = self.counts
        why = counts.reasons(5)
        odd = "; ".join(f"{count} x {kind}" for kind, count in counts.nonfinite.items())
        causes = [text for text in (why, odd) if text] or ["the files hold no rows"]
        blamed = {word for reason in (*counts.dropped, *counts.nonfinite) for word in reason.split()}
        role = next((role for role in self._list_optional() if role in blamed), "NAME")
        advice = _ADVICE["column"].format(role=role)
        if any(reason.endswith(NO_LIST) for reason in counts.dropped):
            advice = _ADVICE["lists"]
        elif UNEQUAL in counts.dropped:
            advice = _ADVICE["lengths"]
        elif counts.dropped and all(reason.endswith(ONE_NUMBER) for reason in counts.dropped):
            advice = _ADVICE["one-number"]
        return TrimtabError(f"nothing to diagnose in {_files_text(self._tables)}: {'; '.join(causes)} {advice}")

    def _masked_responses(self) -> MaskedResponses | None:
        masked, trained = self._masked, self.counts
        if not masked.trained or not trained.trained:
            return None
        both = (masked.k3_sum + trained.k3_sum) / (masked.trained + trained.trained)
        share = masked.responses / (masked.responses + trained.responses)
        return MaskedResponses(masked.responses, share, masked.k3_sum / masked.trained, both)

    def _read_pieces(self, tokens: int) -> Iterator[TokenTable]:
        for number, table in enumerate(self._tables):
            self.counts.file = table.path
            columns = self._columns_of(table)
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
        for role in {*batch.lists, *batch.scalars, *batch.keys} - self._valued:
            if batch.has_value(role):
                self._valued.add(role)
        step = self._resolved.step_in_name(path)
        if step is not None:
            steps = np.full(len(batch.numbers), float(step))
            batch = replace(batch, scalars={**batch.scalars, "step": steps})
        if "sample_mask" in batch.scalars:
            normalize(batch, roles, layout, self._masked, number, in_loss=False)
        return normalize(batch, roles, layout, self.counts, number)

    def _columns_of(self, table: Table) -> Mapping[str, str] | None:
        """Returns the columns of a file by role; None for the file of a rank without log-probs (Miles)."""
        resolved = self._resolved
        if not isinstance(table, TorchFile):  # `resolve` has seen the columns of all other files
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
    if they differ (`logp_behavior="rollout_lp"`); an empty name omits the column. counts: counts to add to,
    new by default. with_prompts: whether to read the ids of prompts too; responses with a bad value are then dropped.
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


def _files_text(tables: Sequence[Table]) -> str:
    return str(tables[0].path) if len(tables) == 1 else f"{len(tables)} files"
