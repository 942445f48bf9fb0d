"""`TokenTable`: tokens of whole responses with their log-probs, in flat arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch

from trimtab.corrections import divergences
from trimtab.corrections.ratios import ratio_excess

MAX_ROUNDED_LOGP = 1e-4  # largest positive value that counts as log 1 with a rounding error


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """Returns `corrections.divergences.k3` of an array, in float64."""
    return divergences.k3(_float64(log_ratio)).numpy()


def excess(log_ratio: np.ndarray) -> np.ndarray:
    """Returns `corrections.ratios.ratio_excess` (ratio - 1) of an array, in float64."""
    return ratio_excess(_float64(log_ratio)).numpy()


def _float64(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Whole responses in flat arrays: token i of response r is at `starts[r] + i`. A column the data lacks is None.

    Columns from `step` on are (responses,), all others (tokens,). Log-probs and entropy are float32, in nats; `step`,
    `group`, `version` and other integers are int64; reward, advantage, temperature and top_p are float64.
    """

    starts: np.ndarray  # (responses + 1,)
    mask: np.ndarray  # bool: the trained tokens
    behavior: np.ndarray  # log-probs as the sampler reported them
    proximal: np.ndarray | None = None
    current: np.ndarray | None = None
    rescored: np.ndarray | None = None  # log-probs of the same ids, scored again by `trimtab rescore`
    ids: np.ndarray | None = None
    entropy: np.ndarray | None = None
    version: np.ndarray | None = None  # policy version that sampled the token, in updates
    turn: np.ndarray | None = None  # number of the model turn, from 0; an observation belongs to the turn before it
    step: np.ndarray | None = None
    group: np.ndarray | None = None
    prompt: np.ndarray | None = None  # the same number for all responses to one prompt, in every step
    prompt_ids: np.ndarray | None = None  # object: int64 ids before the response, read for `trimtab rescore` only
    proximal_version: np.ndarray | None = None
    prompt_length: np.ndarray | None = None  # float64: number of tokens before the response; NaN if unknown
    reward: np.ndarray | None = None
    advantage: np.ndarray | None = None
    temperature: np.ndarray | None = None
    top_p: np.ndarray | None = None
    top_k: np.ndarray | None = None  # 0 for none
    raw: np.ndarray | None = None  # bool: log-probs are from before temperature and truncation

    @property
    def responses(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def trainer(self) -> np.ndarray:
        """The trainer's log-probs: proximal, or current if there is no proximal."""
        assert self.anchor is not None, "the table has neither proximal nor current"
        return getattr(self, self.anchor)

    @property
    def anchor(self) -> str | None:
        """The column with the trainer's log-probs: proximal, else current; None without either."""
        return "proximal" if self.proximal is not None else "current" if self.current is not None else None

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each response (responses,)."""
        return np.diff(self.starts)

    @cached_property
    def row(self) -> np.ndarray:
        """The response each token belongs to (tokens,)."""
        return self.at_tokens(np.arange(self.responses))

    @cached_property
    def position(self) -> np.ndarray:
        """The position of each token in its response (tokens,)."""
        return np.arange(self.tokens) - self.at_tokens(self.starts[:-1])

    @cached_property
    def age(self) -> np.ndarray | None:
        """The number of updates between the weights that sampled each token and the trainer's; None if unknown."""
        if self.version is None or self.proximal_version is None:
            return None
        return self.at_tokens(self.proximal_version) - self.version

    @cached_property
    def turn_number(self) -> np.ndarray:
        """`turn`; without it, a turn is a stretch of trained tokens and the untrained tokens up to the next stretch."""
        if self.turn is not None or not self.tokens:
            return np.zeros(0, dtype=np.int64) if self.turn is None else self.turn
        begins = self.mask & ((self.position == 0) | ~np.concatenate([[False], self.mask[:-1]]))
        count = np.cumsum(begins) - self.at_tokens(np.concatenate([[0], np.cumsum(begins)])[self.starts[:-1]])
        return np.maximum(count - 1, 0)

    @property
    def sampling(self) -> dict[str, np.ndarray]:
        """The known values (any,) of temperature, top_p and top_k, by name."""
        columns = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        known = {name: values[np.isfinite(values)] for name, values in columns.items() if values is not None}
        return {name: values for name, values in known.items() if len(values)}

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns that the data has, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)[1:]}
        return {name: value for name, value in values.items() if value is not None}

    def at_tokens(self, values: np.ndarray) -> np.ndarray:
        """Returns a value of each response at each of its tokens (tokens,)."""
        return np.repeat(values, self.lengths)

    def select(self, keep: np.ndarray, longest: int | None = None) -> TokenTable:
        """Returns the responses where `keep` (responses,) is True, each truncated to at most `longest` tokens."""
        lengths = self.lengths if longest is None else np.minimum(self.lengths, longest)
        lengths = np.where(keep, lengths, 0)
        shift = self.starts[:-1] - (np.cumsum(lengths) - lengths)
        index = np.arange(lengths.sum()) + np.repeat(shift, lengths)
        return self._taken(np.append(0, np.cumsum(lengths[keep])), keep, index)

    def without(self, bad: np.ndarray) -> TokenTable:
        """Returns all responses without the tokens where `bad` (tokens,) is True."""
        return self._taken(np.append(0, np.cumsum(~bad))[self.starts], slice(None), ~bad)

    def split(self, tokens: int) -> Iterator[TokenTable]:
        """Yields parts of at most `tokens` tokens, or of one longer response. Their columns are views."""
        first = 0
        while first < self.responses:
            last = int(np.searchsorted(self.starts, self.starts[first] + tokens, side="right")) - 1
            last = min(max(last, first + 1), self.responses)
            start, end = self.starts[first], self.starts[last]
            yield self._taken(self.starts[first : last + 1] - start, slice(first, last), slice(start, end))
            first = last

    def _taken(self, starts: np.ndarray, responses: np.ndarray | slice, tokens: np.ndarray | slice) -> TokenTable:
        chosen = {name: values[responses if name in _PER_RESPONSE else tokens] for name, values in self.columns.items()}
        return replace(self, starts=starts, **chosen)

    @staticmethod
    def concat(parts: Sequence[TokenTable]) -> TokenTable:
        """Joins tables with the same columns into one table."""
        if len(parts) == 1:
            return parts[0]
        columns = [part.columns for part in parts]
        joined = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
        starts = np.append(0, np.cumsum(np.concatenate([part.lengths for part in parts])))
        return replace(parts[0], starts=starts, **joined)


_NAMES = [item.name for item in fields(TokenTable)]
_PER_RESPONSE = frozenset(_NAMES[_NAMES.index("step") :])
