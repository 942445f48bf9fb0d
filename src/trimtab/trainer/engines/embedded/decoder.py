"""Token-by-token decoding of a batch: the interface, and the implementation for any causal model.

A decoder serves one batch: it runs each prompt and each distinct prefix once, in parallel, then decodes all rows in
lockstep from the cached keys and values. If routed experts are recorded (R3, docs/routing.md), `ExpertRecorder` assigns
the choices on the model's routing tape, which are in the order of the forward passes, to tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from trimtab.trainer.engines.decoding_rows import DecodingRow
from trimtab.trainer.models.routing import RoutingTape
from trimtab.types import ExpertArray, Prompt

# Largest number of prompt tokens in one forward pass. More tokens take more memory without being faster.
PREFILL_TOKENS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPlan:
    """What a batch runs through the model before sampling: distinct pairs of a prompt and a response prefix ("starts").

    Rows of one prompt are adjacent.
    """

    prompts: list[Tensor]  # distinct prompts
    prefixes: list[Tensor]  # of each start; may be empty
    prompt: Tensor  # (starts,), index of the prompt of each start
    row: Tensor  # (rows,), index of the start of each row


def plan_prefill(rows: Sequence[DecodingRow], prompts: Sequence[Prompt], device: torch.device) -> PrefillPlan:
    """Returns the distinct pairs of prompt and prefix among rows before their first step.

    Rows of one prompt must be adjacent.
    """
    used = {p: i for i, p in enumerate(dict.fromkeys(row.prompt for row in rows))}
    starts: dict[tuple[int, tuple[int, ...]], int] = {}
    start_of_row = [starts.setdefault((used[row.prompt], tuple(row.ids)), len(starts)) for row in rows]
    return PrefillPlan(
        prompts=[torch.as_tensor(prompts[p].ids, dtype=torch.int64, device=device) for p in used],
        prefixes=[torch.tensor(ids, dtype=torch.int64, device=device) for _, ids in starts],
        prompt=torch.tensor([prompt for prompt, _ in starts], device=device),
        row=torch.tensor(start_of_row, device=device),
    )


class Decoder(Protocol):
    """Decodes one batch of rows."""

    first: Tensor  # (rows, vocabulary), logits after the prompt and prefix of each row
    prefilled: int  # number of tokens that were run to compute `first`

    def step(self, tokens: Tensor, paused: Tensor | None = None) -> Tensor:
        """Appends one of `tokens` (rows,) to every row; returns the logits after it, (rows, vocabulary).

        The rows at the indices `paused` do not change; their tokens and logits have no meaning. The next step may
        overwrite the logits.
        """
        ...

    def keep(self, index: Tensor) -> None:
        """Removes all rows from the batch except those at the indices `index`."""
        ...


def prefill_blocks(lengths: Sequence[int], before: int = 0) -> list[list[int]]:
    """Returns the indices of the texts in each block; a block has at most `PREFILL_TOKENS` tokens after padding.

    Texts of similar length share a block. `before` is the number of tokens ahead of each text that are attended to but
    not run; they take memory as well.
    """
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if blocks and (len(blocks[-1]) + 1) * (before + lengths[i]) <= PREFILL_TOKENS:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


class PromptGrid:
    """The rows of a batch grouped by prompt: all rows of a prompt attend to the prompt's keys in one matrix product.

    The argument `prompt` (rows,) holds the prompt of each row, in ascending order. `used` (prompts,) holds the prompts
    that have rows; the attribute `prompt` (rows,) holds indices into `used`.
    """

    def __init__(self, prompt: Tensor) -> None:
        self.used, self.prompt, counts = prompt.unique(return_inverse=True, return_counts=True)
        self._shape = len(self.used), int(counts.max())
        nth = torch.arange(len(prompt), device=prompt.device) - (counts.cumsum(0) - counts)[self.prompt]
        full = len(prompt) == self._shape[0] * self._shape[1]
        self._slot = None if full else self.prompt * self._shape[1] + nth

    def to_grid(self, rows: Float[Tensor, "rows heads group x"]) -> Float[Tensor, "prompts heads more x"]:
        """Arranges the rows of each prompt along `more`, padded to the largest number of rows of a prompt."""
        prompts, most = self._shape
        if self._slot is not None:
            grid = rows.new_zeros(prompts * most, *rows.shape[1:])
            grid[self._slot] = rows
            rows = grid
        return rows.view(prompts, most, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)

    def to_rows(self, grid: Float[Tensor, "prompts heads more x"], group: int) -> Float[Tensor, "rows heads group x"]:
        """Inverts `to_grid`: removes its padding, and any further padding along `more`."""
        most = self._shape[1]
        rows = grid[:, :, : most * group].unflatten(2, (most, group)).transpose(1, 2).flatten(0, 1)
        return rows if self._slot is None else rows[self._slot]


class ExpertRecorder:
    """Collects the routed experts of one batch. A decoder calls `prompts` and `starts` after its prefill passes.

    The last token of a response is never run. A response of n tokens therefore has one entry for each prompt token and
    n - 1 entries for its own tokens.
    """

    def __init__(self, tape: RoutingTape) -> None:
        self._tape = tape
        self._prompts: dict[int, ExpertArray] = {}
        self._starts: dict[int, ExpertArray] = {}

    def prompts(self, index: Sequence[int], real: Tensor) -> None:
        """Records a forward pass over the prompts at `index`; `real` (prompts, time) is False at padding."""
        self._prompts |= zip(index, self._split(real), strict=True)

    def starts(self, index: Sequence[int], real: Tensor) -> None:
        """Records a forward pass over the prefixes of the starts at `index`, or over their prompts and prefixes."""
        self._starts |= zip(index, self._split(real), strict=True)

    def begin(self, rows: Sequence[DecodingRow], prompt: Sequence[int], start: Sequence[int]) -> None:
        """Assigns the recorded prefill to rows; `start` holds each row's start, `prompt` each start's prompt.

        A prefix keeps the experts that it carries, because its tokens were sampled under them. Only its last token,
        which was not run before, gets a new entry.
        """
        for row, index_of_start in zip(rows, start, strict=True):
            # Prompts and prefixes were run in separate passes, or as one text per start.
            parts = [self._prompts[prompt[index_of_start]]] if self._prompts else []
            if row.prefix_length or not parts:
                parts.append(self._starts[index_of_start])
            previous = None if row.prefix is None else row.prefix.routed_experts
            if previous is not None:
                parts = [previous, np.concatenate(parts)[len(previous) :]]
            row.routes = parts

    def step(self, rows: Sequence[DecodingRow], live: Sequence[bool]) -> None:
        """Records a step, which ran the last token of each row; rows that are not `live` are skipped."""
        for row, alive, experts in zip(rows, live, self._tape.take().cpu().numpy(), strict=True):
            if alive:
                row.routes.append(experts[None])

    def _split(self, real: Tensor) -> list[ExpertArray]:
        counts = real.sum(-1).cumsum(0).tolist()
        choices = self._tape.take().cpu().numpy()
        return np.split(choices[real.flatten().cpu().numpy()], counts[:-1])


class CachedDecoder:
    """Decodes with any transformers causal model through its own forward and cache.

    A prompt and a prefix are run as one text. Texts are padded on the left, so that distances inside a sliding window
    are correct. `recorder` receives the routed experts of the prefill.
    """

    def __init__(self, model: Any, starts: PrefillPlan, recorder: ExpertRecorder | None = None) -> None:
        self._model = model
        texts = [
            torch.cat([starts.prompts[p], prefix])
            for p, prefix in zip(starts.prompt.tolist(), starts.prefixes, strict=True)
        ]
        self.prefilled = sum(len(ids) for ids in texts)
        width, start_of_row = max(len(ids) for ids in texts), starts.row
        mask = torch.stack([F.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in texts])
        tokens = torch.stack([F.pad(ids, (width - len(ids), 0)) for ids in texts])
        # All layers keep all positions: a sliding-window layer that drops old positions does not support left padding.
        self._cache = Cache(layer_class_to_replicate=DynamicLayer)
        out = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if recorder is not None:
            recorder.starts(range(len(texts)), mask.bool())
        self.first = out.logits[start_of_row, -1]
        self._mask = mask[start_of_row]
        self._position = mask.sum(-1)[start_of_row].unsqueeze(-1)
        # Limit of learned positions: a finished row that is still in the batch may run past the context.
        self._context: int | None = getattr(model.config, "max_position_embeddings", None)
        self._cache.batch_select_indices(start_of_row)

    def step(self, tokens: Tensor, paused: Tensor | None = None) -> Tensor:
        self._mask = F.pad(self._mask, (0, 1), value=1)
        out = self._model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=self._mask,
            position_ids=self._position if self._context is None else self._position.clamp(max=self._context - 1),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._position = self._position + 1
        if paused is not None:
            self._position[paused] -= 1
            self._shift_right(paused)
        return out.logits[:, -1]

    def _shift_right(self, rows: Tensor) -> None:
        """Removes the last token of `rows`, aligns them on the right again, and removes padding common to all rows."""
        self._mask[rows] = F.pad(self._mask[rows, :-1], (1, 0))
        left = int(self._mask.any(0).int().argmax())
        self._mask = self._mask[:, left:]
        layers: list[Any] = self._cache.layers
        for layer in layers:
            for states in (layer.keys, layer.values):
                states[rows, :, 1:] = states[rows, :, :-1]
            layer.keys, layer.values = layer.keys[:, :, left:], layer.values[:, :, left:]

    def keep(self, index: Tensor) -> None:
        self._mask = self._mask[index]
        self._position = self._position[index]
        self._cache.batch_select_indices(index)
