"""Bases of the zoo: exact streams, and log-probs that were really measured (`measure_bases.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from zoo.streams import Stream
from zoo.synthetic import synthetic

FOLDER = Path(__file__).parent / "bases"
UNEXPLAINED, BROKEN = "unexplained", 0.3


@dataclass(frozen=True, eq=False)
class Base:
    """Data without a planted fault.

    noise: the cause of what remains between sampler and trainer; empty where that is two float32 forwards.
    source: returns the stream of a kind at a strength, or None where there is none.
    """

    name: str
    noise: str
    source: Callable[[str, int], Stream | None]
    measured: bool = False

    def stream(self, kind: str, level: int) -> Stream | None:
        return self.source(kind, level)

    def noises(self, drawn: Stream) -> frozenset[str]:
        """The causes that describe the noise of responses drawn from this base.

        A few tokens hold what routing adds, so that it is known only by scoring those responses under the sampler's
        experts whether they make up most of k3 (routing), less than a third (precision), or something between (either).
        Beyond a k3 of `BROKEN` quantized weights are not told from other damage: then it may also be unexplained.
        """
        if "replayed" not in drawn.tokens:
            broken = {UNEXPLAINED} if drawn.k3 > BROKEN else set()
            return frozenset({self.noise, *broken} if self.noise else ())
        left = drawn.changed(trainer=drawn["replayed"]).k3 / drawn.k3
        names = {"routing": left < 2 / 3, "precision": left > 1 / 3}
        return frozenset(name for name, there in names.items() if there)


def exact_bases() -> list[Base]:
    """Streams drawn from known distributions; noise of the trainer's logits: float32, bfloat16, four bits."""
    sizes = (
        ("exact", "", 1e-6),
        ("exact, bfloat16 noise", "precision", 0.05),
        ("exact, 4-bit noise", "quantized", 0.5),
    )
    return [Base(name, noise, partial(synthetic, size)) for name, noise, size in sizes]


NOISE: Mapping[str, str] = {
    "laboratory-float32": "",
    "laboratory-bfloat16": "precision",
    "laboratory-int4": "quantized",
    "laboratory-trained": "precision",
    "mixture-bfloat16": "routing",
    "smollm2-float32": "",
    "smollm2-bfloat16": "precision",
    "smollm2-int8": "quantized",
    "smollm2-int4": "quantized",
    "smollm2-trained": "precision",
    "vllm-bfloat16": "precision",
}
"""What remains between sampler and trainer, which is known from how each was run."""


def measured_bases() -> list[Base]:
    """The bases in `FOLDER`: one file `<base>.<kind>[<level>].parquet` for each stream."""
    names = sorted({file.name.partition(".")[0] for file in FOLDER.glob("*.parquet")})
    return [Base(name, NOISE[name], partial(_measured, name), measured=True) for name in names]


@cache
def _measured(name: str, kind: str, level: int) -> Stream | None:
    file = next((f for tail in (kind, f"{kind}{level}") if (f := FOLDER / f"{name}.{tail}.parquet").exists()), None)
    return None if file is None else read(file)


def read(file: Path) -> Stream:
    """Reads a stream: columns of lists are those of tokens, all others those of responses."""
    table = pq.read_table(file).combine_chunks()
    tokens: dict[str, np.ndarray] = {}
    rows: dict[str, np.ndarray] = {}
    starts = np.zeros(1, dtype=np.int64)
    for name in table.column_names:
        column = table.column(name).chunk(0)
        if hasattr(column, "flatten") and hasattr(column, "offsets"):
            starts = column.offsets.to_numpy().astype(np.int64)
            values = column.flatten().to_numpy(zero_copy_only=False)
            tokens[name] = values.astype(np.float64 if values.dtype.kind == "f" else values.dtype)
        else:
            rows[name] = column.to_numpy()
    return Stream(starts, tokens, rows)
