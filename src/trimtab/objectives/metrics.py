"""Named statistics that are summed over micro-batches, updates and ranks and converted to floats once, at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trimtab.corrections.statistics import Mergeable


@dataclass(frozen=True, eq=False)
class Metrics:
    """Statistics by the prefix of their metric keys. `+` merges those of two parts of a batch."""

    parts: Mapping[str, Mergeable]

    def __add__(self, other: Metrics) -> Metrics:
        shared = self.parts.keys() & other.parts.keys()
        return Metrics({**self.parts, **other.parts, **{name: self.parts[name] + other.parts[name] for name in shared}})

    def finalize(self) -> dict[str, float]:
        """Returns the metrics as floats, in one transfer from the device.

        A mean over nothing is NaN; a bin of a histogram without data is left out.
        """
        named = [
            (prefix + suffix, value, part.is_histogram)
            for prefix, part in self.parts.items()
            for suffix, value in part.summary().items()
        ]
        if not named:
            return {}
        values = torch.stack([value.to(torch.float64) for _, value, _ in named]).tolist()
        pairs = zip(named, values, strict=True)
        return {key: value for (key, _, is_bin), value in pairs if not (is_bin and math.isnan(value))}
