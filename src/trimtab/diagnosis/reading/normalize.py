"""Makes a `TokenTable` of a batch of rows: cuts their lists to the response, and counts what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.diagnosis.reading.batches import Batch, flat, list_lengths
from trimtab.diagnosis.reading.counts import EXTERNAL_TRACE, NOT_FINITE, OUT_OF_LOSS, UNEQUAL, ReadCounts, ValueCounts
from trimtab.diagnosis.reading.layouts import LOGPS, Layout
from trimtab.diagnosis.tokens import TokenTable, k3

_WHOLE_NUMBERS = ("response_ids", "policy_version", "turn", "loss_mask", "padding_mask")


class UsableRows:
    """The usable rows: `rows`, bool (rows,). A dropped row is counted once, by the first reason for it."""

    def __init__(self, numbers: Sequence[int], tally: ReadCounts) -> None:
        self.rows = np.ones(len(numbers), dtype=np.bool_)
        self.tally = tally
        self._numbers = numbers

    def drop(self, bad: np.ndarray, reason: str, detail: Callable[[int], str] = lambda _: "") -> None:
        """Drops the rows where `bad` (rows,) is True; `detail` describes one of them."""
        dropped = np.flatnonzero(bad & self.rows)
        if len(dropped):
            first = int(dropped[0])
            self.rows[dropped] = False
            self.tally.drop(reason, len(dropped), self._numbers[first], detail(first))


class TokenLists:
    """The entries of the lists of all usable rows: `values` (tokens,) by role; `lengths` (rows,), 0 for a dropped row.

    ids: all response_ids of the rows, with any prompts at the start of lists, and the index where each row starts.
    prompt_length: number of tokens before the response (rows,), if the lists tell it.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        values: dict[str, np.ndarray],
        ids: tuple[np.ndarray, np.ndarray],
        prompt_length: np.ndarray | None = None,
    ) -> None:
        self.lengths, self.values, self.prompt_length = lengths, values, prompt_length
        self._ids, self._first = ids
        self.starts = np.append(0, np.cumsum(lengths))
        self.row = np.repeat(np.arange(len(lengths)), lengths)
        self.position = np.arange(len(self.row)) - self.starts[self.row]

    def having(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the rows (rows,) with at least one of the marked tokens."""
        return np.bincount(self.row[tokens], minlength=len(self.lengths)) > 0

    def prompts(self, rows: np.ndarray) -> list[np.ndarray | None]:
        """Returns the prompt's ids at the start of each list where `rows` is True; None if unknown."""
        if self.prompt_length is None or not len(self._ids):
            return [None] * int(rows.sum())
        spans = zip(self._first[rows].tolist(), self.prompt_length[rows].tolist(), strict=True)
        return [self._ids[first : first + int(count)] if count == count else None for first, count in spans]


def drop_rows(batch: Batch, usable: UsableRows, in_loss: bool) -> None:
    scalars = batch.scalars
    if "off_policy" in scalars:
        usable.drop(scalars["off_policy"] == 1, EXTERNAL_TRACE)
    if "sample_mask" in scalars:
        usable.drop((scalars["sample_mask"] == 0) == in_loss, OUT_OF_LOSS)
    if "sample_id" in scalars:
        steps = scalars.get("step", np.zeros(len(usable.rows)))
        repeated = np.zeros(len(usable.rows), dtype=np.bool_)
        for row, key in enumerate(zip(steps.tolist(), scalars["sample_id"].tolist(), strict=True)):
            repeated[row] = key in usable.tally.seen
            usable.tally.seen[key] = 0
        usable.drop(repeated, "the same response in the file of another rank")
    for reason, rows in batch.faults.items():
        usable.drop(np.isin(np.arange(len(usable.rows)), list(rows)), reason, rows.__getitem__)
    for role in ("policy_version", "response_length", "step", "proximal_version"):
        if role in scalars:
            usable.drop(~np.isfinite(scalars[role]), f"no {role}")


def align(batch: Batch, usable: UsableRows) -> TokenLists:
    """Returns the lists of the usable rows, all as long as the sampler's log-probs."""
    scalars = batch.scalars
    whole = {role: list_lengths(lists).fill_null(0).to_numpy().astype(np.int64) for role, lists in batch.lists.items()}
    skip = {role: np.zeros(len(usable.rows), dtype=np.int64) for role in whole}

    def lengths_text(row: int) -> str:
        known = {role: int(lengths[row]) for role, lengths in whole.items()}
        if "response_length" in scalars:
            known["response_length"] = int(scalars["response_length"][row])
        return ", ".join(f"{role} {number}" for role, number in known.items())

    if "response_length" in scalars:
        expected = np.nan_to_num(scalars["response_length"], posinf=0, neginf=0)
        expected = np.clip(expected, 0, 2**53).astype(np.int64)
        skip = {role: np.maximum(lengths - expected, 0) for role, lengths in whole.items()}
        usable.drop(whole["logp_behavior"] - skip["logp_behavior"] != expected, UNEQUAL, lengths_text)
    if "prompt_length" in scalars:  # only some lists begin with the prompt
        prompt = scalars["prompt_length"]
        shortest = np.min([lengths - skip[role] for role, lengths in whole.items()], axis=0)
        for role, lengths in whole.items():
            longer = lengths - skip[role] - shortest
            skip[role] = skip[role] + np.where(longer == prompt, longer, 0)
    tokens = whole["logp_behavior"] - skip["logp_behavior"]
    if "padding_mask" in whole:  # an attention mask covers the prompt as well
        skip["padding_mask"] = np.maximum(whole["padding_mask"] - tokens, skip["padding_mask"])
    unequal = [lengths - skip[role] != tokens for role, lengths in whole.items()]
    usable.drop(np.any(unequal, axis=0), UNEQUAL, lengths_text)
    usable.drop(tokens == 0, "no tokens")
    prompt_length = None
    if "response_length" in scalars and "response_ids" in whole:
        # If only the ids begin with the prompt, they tell its length. If all lists do, they may be left-padded.
        prompt_length = np.where(skip["logp_behavior"] == 0, skip["response_ids"], np.nan)
    tokens = np.where(usable.rows, tokens, 0)
    entries = {role: flat(lists) for role, lists in batch.lists.items()}
    values = {role: _cut(entries[role], whole[role], skip[role], tokens) for role in entries}
    counts = whole.get("response_ids", tokens)
    ids = entries.get("response_ids", np.zeros(0)), np.cumsum(counts) - counts
    return TokenLists(tokens, values, ids, prompt_length)


def _cut(values: np.ndarray, whole: np.ndarray, skip: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns `lengths` values of each row after its first `skip`; the rows have `whole` values."""
    if np.array_equal(whole, lengths):
        return values
    first = np.cumsum(whole) - whole + skip
    return values[np.repeat(first - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())]


def find_trained(tokens: TokenLists, usable: UsableRows) -> np.ndarray:
    """Returns the tokens (tokens,) that all masks select; drops rows with a null in a mask or in other integers."""
    values = tokens.values
    for role in _WHOLE_NUMBERS:
        if role in values and values[role].dtype.kind == "f":
            usable.drop(tokens.having(~np.isfinite(values[role])), f"{role} holds nulls")
    if "turn" in values:
        usable.drop(tokens.having(values["turn"] < 0), "turn is negative")
    trained = np.ones(len(tokens.row), dtype=np.bool_)
    for role in ("loss_mask", "padding_mask", "loss_weight"):  # a null weight means 1
        if role in values:
            trained &= values[role] != 0
    return trained


def find_response(tokens: TokenLists, trained: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns which tokens (tokens,) are neither padding nor prompt; notes the prompt's length in `tokens`."""
    inside = np.ones(len(tokens.row), dtype=np.bool_)
    if not (layout.whole or layout.padded):
        return inside
    marked = trained if layout.whole else tokens.values.get("padding_mask", trained) != 0
    row, position = tokens.row[marked], tokens.position[marked]
    if layout.padded:
        last = tokens.lengths - 1
        last[row] = position  # the last assignment to an index wins
        inside = tokens.position <= last[tokens.row]
    if layout.whole:
        tokens.prompt_length = np.zeros_like(tokens.lengths)
        tokens.prompt_length[row[::-1]] = position[::-1]
        inside &= tokens.position >= tokens.prompt_length[tokens.row]
    return inside


_MAX_MAGNITUDE = 1e6  # larger magnitudes, in nats, count as infinite: masks write the lowest float, or -1e9, for -inf
_LOGPS = {name.removeprefix("logp_"): name for name in (*LOGPS[1:], "logp_rescored", "entropy")}
_FLOATS = ("prompt_length", "reward", "advantage", "temperature", "top_p")
_INTEGERS = {"ids": "response_ids", "version": "policy_version", "turn": "turn"}
"""Columns of `TokenTable` by their roles."""


def normalize(
    batch: Batch, roles: frozenset[str], layout: Layout, tally: ReadCounts, file: int, *, in_loss: bool = True
) -> TokenTable | None:
    """Returns the usable responses of a batch, or None without any. Dropped responses are counted in `tally`.

    roles: roles with a value for every response; with prompt_ids, a response is usable only with all of its ids.
    file: number that distinguishes prompt groups without steps.
    in_loss: False returns the responses that the trainer masks out of its loss, instead of those that it trains on.
    """
    usable = UsableRows(batch.numbers, tally)
    drop_rows(batch, usable, in_loss)
    tokens = align(batch, usable)
    trained = find_trained(tokens, usable)
    inside = find_response(tokens, trained, layout)
    usable.drop(~tokens.having(trained), "no trained token")
    trained &= usable.rows[tokens.row]
    bad = _clear_nonfinite(tokens, trained, tally)
    tally.odd["not-finite"] += int(tokens.having(bad).sum())
    if "prompt_ids" in roles:
        usable.drop(tokens.having(bad), "a log-prob that is not finite")
    usable.drop(~tokens.having(trained & ~bad), NOT_FINITE)
    inside &= ~bad
    if layout.repeats:
        _drop_repeated(tokens, inside, usable, file)
    rows = usable.rows
    if not rows.any():
        return None
    inside &= rows[tokens.row]
    numbers = {name: column[rows] for name, column in batch.scalars.items()}
    keys = {name: column[rows].tolist() for name, column in batch.keys.items()}
    if layout.prompt_groups and "response_ids" in tokens.values:
        hashes = [None if ids is None else hash(ids.tobytes()) for ids in tokens.prompts(rows)]
        keys = {name: hashes for name in ("group", "prompt") if name in roles} | keys
    if "prompt_ids" in roles:
        keys.setdefault("prompt_ids", tokens.prompts(rows))
    if tokens.prompt_length is not None:
        numbers.setdefault("prompt_length", tokens.prompt_length[rows].astype(np.float64))
    values = {name: column if inside.all() else column[inside] for name, column in tokens.values.items()}
    lengths = np.bincount(tokens.row[inside], minlength=len(rows))[rows]
    if layout.synchronous and "proximal_version" not in numbers:
        _assume_current(values, numbers, lengths)
    table = _build_table(lengths, values | {"trained": trained[inside]}, numbers, keys, tally, file)
    _count_table(table, tally)
    return table


def _clear_nonfinite(tokens: TokenLists, trained: np.ndarray, tally: ReadCounts) -> np.ndarray:
    """Returns and counts the trained tokens (tokens,) whose log-probs or entropy are not finite.

    They are removed rather than masked, since an untrained token inside a response would count as the end of a turn. A
    trainer must drop such responses whole; here, one bad token in each response would leave no data. Values at
    untrained tokens (placeholders, padding) become 0, so that no later stage depends on them. Columns become float32.
    """
    bad = np.zeros(len(trained), dtype=np.bool_)
    for name in (LOGPS[0], *_LOGPS.values()):
        if name not in tokens.values:
            continue
        with np.errstate(over="ignore"):  # beyond float32 is infinite, and counted as such
            values = np.array(tokens.values[name], dtype=np.float32)
        invalid = ~(np.abs(values) <= _MAX_MAGNITUDE) & trained
        if name == "logp_rescored":  # only some responses have it: no reason to leave out a token
            values[invalid] = np.nan
        elif invalid.any():
            wrong = values[invalid]
            for kind, where in {"nan": np.isnan(wrong), "inf": wrong > 0, "-inf": wrong < 0}.items():
                if where.any():
                    tally.nonfinite[f"{name} {kind}"] += int(where.sum())
            bad |= invalid
        values[~trained] = 0
        tokens.values[name] = values
    return bad


def _drop_repeated(tokens: TokenLists, inside: np.ndarray, usable: UsableRows, file: int) -> None:
    """Drops rows whose tokens and log-probs are bitwise equal to a row of an earlier file."""
    columns = [tokens.values[name] for name in sorted(tokens.values.keys() & {"response_ids", *LOGPS})]
    repeated = np.zeros(len(usable.rows), dtype=np.bool_)
    for row in np.flatnonzero(usable.rows).tolist():
        span = slice(tokens.starts[row], tokens.starts[row + 1])
        key = hash(tuple(values[span][inside[span]].tobytes() for values in columns))
        repeated[row] = usable.tally.seen.setdefault(key, file) != file
    usable.rows &= ~repeated
    usable.tally.drop("the same response again, in a later file", int(repeated.sum()))


def _assume_current(values: Mapping[str, np.ndarray], numbers: dict[str, np.ndarray], lengths: np.ndarray) -> None:
    """Adds missing versions to the files of a trainer that sends its weights before every generation.

    The trainer's version is the newest among tokens of the same step; without any versions, both are the step.
    """
    step = numbers.get("step", np.zeros(len(lengths)))
    if "policy_version" in values:
        newest = np.maximum.reduceat(values["policy_version"], np.cumsum(lengths) - lengths)
    else:
        newest = numbers.setdefault("policy_version", step)
    _, index = np.unique(step, return_inverse=True)
    current = np.full(len(lengths), -np.inf)
    np.maximum.at(current, index, newest)
    numbers["proximal_version"] = current[index]


def _build_table(
    lengths: np.ndarray,
    values: Mapping[str, np.ndarray],
    numbers: dict[str, np.ndarray],
    keys: Mapping[str, Sequence[Any]],
    tally: ReadCounts,
    file: int,
) -> TokenTable:
    """Returns the table of responses of `lengths`, with `values` (tokens,), and `numbers` and `keys` (responses,)."""
    for role in ("reward", "advantage"):
        if role in numbers:
            tally.unknown[role] += int((~np.isfinite(numbers[role])).sum())
    if "advantage" in values:
        numbers["advantage"] = _average_trained(values["advantage"], values["trained"], lengths)
    if "policy_version" in numbers:
        values = {**values, "policy_version": np.repeat(numbers["policy_version"], lengths)}
    columns = {name: values[role] for name, role in _LOGPS.items() if role in values}
    columns |= {name: numbers[name] for name in _FLOATS if name in numbers}
    with np.errstate(invalid="ignore"):  # no id, version or step is beyond 64 bits
        columns |= {name: values[role].astype(np.int64) for name, role in _INTEGERS.items() if role in values}
        columns |= {name: numbers[name].astype(np.int64) for name in ("step", "proximal_version") if name in numbers}
        if "top_k" in numbers:
            columns["top_k"] = np.nan_to_num(numbers["top_k"], nan=0).astype(np.int64)
    if "logprobs" in numbers:
        columns["raw"] = numbers["logprobs"] == 1
    if "group" in keys:
        steps = numbers["step"].tolist() if "step" in numbers else [("file", file)] * len(lengths)
        columns["group"] = _number_keys(list(zip(steps, keys["group"], strict=True)), tally.groups)
    if "prompt" in keys:
        columns["prompt"] = _number_keys([(key,) for key in keys["prompt"]], tally.prompts)
    if "prompt_ids" in keys:
        columns["prompt_ids"] = np.empty(len(lengths), dtype=object)
        columns["prompt_ids"][:] = keys["prompt_ids"]
    return TokenTable(np.append(0, np.cumsum(lengths)), values["trained"], values["logp_behavior"], **columns)


def _average_trained(values: np.ndarray, trained: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    row = np.repeat(np.arange(len(lengths)), lengths)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.bincount(row, weights=np.where(trained, values.astype(np.float64), 0), minlength=len(lengths))
    return total / np.bincount(row, weights=trained, minlength=len(lengths))


def _number_keys(keys: Sequence[tuple[Hashable, ...]], known: dict[Hashable, int]) -> np.ndarray:
    """Returns the number of each key (keys,). A new key gets the next number; a key that ends in None is always new."""
    return np.array([known.setdefault(object() if key[-1] is None else key, len(known)) for key in keys], np.int64)


def _count_table(table: TokenTable, tally: ReadCounts) -> None:
    trained = table.mask
    tally.responses += table.responses
    tally.tokens += table.tokens
    tally.trained += int(trained.sum())
    if table.anchor:
        tally.equal += int((trained & (table.trainer == table.behavior)).sum())
        tally.zero_trainer += int((trained & (table.trainer == 0)).sum())
        tally.k3_sum += float(k3((table.trainer - table.behavior)[trained]).sum())
    tally.zero += int((trained & (table.behavior == 0)).sum())
    for name, values in zip(LOGPS, (table.behavior, table.proximal, table.current), strict=True):
        if values is not None:
            tally.values.setdefault(name, ValueCounts()).add(values[trained])
