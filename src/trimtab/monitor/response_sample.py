"""A sample of responses of bounded size, uniform over everything observed, for `trimtab diagnose`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from trimtab.files import replace_file
from trimtab.text import json_value

Columns = Mapping[str, Tensor | Sequence[Any] | None]
"""Column name -> values; a column that is None is left out."""


def response_rows(length: Tensor, tokens: Columns, responses: Columns) -> Iterator[dict[str, Any]]:
    """Yields a row for each response of a padded batch.

    length: (batch,) tokens of each response, trained or not; the rest is padding. tokens: columns of (batch, time).
    responses: columns with one value per response. A number that is not finite becomes null.
    """
    of_tokens, of_responses = (
        json_value({name: values for name, values in columns.items() if values is not None})
        for columns in (tokens, responses)
    )
    for index, size in enumerate(length.tolist()):
        cut = {name: values[index][:size] for name, values in of_tokens.items()}
        yield cut | {name: values[index] for name, values in of_responses.items()}


def trained_length(mask: Bool[Tensor, "batch time"]) -> Tensor:
    """Returns (batch,) the number of tokens of each response up to its last trained one."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.nn.functional.pad(mask * positions, (1, 0)).amax(1)


class _Response(NamedTuple):
    """A kept response. In the file, responses are sorted by these fields."""

    step: int
    drawn: float  # its random number
    trained: int  # number of its trained tokens
    line: str  # its columns as JSON


class ResponseSample:
    """Keeps whole responses with about `limit` trained tokens.

    Every response draws a random number, and those with the smallest numbers are kept (bottom-k sampling). So each
    observed response has the same chance, whichever step it is from.
    """

    def __init__(self, limit: int, seed: int) -> None:
        self.limit = limit
        self._random = np.random.default_rng(seed)
        self._threshold = 1.0
        self._kept: list[_Response] = []
        self._tokens = 0  # trained tokens of all kept responses
        self._written: int | None = None  # responses in the file; None if it must be rewritten

    def add(self, mask: Bool[Tensor, "batch time"], columns: Mapping[str, Any]) -> None:
        """Adds responses. columns: (batch, time), (batch,), or one value for all, as for `step`; None is left out.

        A response ends with its last trained token. Only the kept responses are copied from the device.
        """
        drawn = self._random.random(len(mask))
        chosen = np.flatnonzero(drawn < self._threshold)
        if len(chosen) == 0:
            return
        index = torch.from_numpy(chosen).to(mask.device)
        kept = mask[index]
        tokens, responses = {"loss_mask": kept}, {}
        for name, values in columns.items():
            if isinstance(values, Tensor) and values.ndim:
                table = tokens if values.shape == mask.shape else responses
                table[name] = values.detach()[index.to(values.device)]
            elif values is not None:
                responses[name] = [values] * len(index)
        rows = response_rows(trained_length(kept), tokens, responses)
        for row, trained, number in zip(rows, kept.sum(1).tolist(), drawn[chosen].tolist(), strict=True):
            if trained:
                self._kept.append(_Response(row["step"], number, trained, json.dumps(row) + "\n"))
                self._tokens += trained
        if self._tokens > 1.25 * self.limit:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drops the responses with the largest numbers until the limit is met."""
        ordered = sorted(self._kept, key=lambda response: response.drawn)
        tokens = np.cumsum([response.trained for response in ordered])
        kept = max(1, int(np.searchsorted(tokens, self.limit, side="right")))
        if kept < len(ordered):
            self._threshold, self._written = ordered[kept].drawn, None
            self._kept, self._tokens = ordered[:kept], int(tokens[kept - 1])

    def write(self, path: Path) -> None:
        """Writes JSON lines in the columns of Trimtab's trajectory files, whole or not at all."""
        replace_file(path, "".join(_lines(self._kept)).encode())
        self._written = len(self._kept)

    def flush(self, path: Path) -> None:
        """Appends the new responses to the file, or rewrites it if responses were dropped, which becomes rare."""
        if self._written is None:
            self.write(path)
            return
        new, self._written = self._kept[self._written :], None  # rewritten next time if this fails
        with path.open("a", encoding="utf-8") as file:
            file.writelines(_lines(new))
        self._written = len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def _lines(responses: Iterable[_Response]) -> list[str]:
    """Returns the lines of responses by step."""
    return [response.line for response in sorted(responses)]
