"""Keys that a recipe is warned of change no number of a run, and runs that they leave without lag end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.run_results import untimed

from trimtab.errors import TrimtabWarning
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e

SMALL = (
    *("trainer.steps=3", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8", "optim.lr=1e-3"),
    *("sampling.temperature=1.3", "trainer.dynamic_sampling=true"),
)
UNUSED = (
    *("engine.vllm.context=7", "engine.vllm.eager=false", "engine.server.concurrency=1"),
    *("engine.hang_timeout=60.0", "ray.engines=2", "trainer.in_flight=continue", "sharding.offload=true"),
    *("advantage.value_beta=0.5", "sampling.top_logprobs=8"),
)


def metrics(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    train(load_config("laboratory", [*SMALL, *overrides]), out=folder)
    return untimed(folder)


def test_keys_without_effect_change_no_number(tmp_path: Path) -> None:
    with pytest.warns(TrimtabWarning, match="has no effect") as found:
        changed = metrics(tmp_path / "changed", *UNUSED)
    # Two keys of one section are one warning. Other libraries warn too, depending on the processor.
    warned = [warning for warning in found if "has no effect" in str(warning.message)]
    assert len(warned) == len(UNUSED) - 1
    assert changed == metrics(tmp_path / "plain")


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.max_lag=3 trainer.minibatches=2 trainer.epochs=2",
        "objective.name=oapl trainer.max_lag=2 trainer.dynamic_sampling=false",
        "objective.name=oapl trainer.max_lag=8 trainer.sync_every=4 trainer.epochs=4",
    ],
)
def test_a_run_that_can_generate_nothing_ahead_takes_turns(overrides: str, tmp_path: Path) -> None:
    with pytest.warns(TrimtabWarning, match="trainer.max_lag has no effect"):
        rows = metrics(tmp_path, "engine.workers=0", *overrides.split())
    assert len(rows) == 3
    # A token is at most as old as the updates before its own one in its step.
    assert max(row["lag/max"] for row in rows) <= 3
