"""Unpacks the responses of a packed row of TRL's `AsyncGRPOTrainer`.

A packed row is a tree of prefixes: a token that several samples share is stored once. A list of terms stores,
for every trained token of every sample, the position that predicts it (`packing.py` of TRL 1.16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

VERSIONS = "model_version"
"""Key of a (1, samples) tensor: the version of the weights that generated each sample of a row, -1 at padding."""


@dataclass(frozen=True)
class PackedResponses:
    """The samples of a packed row as a (batch, time) batch: one sample per row, from its first trained token on."""

    inputs: Mapping[str, Tensor]  # the tensors of TRL's collator, (1, ...) each
    index: Tensor  # (terms,) the position in the packed row that predicts each trained token
    response: Tensor  # (terms,) the row of the token in (batch, time)
    column: Tensor  # (terms,) the column of the token in (batch, time)
    version: Tensor  # (batch,) the version of the weights that generated the sample
    proximal = reference = None  # TRL computes no such log-probs

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> PackedResponses:
        """Reads one row of TRL's collator, (1, ...) in each tensor."""
        selected, version = inputs["token_index"] >= 0, inputs[VERSIONS]
        index, response = inputs["token_index"][selected], inputs["segment_id"][selected]
        version = version[version >= 0]
        depth = inputs["position_ids"][0][index]
        first = depth.new_full((len(version),), torch.iinfo(depth.dtype).max)
        first = first.scatter_reduce(0, response, depth, "amin")
        return cls(inputs, index, response, depth - first[response], version)

    def unpacked(self, packed: Tensor) -> Tensor:
        """Returns (batch, time) the values of a packed row at the trained tokens, 0 elsewhere."""
        return self._rows(packed[self.index])

    def _rows(self, terms: Tensor) -> Tensor:
        shape = (len(self.version), int(self.column.max()) + 1)
        return terms.new_zeros(shape).index_put((self.response, self.column), terms)

    def _of_terms(self, name: str) -> Tensor:
        return self.inputs[name][self.inputs["token_index"] >= 0]

    @cached_property
    def mask(self) -> Tensor:
        """(batch, time) bool: the trained tokens."""
        return self._rows(torch.ones_like(self.column, dtype=torch.bool))

    @cached_property
    def behavior(self) -> Tensor:
        """(batch, time) the sampler's log-probs."""
        return self._rows(self._of_terms("old_log_probs"))

    @cached_property
    def advantage(self) -> Tensor:
        """(batch, 1) the advantage of each response."""
        given = self._of_terms("advantages")
        return given.new_zeros(len(self.version)).index_put((self.response,), given)[:, None]

    @cached_property
    def length(self) -> Tensor:
        """(batch,) the number of tokens from the first to the last trained one."""
        return self.column.new_zeros(len(self.version)).scatter_reduce(0, self.response, self.column + 1, "amax")

    @cached_property
    def _ids(self) -> list[list[int]]:
        """The token ids of each sample, prompt included, up to its last trained token."""
        kept = {name: self.inputs[name][self.inputs[name] >= 0] for name in ("tree_kv_index", "tree_cu_seqlens_q")}
        path, starts = kept["tree_kv_index"], kept["tree_cu_seqlens_q"]
        ends = self.inputs["tree_cu_seqlens_k"][0].tolist()
        result: list[list[int]] = [[] for _ in self.version]
        # The terms of a sample are in ascending order, so the last one stays.
        last = {int(response): int(index) for response, index in zip(self.response, self.index, strict=True)}
        for response, index in last.items():
            segment = int(torch.searchsorted(starts, index, right=True)) - 1
            depth = int(self.inputs["position_ids"][0][index])
            before = path[ends[segment] :][: depth + 1]
            result[response] = [
                *self.inputs["input_ids"][0][before].tolist(),
                int(self.inputs["shift_labels"][0][index]),
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
