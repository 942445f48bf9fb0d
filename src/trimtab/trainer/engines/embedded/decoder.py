"""Token-by-token decoding of a batch: the interface, and the implementation for any causal model.

A decoder serves one batch: it runs each prompt and each distinct prefix once, in parallel, then decodes all rows in
lockstep from the cached keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from trimtab.trainer.engines.decoding_rows import PrefillPlan
from trimtab.trainer.engines.embedded.expert_recorder import ExpertRecorder

# Tokens of prompts that are run through the model together. More cost memory without being faster.
PREFILL_TOKENS = 4096
# Added to a batch whose rows waited for so long that its positions are used up.
EXTRA_POSITIONS = 32


class Decoder(Protocol):
    """Decodes one batch of rows.

    `first` holds the logits after each row's prompt and prefix, (rows, vocabulary); `prefilled` is the number of tokens
    that were run for them.
    """

    first: Tensor
    prefilled: int

    def step(self, tokens: Tensor, paused: Tensor | None = None) -> Tensor:
        """Appends one token to every row, (rows,) ids, and returns the logits after it, (rows, vocabulary).

        Rows of the index `paused` do not change; their token and logits have no meaning. The next step may overwrite
        the logits.
        """
        ...

    def keep(self, index: Tensor) -> None:
        """Removes all rows from the batch except those of `index`."""
        ...


def prefill_blocks(lengths: Sequence[int], before: int = 0) -> list[list[int]]:
    """Groups texts by similar length into blocks of at most `PREFILL_TOKENS` tokens after padding.

    Returns the indices of the texts of each block. `before` counts the tokens ahead of each text that are attended to
    but not run; they take memory as well.
    """
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if blocks and (len(blocks[-1]) + 1) * (before + lengths[i]) <= PREFILL_TOKENS:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


class PromptGrid:
    """The rows of a batch by prompt, for attention of all rows of a prompt to its keys in one product.

    Args:
        prompt: the prompt of each row, (rows,), ascending.

    Attributes:
        used: the prompts that have rows, (prompts,).
        prompt: of each row, as an index into `used`.
    """

    def __init__(self, prompt: Tensor) -> None:
        self.used, self.prompt, counts = prompt.unique(return_inverse=True, return_counts=True)
        self._shape = len(self.used), int(counts.max())
        nth = torch.arange(len(prompt), device=prompt.device) - (counts.cumsum(0) - counts)[self.prompt]
        full = len(prompt) == self._shape[0] * self._shape[1]
        self._slot = None if full else self.prompt * self._shape[1] + nth

    def to_grid(self, rows: Float[Tensor, "rows heads group x"]) -> Float[Tensor, "prompts heads more x"]:
        """Arranges the rows of each prompt along `more`, with padding where another prompt has more of them."""
        prompts, most = self._shape
        if self._slot is not None:
            grid = rows.new_zeros(prompts * most, *rows.shape[1:])
            grid[self._slot] = rows
            rows = grid
        return rows.view(prompts, most, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)

    def to_rows(self, grid: Float[Tensor, "prompts heads more x"], group: int) -> Float[Tensor, "rows heads group x"]:
        """Returns the inverse of `to_grid`; what follows the rows along `more` is dropped."""
        most = self._shape[1]
        rows = grid[:, :, : most * group].unflatten(2, (most, group)).transpose(1, 2).flatten(0, 1)
        return rows if self._slot is None else rows[self._slot]


class CachedDecoder:
    """Decodes with any transformers causal model through its own forward and a preallocated key-value cache.

    A prompt and a prefix are run as one text. Texts are padded on the left, so that distances inside a sliding window
    are correct. `capacity` is the largest number of steps; `recorder` receives the routed experts of the prefill.
    """

    def __init__(self, model: Any, starts: PrefillPlan, capacity: int, recorder: ExpertRecorder | None = None) -> None:
        self._model = model
        texts = [
            torch.cat([starts.prompts[p], prefix])
            for p, prefix in zip(starts.prompt.tolist(), starts.prefixes, strict=True)
        ]
        self.prefilled = sum(len(ids) for ids in texts)
        width, start_of_row = max(len(ids) for ids in texts), starts.row
        mask = torch.stack([F.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in texts])
        tokens = torch.stack([F.pad(ids, (width - len(ids), 0)) for ids in texts])
        # All layers keep all positions: a sliding-window layer that drops old ones does not support left padding.
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        out = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if recorder is not None:
            recorder.starts(range(len(texts)), mask.bool())
        self.first = out.logits[start_of_row, -1]
        self._mask = F.pad(mask[start_of_row], (0, capacity), value=1)
        self._position = mask.sum(-1)[start_of_row].unsqueeze(-1)
        # A finished row that is not removed yet may exceed the context, where learned positions end.
        self._last_position = (getattr(model.config, "max_position_embeddings", None) or width + capacity) - 1
        self._filled = width
        self._layers = [_PreallocatedLayer(layer, start_of_row, capacity) for layer in cache.layers]
        self._cache = DynamicCache()
        self._cache.layers = list[Any](self._layers)

    def step(self, tokens: Tensor, paused: Tensor | None = None) -> Tensor:
        if self._filled == self._mask.shape[1]:
            self._make_room()
        self._filled += 1
        out = self._model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=self._mask[:, : self._filled],
            position_ids=self._position.clamp(max=self._last_position),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._position = self._position + 1
        if paused is not None:
            self._position[paused] -= 1
            self._shift_right(paused)
        return out.logits[:, -1]

    def _shift_right(self, rows: Tensor) -> None:
        """Removes the last token of `rows`, whose other tokens stay aligned on the right."""
        end = self._filled
        self._mask[rows, 1:end] = self._mask[rows, : end - 1]
        self._mask[rows, 0] = 0
        for layer in self._layers:
            layer.shift_right(rows)

    def _make_room(self) -> None:
        """Removes the positions on the left that are padding in every row; without any it adds positions."""
        left = int(self._mask[:, : self._filled].any(0).int().argmax())
        self._mask = F.pad(self._mask[:, left:], (0, left or EXTRA_POSITIONS), value=1)
        self._filled -= left
        for layer in self._layers:
            layer.make_room(left)

    def keep(self, index: Tensor) -> None:
        self._mask = self._mask[index]
        self._position = self._position[index]
        self._cache.batch_select_indices(index)


class _PreallocatedLayer(DynamicLayer):
    """One layer's cache in storage that is allocated once, (rows, heads, prompt + capacity, head size)."""

    def __init__(self, prompt: Any, start_of_row: Tensor, capacity: int) -> None:
        super().__init__()
        self._length = prompt.keys.shape[-2]
        self._keys, self._values = (
            self._allocate(states, start_of_row, capacity) for states in (prompt.keys, prompt.values)
        )
        self.keys, self.values = self._view()
        self.dtype, self.device = self._keys.dtype, self._keys.device
        self.is_initialized = True

    @staticmethod
    def _allocate(states: Tensor, start_of_row: Tensor, capacity: int) -> Tensor:
        _, heads, length, size = states.shape
        storage = states.new_empty(len(start_of_row), heads, length + capacity, size)
        storage[:, :, :length] = states[start_of_row]
        return storage

    def _view(self) -> tuple[Tensor, Tensor]:
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self._length + key_states.shape[-2]
        self._keys[:, :, self._length : end] = key_states
        self._values[:, :, self._length : end] = value_states
        self._length = end
        self.keys, self.values = self._view()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    def shift_right(self, rows: Tensor) -> None:
        for states in (self._keys, self._values):
            states[rows, :, 1 : self._length] = states[rows, :, : self._length - 1]

    def make_room(self, left: int) -> None:
        """Removes the first `left` positions; with none it adds `EXTRA_POSITIONS`."""
        self._keys, self._values = (
            F.pad(states[:, :, left:], (0, 0, 0, left or EXTRA_POSITIONS)) for states in (self._keys, self._values)
        )
        self._length -= left
        self.keys, self.values = self._view()

    def batch_select_indices(self, indices: Tensor) -> None:
        self._keys, self._values = self._keys[indices], self._values[indices]
        self.keys, self.values = self._view()
