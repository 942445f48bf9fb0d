"""Assembles a `TokenTable` from a block of rows: aligns lists, strips padding and prompts, counts what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np

from trimtab.corrections.ratios import LOG_RATIO_BOUND
from trimtab.diagnosis.reading.cells import shown
from trimtab.diagnosis.reading.layouts import LOGPS, Layout
from trimtab.diagnosis.reading.ragged import ABSENT, SAMPLING, SINGLE, WRONG, FlatRows, ListColumn, RowBlock, numbers
from trimtab.diagnosis.reading.read_counts import (
    EXTERNAL_TRACE,
    NO_LIST,
    NOT_FINITE,
    ONE_NUMBER,
    OUT_OF_LOSS,
    UNEQUAL,
    ReadCounts,
)
from trimtab.diagnosis.tokens import TokenTable


def build_table(
    flat: FlatRows, block: RowBlock, rows: np.ndarray, roles: frozenset[str], tally: ReadCounts, file: int
) -> TokenTable:
    def number(role: str) -> np.ndarray | None:
        if role not in block.scalars:
            return None
        values = numbers(block.scalars[role])[rows]
        tally.unknown[role] += int((~np.isfinite(values)).sum())
        return values

    def whole(role: str) -> np.ndarray | None:
        return _integers(block.scalars[role], rows) if role in block.scalars else None

    sampling = _sampling(block, rows, roles)
    ids = flat.values.get("response_ids")
    return TokenTable(
        starts=np.concatenate([[0], np.cumsum(flat.lengths)]).astype(np.int64),
        mask=flat.values["trained"],
        behavior=flat.values["logp_behavior"],
        proximal=flat.values.get("logp_proximal"),
        current=flat.values.get("logp_current"),
        perturbed=flat.values.get("logp_perturbed"),
        ids=None if ids is None else as_integers(ids),
        entropy=flat.values.get("entropy"),
        version=_version(flat, block, rows),
        turn=as_integers(flat.values["turn"]) if "turn" in flat.values else None,
        step=whole("step"),
        group=_groups(block, flat, rows, tally, file) if "group" in roles else None,
        proximal_version=whole("proximal_version"),
        prompt_length=_prompt_length(flat, block, rows),
        reward=number("reward"),
        advantage=_advantage(flat) if "advantage" in flat.values else number("advantage"),
        temperature=sampling.get("temperature"),
        top_p=sampling.get("top_p"),
        top_k=sampling.get("top_k"),
        raw=sampling.get("raw"),
    )


def _version(flat: FlatRows, block: RowBlock, rows: np.ndarray) -> np.ndarray | None:
    if "policy_version" in block.scalars:
        return np.repeat(_integers(block.scalars["policy_version"], rows), flat.lengths)
    values = flat.values.get("policy_version")
    return None if values is None else as_integers(values)


def _sampling(block: RowBlock, rows: np.ndarray, roles: frozenset[str]) -> Mapping[str, np.ndarray]:
    """Returns sampling parameters (responses,): NaN for an unknown temperature or top_p, 0 for an unknown top_k."""
    names = SAMPLING if "sampling" in roles else tuple(name for name in SAMPLING if name in roles)
    result: dict[str, np.ndarray] = {}
    for name in names:
        values = block.scalars.get(name, np.full(block.rows, np.nan))
        if name == "logprobs":
            result["raw"] = np.array([value == "raw" for value in values], dtype=np.bool_)[rows]
        elif name == "top_k":
            result[name] = as_integers(np.nan_to_num(numbers(values)[rows], nan=0))
        else:
            result[name] = numbers(values)[rows]
    return result


def _prompt_length(flat: FlatRows, block: RowBlock, rows: np.ndarray) -> np.ndarray | None:
    if "prompt_length" in block.scalars:
        return numbers(block.scalars["prompt_length"])[rows]
    known = flat.single.get("prompt_length")
    return None if known is None else known.astype(np.float64)


def _groups(block: RowBlock, flat: FlatRows, rows: np.ndarray, tally: ReadCounts, file: int) -> np.ndarray:
    """Returns numbers of prompt groups (responses,), unique over all files: per step, or per file without steps."""
    if "group" in block.scalars:
        values = [block.scalars["group"][row] for row in rows.tolist()]
    else:
        values = flat.single["prompt_key"].tolist()
    steps = numbers(block.scalars["step"])[rows].tolist() if "step" in block.scalars else None
    named = "group" not in block.scalars or isinstance(next(iter(values), None), str | bytes)
    keys = ((steps[index] if steps else ("file", file), _key(value, index)) for index, value in enumerate(values))
    return np.fromiter((tally.group(key, named=named) for key in keys), dtype=np.int64, count=len(rows))


def _key(value: object, row: int) -> Hashable:
    """Returns the key of a group. A response without a group forms its own."""
    if value is None or value != value:
        return ("alone", row, object())
    if isinstance(value, str | bytes):
        return hash(value)  # prompts are long, and only their equality matters
    return value if isinstance(value, Hashable) else hash(repr(value))


def _advantage(flat: FlatRows) -> np.ndarray:
    """Returns the mean advantage of each response's trained tokens (responses,)."""
    trained = flat.values["trained"]
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(trained, flat.values["advantage"].astype(np.float64), 0)
        total = np.bincount(flat.row, weights=values, minlength=len(flat.lengths))
    return total / np.bincount(flat.row, weights=trained, minlength=len(flat.lengths))


