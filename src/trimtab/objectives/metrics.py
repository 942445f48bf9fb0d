"""Named statistics that add up over micro-batches, updates and ranks and become floats once, at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trimtab.corrections.statistics import Mergeable


@dataclass(frozen=True, eq=False)
class Metrics:
    """Statistics under the prefix of their metric keys. Parts of a whole are merged with `+`."""

    parts: Mapping[str, Mergeable]

    def __add__(self, other: Metrics) -> Metrics:
        both = self.parts.keys() & other.parts.keys()
        return Metrics({**self.parts, **other.parts, **{name: self.parts[name] + other.parts[name] for name in both}})

    def finalize(self) -> dict[str, float]:
        """Floats, in one transfer from the device. A mean over nothing is NaN."""
        named = {
            prefix + suffix: value for prefix, part in self.parts.items() for suffix, value in part.summary().items()
        }
        if not named:
            return {}
        values = torch.stack([value.to(torch.float64) for value in named.values()]).tolist()
        return dict(zip(named, values, strict=True))
