"""`Stream`: responses with the log-probs of sampler and trainer in flat arrays; resampled, changed and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.diagnosis.tokens import k3

JITTER = 1e-4
"""Relative change of both log-probs where a response is drawn again, so that no value is repeated exactly."""
SHARED_PREFIX = 40
"""Number of tokens with which every written prompt of that length begins."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Whole responses; token i of response r is at `starts[r] + i`.

    tokens: columns (tokens,). `behavior` and `trainer` are always there, float64, as they should be reported; `ids`,
    `mask` (trained), `top` (log-prob of the sampler's most probable token), `turn` and `version` are known to `write`
    or to faults; others are the trainer's or the sampler's log-probs under other conditions, such as `trainer@0.7`.
    rows: columns (responses,): `prompt` (a number), `prompt_length`, `step`, `proximal_version`, and `cluster` where
    responses belong together.
    """

    starts: np.ndarray
    tokens: Mapping[str, np.ndarray]
    rows: dict[str, np.ndarray] = field(default_factory=dict)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tokens[name]

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def responses(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @cached_property
    def row(self) -> np.ndarray:
        """The response of each token."""
        return np.repeat(np.arange(self.responses), self.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """The position of each token in its response."""
        return np.arange(len(self)) - np.repeat(self.starts[:-1], self.lengths)

    @property
    def left(self) -> np.ndarray:
        """The number of tokens that follow each token in its response."""
        return np.repeat(self.starts[1:], self.lengths) - np.arange(len(self)) - 1

    @property
    def mask(self) -> np.ndarray:
        """The trained tokens."""
        return self.tokens.get("mask", np.ones(len(self), dtype=bool))

    @property
    def k3(self) -> float:
        """Mean k3 of trainer over sampler at trained tokens with finite values."""
        log_ratio = (self["trainer"] - self["behavior"])[self.mask]
        log_ratio = log_ratio[np.isfinite(log_ratio)]
        return float(k3(log_ratio).mean()) if len(log_ratio) else 0.0

    def changed(self, **columns: np.ndarray) -> Stream:
        """Returns the stream with columns of tokens replaced or added."""
        return replace(self, tokens={**self.tokens, **columns})

    def take(self, rows: np.ndarray) -> Stream:
        """Returns the responses `rows`, in that order; a response may be taken several times."""
        lengths = self.lengths[rows]
        starts = np.append(0, np.cumsum(lengths))
        index = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], lengths)
        tokens = {name: values[index] for name, values in self.tokens.items()}
        return Stream(starts, tokens, {name: values[rows] for name, values in self.rows.items()})

    def keeping(self, tokens: np.ndarray) -> Stream:
        """Returns the stream with the marked tokens (tokens,) only."""
        lengths = np.bincount(self.row, tokens, self.responses).astype(np.int64)
        chosen = {name: values[tokens] for name, values in self.tokens.items()}
        return Stream(np.append(0, np.cumsum(lengths)), chosen, self.rows)

    def resampled(self, tokens: int, random: np.random.Generator) -> Stream:
        """Returns whole responses at random until there are `tokens` tokens, each once before any is drawn again.

        Responses of one `cluster` (a column of rows) are drawn together, and are of another prompt when drawn again.
        The order of responses with a step is kept. Log-probs of responses drawn again are changed by `JITTER`.
        """
        cluster = self.rows.get("cluster", np.arange(self.responses))
        members = np.argsort(cluster, kind="stable")
        bounds = np.searchsorted(cluster[members], np.arange(cluster.max() + 2))
        order = np.concatenate(
            [
                members[bounds[one] : bounds[one + 1]]
                for _ in range(1 + tokens // len(self))
                for one in random.permutation(cluster.max() + 1)
            ]
        )
        order = order[: int(np.searchsorted(np.cumsum(self.lengths[order]), tokens)) + 1]
        again = np.arange(len(order)) // self.responses
        if "step" in self.rows:
            sort = np.argsort(self.rows["step"][order], kind="stable")
            order, again = order[sort], again[sort]
        result, repeated = self.take(order), again > 0
        if "cluster" in self.rows:
            result.rows["prompt"] = result.rows["prompt"] + (1 + self.rows["prompt"].max()) * again
        factor = np.where(repeated[result.row], 1 + JITTER * random.uniform(-1, 1, len(result)), 1.0)
        logps = {name: values * factor for name, values in result.tokens.items() if values.dtype == np.float64}
        return result.changed(**logps)

    def write(self, path: Path, *, bare: bool = False) -> None:
        """Writes the columns of Trimtab's trajectory file. `bare`: only the two log-probs and the mask, if any.

        A token column `null` marks values of the sampler that are written as null.
        """
        columns = {name: self._lists(values, kind, null) for name, values, kind, null in self._token_columns(bare)}
        if not bare:
            if "prompt" in self.rows:
                prompts = self.rows["prompt"]
                lengths = self.rows.get("prompt_length", np.full(self.responses, 12))
                columns["prompt_id"] = pa.array([f"prompt-{number}" for number in prompts])
                columns["prompt_ids"] = pa.array([prompt_ids(*item) for item in zip(prompts, lengths, strict=True)])
            for name in ("step", "proximal_version"):
                if name in self.rows:
                    columns[name] = pa.array(self.rows[name])
        pq.write_table(pa.table(columns), path, compression="none")

    def _token_columns(self, bare: bool) -> list[tuple[str, np.ndarray, Any, np.ndarray | None]]:
        result: list[tuple[str, np.ndarray, Any, np.ndarray | None]] = [
            ("logp_behavior", self["behavior"], pa.float32(), self.tokens.get("null")),
            ("logp_proximal", self["trainer"], pa.float32(), None),
        ]
        if "mask" in self.tokens:
            result.append(("loss_mask", self["mask"], pa.bool_(), None))
        optional = () if bare else (("response_ids", "ids"), ("turn", "turn"), ("policy_version", "version"))
        return result + [(name, self[own], pa.int64(), None) for name, own in optional if own in self.tokens]

    def _lists(self, values: np.ndarray, kind: Any, null: np.ndarray | None) -> Any:
        return pa.ListArray.from_arrays(pa.array(self.starts, pa.int32()), pa.array(values, kind, mask=null))


def joined(parts: list[Stream]) -> Stream:
    """Returns streams with equal columns as one."""
    starts = np.append(0, np.cumsum(np.concatenate([part.lengths for part in parts])))
    tokens = {name: np.concatenate([part.tokens[name] for part in parts]) for name in parts[0].tokens}
    rows = {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows}
    return Stream(starts, tokens, rows)


def prompt_ids(number: int, length: int) -> list[int]:
    """The ids of a prompt: a prefix that all prompts share, then ids of its own."""
    own = max(2, length - SHARED_PREFIX)
    return [*range(1, length - own + 1), 1000 + number // 1000, *[2000 + number % 1000] * (own - 1)]