def _integers(values: object, rows: np.ndarray) -> np.ndarray:
    return as_integers(numbers(values)[rows])  # type: ignore[arg-type]


def as_integers(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # beyond 64 bits: no id, version or step is
        return values.astype(np.int64)


_MAX_ROUNDED_LOGP = 1e-4
"""Largest log-prob above 0 that is attributed to rounding of log 1."""
_MAX_MAGNITUDE = 1e6
"""Magnitude in nats that counts as infinite: masks write the lowest float, or -1e9, for -inf."""
_WHOLE_NUMBERS = ("response_ids", "policy_version", "turn", "loss_mask", "padding_mask")
_ROW_NUMBERS = ("step", "proximal_version")


def assemble(
    block: RowBlock, roles: Iterable[str], layout: Layout, tally: ReadCounts, file: int, *, in_loss: bool = True
) -> TokenTable | None:
    """Returns the usable responses of a block, or None without any. Dropped responses are counted in `tally`.

    roles: the columns that every block of the source has. file: number that distinguishes prompt groups without steps.
    in_loss: False for the responses that the trainer masks out of its loss, in place of those that it trains on.
    """
    roles = frozenset(roles)
    keep = _RowFilter(block.rows)
    _drop_rows(block, keep, tally, in_loss)
    flat = _align(block, keep)
    flat, keep_rows = _trim(flat, layout, keep.rows(), keep)
    flat, finite = _remove_nonfinite(flat, layout, tally)
    for reason, rows in (*keep.reasons(), (NOT_FINITE, keep_rows[~finite])):
        if len(rows):
            tally.drop(reason, len(rows), block.numbers[int(rows[0])], keep.detail(reason, int(rows[0])))
    flat, keep_rows = flat.select(finite), keep_rows[finite]
    if layout.repeats:
        repeated = _repeated_in_later_file(flat, tally, file)
        tally.drop("the same response again, in a later file", int(repeated.sum()))
        flat, keep_rows = flat.select(~repeated), keep_rows[~repeated]
    if not len(keep_rows):
        return None
    table = build_table(flat, block, keep_rows, roles, tally, file)
    _count(table, tally)
    return table


class _RowFilter:
    """The rows that are still kept, and the first reason for each dropped one."""

    def __init__(self, rows: int) -> None:
        self._reason = np.zeros(rows, dtype=np.int16)
        self._texts: list[str] = []
        self._details: dict[str, Callable[[int], str]] = {}

    def drop(
        self, bad: np.ndarray, reason: str, among: np.ndarray | None = None, detail: Callable[[int], str] | None = None
    ) -> None:
        """Drops rows. `bad` is (rows,), or (len(among),) for the rows `among`; `detail` describes one of them."""
        index = np.flatnonzero(bad) if among is None else among[bad]
        index = index[self._reason[index] == 0]
        if len(index):
            self._texts.append(reason)
            self._reason[index] = len(self._texts)
            if detail is not None:
                self._details[reason] = detail

    def detail(self, reason: str, row: int) -> str:
        return self._details[reason](row) if reason in self._details else ""

    def rows(self) -> np.ndarray:
        return np.flatnonzero(self._reason == 0)

    def reasons(self) -> list[tuple[str, np.ndarray]]:
        """Returns each reason with the rows that were dropped for it."""
        return [(text, np.flatnonzero(self._reason == code)) for code, text in enumerate(self._texts, start=1)]


def _drop_rows(block: RowBlock, keep: _RowFilter, tally: ReadCounts, in_loss: bool) -> None:
    if "off_policy" in block.scalars:
        keep.drop(numbers(block.scalars["off_policy"]) == 1, EXTERNAL_TRACE)
    if "sample_mask" in block.scalars:
        keep.drop((numbers(block.scalars["sample_mask"]) == 0) == in_loss, OUT_OF_LOSS)
    if "sample_id" in block.scalars:
        keep.drop(_repeated_samples(block, tally), "the same response in the file of another rank")
    for role, column in block.lists.items():
        keep.drop(column.fault == ABSENT, f"no {role}")
        keep.drop(
            column.fault == WRONG, f"{role} {NO_LIST}", detail=lambda row, column=column: shown(column.cells[row])
        )
        keep.drop(column.fault == SINGLE, f"{role} is {ONE_NUMBER}")
    for role in ("policy_version", "response_length", *_ROW_NUMBERS):
        if role in block.scalars:
            keep.drop(~np.isfinite(numbers(block.scalars[role])), f"no {role}")


def _repeated_samples(block: RowBlock, tally: ReadCounts) -> np.ndarray:
    ids = numbers(block.scalars["sample_id"])
    steps = numbers(block.scalars.get("step", np.zeros(block.rows)))
    repeated = np.zeros(block.rows, dtype=np.bool_)
    for index, key in enumerate(zip(steps.tolist(), ids.tolist(), strict=True)):
        repeated[index] = key in tally.seen
        if key[1] == key[1]:
            tally.seen[key] = 0
    return repeated


def _repeated_in_later_file(flat: FlatRows, tally: ReadCounts, file: int) -> np.ndarray:
    """Returns rows (rows,) whose tokens and log-probs are bitwise equal to those of a row in an earlier file."""
    repeated = np.zeros(len(flat.lengths), dtype=np.bool_)
    names = sorted(flat.values.keys() & {"response_ids", *LOGPS})
    for index, (start, length) in enumerate(zip(flat.first.tolist(), flat.lengths.tolist(), strict=True)):
        key = hash(tuple(flat.values[name][start : start + length].tobytes() for name in names))
        repeated[index] = tally.seen.setdefault(key, file) != file
    return repeated


def _align(block: RowBlock, keep: _RowFilter) -> FlatRows:
    """Returns the lists of the kept rows, all as long as the sampler's log-probs."""
    lists = block.lists
    skip = {role: np.zeros(block.rows, dtype=np.int64) for role in lists}
    length = {role: column.lengths for role, column in lists.items()}

    def lengths_text(row: int) -> str:
        known = {role: int(column.lengths[row]) for role, column in lists.items()}
        if "response_length" in block.scalars:
            known["response_length"] = block.scalars["response_length"][row]
        return ", ".join(f"{role} {count}" for role, count in known.items())

    if "response_length" in block.scalars:
        expected = np.nan_to_num(numbers(block.scalars["response_length"]), posinf=0, neginf=0)
        expected = np.clip(expected, 0, 2**53).astype(np.int64)
        for role in lists:
            skip[role] = np.maximum(length[role] - expected, 0)
            length[role] = length[role] - skip[role]
        keep.drop(length["logp_behavior"] != expected, UNEQUAL, detail=lengths_text)
    if "prompt_length" in block.scalars:  # of some lists only: they begin with the prompt
        prompt = numbers(block.scalars["prompt_length"])
        shortest = np.min(list(length.values()), axis=0)
        for role in lists:
            skip[role] = np.where(length[role] - shortest == prompt, length[role] - shortest, skip[role])
            length[role] = lists[role].lengths - skip[role]
    tokens = length["logp_behavior"]
    if "padding_mask" in lists:  # an attention mask covers the prompt as well
        skip["padding_mask"] = np.maximum(length["padding_mask"] - tokens, 0)
        length["padding_mask"] = length["padding_mask"] - skip["padding_mask"]
    keep.drop(np.any([length[role] != tokens for role in lists], axis=0), UNEQUAL, detail=lengths_text)
    keep.drop(tokens == 0, "no tokens")
    rows = keep.rows()
    flat = FlatRows(tokens[rows], {role: _entries(lists[role], skip[role], rows) for role in lists})
    if "response_length" in block.scalars and "response_ids" in lists:
        # Ids that begin with the prompt tell its length, unless all lists do, which may be padded on the left.
        skipped = skip["response_ids"][rows], skip["logp_behavior"][rows]
        flat.single["prompt_length"] = np.where(skipped[1] == 0, skipped[0], np.nan)
    return flat


def _entries(column: ListColumn, skip: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the entries of `rows` without the first `skip` of each."""
    if len(rows) == len(column.lengths) and not skip.any():
        return column.values
    kept = np.zeros(len(column.lengths), dtype=np.bool_)
    kept[rows] = True
    position = np.arange(len(column.values)) - np.repeat(np.cumsum(column.lengths) - column.lengths, column.lengths)
    return column.values[np.repeat(kept, column.lengths) & (position >= np.repeat(skip, column.lengths))]


def _trim(flat: FlatRows, layout: Layout, rows: np.ndarray, keep: _RowFilter) -> tuple[FlatRows, np.ndarray]:
    """Removes padding and prompts, adds the array `trained`, and returns the kept rows too."""
    for role in _WHOLE_NUMBERS:
        values = flat.values.get(role)
        if values is not None and values.dtype.kind == "f":
            bad = flat.having(~np.isfinite(values))
            keep.drop(bad, f"{role} holds nulls", among=rows)
            flat, rows = flat.select(~bad), rows[~bad]
    if "turn" in flat.values:
        bad = flat.having(flat.values["turn"] < 0)
        keep.drop(bad, "turn is negative", among=rows)
        flat, rows = flat.select(~bad), rows[~bad]
    trained = np.ones(int(flat.lengths.sum()), dtype=np.bool_)
    for role in ("loss_mask", "padding_mask"):
        if role in flat.values:
            trained &= flat.values[role] != 0
    if "loss_weight" in flat.values:
        trained &= flat.values["loss_weight"] != 0  # a null is the weight of 1
    flat.values["trained"] = trained
    inside = flat.values.get("padding_mask", trained) != 0
    first, last = _ends(flat, trained if layout.whole else inside)
    if layout.whole:
        flat.single["prompt_length"] = first
        if layout.prompt_groups and "response_ids" in flat.values:
            flat.single["prompt_key"] = _prompt_keys(flat, first)
    flat = flat.cut(
        first if layout.whole else np.zeros_like(first),
        np.where(last > first, last, flat.lengths) if layout.padded else flat.lengths,
    )
    empty = ~flat.having(flat.values["trained"])
    keep.drop(empty, "no trained token", among=rows)
    return flat.select(~empty), rows[~empty]


def _prompt_keys(flat: FlatRows, length: np.ndarray) -> np.ndarray:
    """Returns a hash of the first `length` token ids of each row (rows,)."""
    ids = flat.values["response_ids"]
    spans = zip(flat.first.tolist(), length.tolist(), strict=True)
    return np.array([hash(ids[start : start + count].tobytes()) for start, count in spans], dtype=np.int64)


def _ends(flat: FlatRows, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first index inside, and the index after the last one inside, of each row; 0 and 0 without any."""
    first = np.zeros(len(flat.lengths), dtype=np.int64)
    last = np.zeros(len(flat.lengths), dtype=np.int64)
    index = np.flatnonzero(inside)
    row = flat.row[index]
    position = index - flat.first[row]
    first[row[::-1]] = position[::-1]  # reversed, since the last assignment to an index wins
    last[row] = position + 1
    return first, last


def _remove_nonfinite(flat: FlatRows, layout: Layout, tally: ReadCounts) -> tuple[FlatRows, np.ndarray]:
    """Removes trained tokens with log-probs or entropy that are not finite; returns the rows (rows,) with others left.

    The tokens are removed rather than masked, since an untrained token inside a response would count as the end of a
    turn. A trainer has to drop such responses whole; here one bad token in each would leave no data. Values at
    untrained tokens (placeholders, padding) become 0, so that no later stage depends on them. Columns become float32.
    """
    trained = flat.values["trained"]
    bad = np.zeros(len(trained), dtype=np.bool_)
    for name in (*LOGPS, "logp_perturbed", "entropy"):
        if name not in flat.values:
            continue
        with np.errstate(over="ignore"):  # beyond float32 is infinite, and counted as such
            values = np.array(flat.values[name], dtype=np.float32)
        invalid = ~(np.abs(values) <= _MAX_MAGNITUDE)
        if invalid.any():
            wrong = values[invalid & trained]
            kinds = {"nan": np.isnan(wrong), "inf": wrong > 0, "-inf": wrong < 0}
            for kind, where in kinds.items():
                if where.any():
                    tally.nonfinite[f"{name} {kind}"] += int(where.sum())
            bad |= invalid & trained
        values[~trained] = 0
        flat.values[name] = values
    damaged = flat.having(bad)
    tally.damaged += int(damaged.sum())
    if layout.report:
        return flat, ~damaged
    flat = flat.without(bad)
    return flat, flat.having(flat.values["trained"])


def _count(table: TokenTable, tally: ReadCounts) -> None:
    trained = table.mask
    tally.responses += table.responses
    tally.tokens += table.tokens
    tally.trained += int(trained.sum())
    if table.anchor:
        tally.equal += int((trained & (table.trainer == table.behavior)).sum())
        tally.zero_trainer += int((trained & (table.trainer == 0)).sum())
        log_ratio = (table.trainer - table.behavior)[trained].astype(np.float64)
        bounded = np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        tally.k3_sum += float((np.expm1(bounded) - log_ratio).sum())
    tally.zero += int((trained & (table.behavior == 0)).sum())
    for name, values in zip(LOGPS, (table.behavior, table.proximal, table.current), strict=True):
        if values is None:
            continue
        above = trained & (values > _MAX_ROUNDED_LOGP)
        if above.any():
            tally.above_zero(name, int(above.sum()), float(values[above].max()))
