"""The finding of files with `logp_prefill`: which part of the sampler makes the mismatch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trimtab
from trimtab.errors import Finding

UP = float(np.log(1.5))
K3 = 0.5 - UP  # of a token whose probability grows by half


def found(path: Path, prefill: list[float | None] | None) -> list[Finding]:
    """From three tokens, of which the last is not trained; the trainer's probability is 1.5 times the sampler's."""
    row = {"logp_behavior": [-2.0, -2.0, -1.0], "logp_proximal": [UP - 2, UP - 2, -9.0], "loss_mask": [1, 1, 0]}
    more = {} if prefill is None else {"logp_prefill": prefill}
    path.write_text("".join(json.dumps(row | more | {"prompt_id": str(i)}) + "\n" for i in range(4)))
    return [one for one in trimtab.diagnose([path]).measured.origin.findings if one.name == "prefill"]


@pytest.mark.parametrize(
    ("prefill", "sizes", "part"),
    [
        ([UP - 2, UP - 2, 5.0], (K3, 0.0), "decode (cache or decode kernels)"),
        ([-2.0, -2.0, 5.0], (0.0, K3), "the engine (weights or numerics)"),
        (
            [UP - 2, -2.0, 5.0],
            (K3 / 2, K3 / 2),
            "decode (cache or decode kernels) and the engine (weights or numerics)",
        ),
    ],
)
def test_the_part_is_named(tmp_path: Path, prefill: list[float], sizes: tuple[float, float], part: str) -> None:
    [one] = found(tmp_path / "a.jsonl", prefill)
    assert one.status == "note"
    words = one.detail.split()
    assert [float(words[1]), float(words[6])] == pytest.approx(sizes, rel=0.05)  # two digits
    assert one.detail.endswith(f"; the mismatch comes from {part}")


def test_without_the_column_nothing_is_said(tmp_path: Path) -> None:
    assert found(tmp_path / "a.jsonl", None) == []
