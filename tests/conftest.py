"""Shared by every tier: one thread per process, and the real benchmark files where they exist."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# A shell that runs the tests in the background lets them ignore Ctrl-C, and with them every process they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(os.environ.get("TRIMTAB_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that claims no other tier is a unit test."""
    for item in items:
        if not any(item.iter_markers("e2e")) and not any(item.iter_markers("slow")):
            item.add_marker(pytest.mark.unit)


@pytest.fixture(scope="session")
def benchmark_data() -> Path:
    """The folder with real GSM8K, MAWPS, AIME, AMC and Minerva rows; tests that need it skip without it."""
    if not DATA.is_dir():
        pytest.skip(f"benchmark files are absent ({DATA}); set TRIMTAB_TEST_DATA to a folder that holds them")
    return DATA
