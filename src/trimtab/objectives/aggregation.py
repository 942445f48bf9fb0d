"""Aggregation of per-token losses to a scalar, with denominators of the whole update.

    token-mean            1 / sum_i T_i                 DAPO
    seq-mean-token-mean   1 / (N T_i)                   GRPO, GSPO
    seq-mean-token-sum    1 / N
    constant              1 / (N length_max)            Dr. GRPO
    trained-mean-token-sum  1 / #{i: T_i > 0}           OAPL

N counts sequences, including those without a trained token; T_i counts trained tokens, never padding. With
`denominator="kept"`, rejected tokens and sequences whose trained tokens were all rejected do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.corrections.code_lines import Lines
from trimtab.corrections.fields import CheckedFields, one_of
from trimtab.corrections.reduce import Sequences
from trimtab.errors import TrimtabError
from trimtab.objectives.state import State

AGGREGATION_KINDS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "trained-mean-token-sum")


@dataclass(frozen=True)
class Aggregation(CheckedFields):
    """How per-token losses are reduced to a scalar.

    kind: one of `AGGREGATION_KINDS`. denominator: `original` or `kept`. length_max: tokens, for `constant` only.
    """

    kind: str = one_of(AGGREGATION_KINDS, "token-mean")
    denominator: str = one_of(("original", "kept"), "original")
    length_max: int | None = None

    def __post_init__(self) -> None:
        self.check_fields()
        if self.kind == "constant" and (self.length_max is None or self.length_max < 1):
            raise TrimtabError("aggregation 'constant' divides by length_max tokens: set length_max to 1 or more")
        if self.kind != "constant" and self.length_max is not None:
            raise TrimtabError(
                f"length_max has no effect with aggregation {self.kind!r}, only with 'constant': leave it out"
            )

    def scale(self, sequences: Sequences, kept_lengths: Tensor, state: State) -> Tensor:
        """Returns the policy term's factor at every token, broadcastable to (batch, time)."""
        if self.denominator == "original":
            return self.scale_original(sequences, state)
        count = state.sequences - state.sequences_rejected
        trained = state.sequences_trained - state.sequences_rejected
        return self._scale(sequences, kept_lengths, state.tokens_kept, count, trained)

    def scale_original(self, sequences: Sequences, state: State) -> Tensor:
        """Returns the factor of KL and entropy terms, from which nothing is rejected."""
        return self._scale(sequences, sequences.lengths, state.tokens, state.sequences, state.sequences_trained)

    def _scale(self, sequences: Sequences, lengths: Tensor, tokens: Tensor, count: Tensor, trained: Tensor) -> Tensor:
        if self.kind == "token-mean":
            return 1.0 / _positive(tokens)
        if self.kind == "seq-mean-token-mean":
            return sequences.spread(1.0 / (_positive(count) * lengths.double().clamp(min=1)))
        if self.kind == "constant":
            assert self.length_max is not None
            return 1.0 / (_positive(count) * self.length_max)
        return 1.0 / _positive(count if self.kind == "seq-mean-token-sum" else trained)

    def equation(self, *, rejects: bool) -> str:
        """Returns the denominator as text; `rejects`: whether tokens can be rejected."""
        text = {
            "token-mean": "Σ T, trained tokens of the update (token-mean)",
            "seq-mean-token-mean": "N·T, sequences of the update times tokens of each (seq-mean-token-mean)",
            "seq-mean-token-sum": "N, sequences of the update (seq-mean-token-sum)",
            "constant": f"N·{self.length_max}, sequences of the update times length_max (constant)",
            "trained-mean-token-sum": "sequences of the update with a trained token",
        }[self.kind]
        rejected = "counted" if self.denominator == "original" else "not counted"
        return f"{text}; what is rejected is {rejected}" if rejects else text

    def code(self, lines: Lines, losses: str, keep: str) -> str:
        """Returns the aggregated losses as PyTorch code. losses, keep: names of the losses and of the kept tokens."""
        kept = self.denominator == "kept" and losses == "losses"
        keep = keep if kept else "mask"
        length = f"{keep}.sum(1, keepdim=True).clamp(min=1)" if kept else "length"
        count, words = "responses", "responses"
        value = f"({keep}.any(1) | ~mask.any(1)).sum().clamp(min=1)" if kept else "max(len(mask), 1)"
        if self.kind == "token-mean":
            count, words, value = "tokens", "trained tokens", f"{keep}.sum().clamp(min=1)"
        elif self.kind == "trained-mean-token-sum":
            words, value = "responses with a trained token", f"{keep}.any(1).sum().clamp(min=1)"
        if kept:
            count, words = "kept", "the denominator without what is rejected"
        lines.values[count], lines.of_update[count] = value, words
        total = f"({losses} / {length}).sum()" if self.kind == "seq-mean-token-mean" else f"{losses}.sum()"
        return f"{total} / ({count} * {self.length_max})" if self.kind == "constant" else f"{total} / {count}"


def _positive(count: Tensor) -> Tensor:
    """Returns the count, or 1 if it is 0. Counts of other trainers may be fractions: totals over several steps."""
    return torch.where(count > 0, count, 1.0)
