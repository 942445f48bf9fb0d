"""Stateless randomness: every draw has a seed derived from the run's seed and the purpose of the draw.

A resumed run therefore needs counters, not generator states, and an additional evaluation never changes the rollouts.
"""

from __future__ import annotations

import zlib

import numpy as np


def derive(seed: int, purpose: str, *counters: int) -> int:
    """Returns a 63-bit seed for the draw `purpose`/`counters` of a run; distinct draws get independent streams."""
    words = [seed, zlib.crc32(purpose.encode()), *counters]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
