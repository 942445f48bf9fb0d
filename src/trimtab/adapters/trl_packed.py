"""Unpacks the responses of a packed row of TRL's `AsyncGRPOTrainer`.

A packed row is a tree of prefixes: a token that several samples share is stored once. A list of terms stores,
for every trained token of every sample, the position that predicts it (`packing.py` of TRL 1.16).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

VERSIONS = "model_version"
"""Key of a (1, samples) tensor: the version of the weights that generated each sample of a row, -1 at padding."""


class PackedResponses:
    """The samples of a packed row as a (batch, time) batch: one sample per row, from its first trained token on.

    mask: (batch, time) bool, the trained tokens. behavior: (batch, time), the sampler's log-probs.
    advantage: (batch, 1). length: (batch,), tokens from the first to the last trained one.
    version: (batch,), of the weights that generated the sample.
    """

    proximal = reference = None  # TRL computes no such log-probs

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        """Reads one row of TRL's collator, (1, ...) in each tensor."""
        selected, version = inputs["token_index"] >= 0, inputs[VERSIONS]
        # For each trained token: the position in the packed row that predicts it, its row and its column.
        self._index, self._response = inputs["token_index"][selected], inputs["segment_id"][selected]
        self.version = version[version >= 0]
        depth = inputs["position_ids"][0][self._index]
        first = depth.new_full((len(self.version),), torch.iinfo(depth.dtype).max)
        first = first.scatter_reduce(0, self._response, depth, "amin")
        self._column = depth - first[self._response]
        self._inputs = inputs
        self.mask = self._rows(torch.ones_like(self._column, dtype=torch.bool))
        self.behavior = self._rows(inputs["old_log_probs"][selected])
        advantage = inputs["advantages"][selected]
        self.advantage = advantage.new_zeros(len(self.version)).index_put((self._response,), advantage)[:, None]
        none = self._column.new_zeros(len(self.version))
        self.length = none.scatter_reduce(0, self._response, self._column + 1, "amax")

    def unpacked(self, packed: Tensor) -> Tensor:
        """Returns (batch, time) the values of a packed row at the trained tokens, 0 elsewhere."""
        return self._rows(packed[self._index])

    def _rows(self, terms: Tensor) -> Tensor:
        shape = (len(self.version), int(self._column.max()) + 1)
        return terms.new_zeros(shape).index_put((self._response, self._column), terms)

    @cached_property
    def _ids(self) -> list[list[int]]:
        """The token ids of each sample, prompt included, up to its last trained token."""
        kept = {name: self._inputs[name][self._inputs[name] >= 0] for name in ("tree_kv_index", "tree_cu_seqlens_q")}
        path, starts = kept["tree_kv_index"], kept["tree_cu_seqlens_q"]
        ends = self._inputs["tree_cu_seqlens_k"][0].tolist()
        result: list[list[int]] = [[] for _ in self.version]
        # The terms of a sample are in ascending order, so the last one stays.
        last = {int(response): int(index) for response, index in zip(self._response, self._index, strict=True)}
        for response, index in last.items():
            segment = int(torch.searchsorted(starts, index, right=True)) - 1
            depth = int(self._inputs["position_ids"][0][index])
            before = path[ends[segment] :][: depth + 1]
            result[response] = [
                *self._inputs["input_ids"][0][before].tolist(),
                int(self._inputs["shift_labels"][0][index]),
            ]
        return result

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """The token ids of each sample before its first trained token."""
        return [ids[: len(ids) - length] for ids, length in zip(self._ids, self.length.tolist(), strict=True)]

    @cached_property
    def response_ids(self) -> Tensor:
        """(batch, time) the token ids of each response, with the untrained ones between trained ones, padded with 0."""
        cut = zip(self._ids, self.length.tolist(), strict=True)
        ids = [torch.tensor(ids[len(ids) - length :], dtype=torch.long) for ids, length in cut]
        return pad_sequence(ids, batch_first=True).to(self.mask.device)
