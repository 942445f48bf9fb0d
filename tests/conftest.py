"""Shared by every tier: one thread per process, and the real benchmark files where they exist."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from jaxtyping import config as jaxtyping_config

# A shell that runs the tests in the background lets them ignore Ctrl-C, and with them every process they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of what uses the arithmetic of others leave out the checks of shapes, which cost more than the arithmetic does.
# `CHECKED` calls it with shapes of its own, and trains with every method and a mixture of experts.
UNCHECKED = (
    *(f"unit/{part}" for part in ("cli", "diagnosis", "engines", "evaluation", "lab", "report", "rollout", "runs")),
    "e2e",
)
CHECKED = (
    *("unit/diagnosis/advice", "unit/diagnosis/measure", "unit/engines/embedded"),
    *("e2e/test_methods.py", "e2e/test_routing_replay.py"),
)

DATA = Path(os.environ.get("TRIMTAB_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that claims no other tier is a unit test."""
    for item in items:
        if not any(item.iter_markers("e2e")) and not any(item.iter_markers("slow")):
            item.add_marker(pytest.mark.unit)
        if isinstance(item, pytest.Function) and _leaves_shapes_unchecked(item.path):
            item.fixturenames.insert(0, "shapes_unchecked")


def _leaves_shapes_unchecked(path: Path) -> bool:
    folder = Path(__file__).parent
    return any(path.is_relative_to(folder / part) for part in UNCHECKED) and not any(
        path.is_relative_to(folder / part) for part in CHECKED
    )


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """No shape checks: they cost more than the arithmetic, where the same calls are repeated hundreds of times."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def benchmark_data() -> Path:
    """The folder with real GSM8K, MAWPS, AIME, AMC and Minerva rows; tests that need it skip without it."""
    if not DATA.is_dir():
        pytest.skip(f"benchmark files are absent ({DATA}); set TRIMTAB_TEST_DATA to a folder that holds them")
    return DATA
