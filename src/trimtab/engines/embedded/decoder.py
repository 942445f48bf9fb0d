"""Token-by-token decoding of a batch: the interface, and the implementation for any causal model.

A decoder is made for one batch: it runs each prompt and each distinct prefix once, in parallel, then grows all rows in
lockstep. Rows start from the keys and values of their prompt and prefix; these are never run through the model again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from trimtab.engines.embedded.decoding_rows import PrefillPlan
from trimtab.engines.embedded.expert_recorder import ExpertRecorder

# Prompts run through the model together; more only costs memory.
PREFILL_TOKENS = 4096


class Decoder(Protocol):
    """`first` is (rows, vocabulary): the logits after each row's prompt and prefix; `prefilled` counts their tokens."""

    first: Tensor
    prefilled: int

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to every row, (rows,) ids, and return the logits after it, (rows, vocabulary)."""
        ...

    def keep(self, index: Tensor) -> None:
        """Let all rows but those of `index` leave the batch."""
        ...


def prefill_blocks(lengths: Sequence[int], before: int = 0) -> list[list[int]]:
    """Positions of texts in blocks of similar length, each padded to at most `PREFILL_TOKENS` tokens.

    `before` tokens ahead of each text are attended to but not run; they take memory as well.
    """
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if blocks and (len(blocks[-1]) + 1) * (before + lengths[i]) <= PREFILL_TOKENS:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


class CachedDecoder:
    """Any transformers causal model with a key-value cache, through its own forward and a preallocated cache.

    A prompt and a prefix are run as one text. Texts are padded on the left, so that a sliding window sees true
    distances. `capacity` bounds the steps; `recorder` is told what each pass but the steps has run.
    """

    def __init__(self, model: Any, starts: PrefillPlan, capacity: int, recorder: ExpertRecorder | None = None) -> None:
        self._model = model
        texts = [
            torch.cat([starts.prompts[p], prefix])
            for p, prefix in zip(starts.prompt.tolist(), starts.prefixes, strict=True)
        ]
        self.prefilled = sum(len(ids) for ids in texts)
        width, owner = max(len(ids) for ids in texts), starts.row
        mask = torch.stack([F.pad(torch.ones_like(ids), (width - len(ids), 0)) for ids in texts])
        tokens = torch.stack([F.pad(ids, (width - len(ids), 0)) for ids in texts])
        # All layers keep everything: a layer that dropped what leaves its window could not be padded on the left.
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
        self.first = out.logits[owner, -1]
        self._mask = F.pad(mask[owner], (0, capacity), value=1)
        self._position = mask.sum(-1)[owner].unsqueeze(-1)
        # A finished row that has not left yet may grow past the context, where learned positions end.
        self._last_position = (getattr(model.config, "max_position_embeddings", None) or width + capacity) - 1
        self._filled = width
        self._cache = DynamicCache()
        self._cache.layers = list[Any](_Slab(layer, owner, capacity) for layer in cache.layers)

    def step(self, tokens: Tensor) -> Tensor:
        self._filled += 1
        out = self._model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=self._mask[:, : self._filled],
            position_ids=self._position.clamp(max=self._last_position),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._position = self._position + 1
        return out.logits[:, -1]

    def keep(self, index: Tensor) -> None:
        self._mask = self._mask[index]
        self._position = self._position[index]
        self._cache.batch_select_indices(index)


class _Slab(DynamicLayer):
    """One layer's keys and values in storage allocated once, (rows, heads, prompt + capacity, head size)."""

    def __init__(self, prompt: Any, owner: Tensor, capacity: int) -> None:
        super().__init__()
        self._length = prompt.keys.shape[-2]
        self._keys, self._values = (self._spread(states, owner, capacity) for states in (prompt.keys, prompt.values))
        self.keys, self.values = self._view()
        self.dtype, self.device = self._keys.dtype, self._keys.device
        self.is_initialized = True

    @staticmethod
    def _spread(states: Tensor, owner: Tensor, capacity: int) -> Tensor:
        _, heads, length, size = states.shape
        slab = states.new_empty(len(owner), heads, length + capacity, size)
        slab[:, :, :length] = states[owner]
        return slab

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

    def batch_select_indices(self, indices: Tensor) -> None:
        self._keys, self._values = self._keys[indices], self._values[indices]
        self.keys, self.values = self._view()
