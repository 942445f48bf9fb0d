"""Which part of the sampler makes the mismatch, where its prefill scored the sampled ids again."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.tokens import k3
from trimtab.errors import Finding
from trimtab.pages.numbers import short


class PrefillSums:
    """Sums of k3 of decode/prefill and of prefill/trainer over the trained tokens."""

    def __init__(self) -> None:
        self._sums, self._tokens = np.zeros(2), 0

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.prefill is not None:
            prefill = tokens.at_tokens(tokens.table.prefill).astype(np.float64)
            self._sums += k3(np.stack([prefill - tokens.behavior, tokens.trainer - prefill])).sum(1)
            self._tokens += len(tokens)

    def findings(self) -> tuple[Finding, ...]:
        """Returns one finding, or none where the data has no prefill."""
        if not self._tokens:
            return ()
        decode, engine = (float(value) for value in self._sums / self._tokens)
        parts = {"decode (cache or decode kernels)": decode, "the engine (weights or numerics)": engine}
        # Two parts whose k3 differ by less than a factor of 2 are both of the size of the whole.
        carry = [name for name, size in parts.items() if 2 * size >= max(parts.values())]
        detail = f"k3 {short(decode)} between decode and prefill, {short(engine)} between prefill and trainer"
        return (Finding("note", "prefill", f"{detail}; the mismatch comes from {' and '.join(carry)}"),)
