"""The findings of files with `logp_prefill` (which part differs), and the side that a rescored column accuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trimtab
from trimtab.diagnosis.measure.other_logprobs import rescored_sides
from trimtab.diagnosis.tokens import TokenTable
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


@pytest.mark.parametrize(
    ("sampler", "trainer", "shared", "side"),
    [
        (0.5, 0.03, 0.0, "sampler"),
        (0.03, 0.5, 0.0, "trainer"),
        (0.5, 0.5, 0.0, "both"),
        (0.03, 0.04, 0.0, "neither"),
        (0.05, 0.001, 0.0, "sampler"),  # beyond 16 bits, and on one side only
        (0.03, 0.001, 0.0, "neither"),  # within them, if on one side only
        (0.1, 0.1, 1.0, "other"),
    ],
)
def test_the_side_that_differs_from_the_rescored_column(
    sampler: float, trainer: float, shared: float, side: str
) -> None:
    """Gaussian differences, of which k3 is about half the square, from a column that both may be far from."""
    rng = np.random.default_rng(0)
    rescored = (-3 - rng.random(3000)).astype(np.float32)
    away = shared * rng.normal(size=3000)
    behavior, proximal = (rescored + away + spread * rng.normal(size=3000) for spread in (sampler, trainer))
    table = TokenTable(
        starts=np.arange(0, 3001, 30),
        mask=np.ones(3000, dtype=np.bool_),
        behavior=behavior.astype(np.float32),
        proximal=proximal.astype(np.float32),
        rescored=rescored,
    )
    found = rescored_sides(table)
    assert found is not None
    assert ("other" if found.is_other_model else found.side) == side
    if not shared:
        assert found.sampler.value == pytest.approx(sampler**2 / 2, rel=0.3)
        assert found.trainer.low < found.trainer.value < found.trainer.high
    assert rescored_sides(replace(table, rescored=None)) is None
