"""Shared by every tier: one thread per process, and the real benchmark files where they exist."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings
from jaxtyping import config as jaxtyping_config

gc.disable()  # until everything is imported

# A shell that runs the tests in the background lets them ignore Ctrl-C, and with them every process they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of what uses the arithmetic of others leave out the checks of shapes, which cost more than the arithmetic does.
# `CHECKED` calls it with shapes of its own, and trains with every method and a mixture of experts.
UNCHECKED = (
    *(f"unit/{part}" for part in ("check_loss", "cli", "diagnosis", "preflight", "report", "runs")),
    *(f"unit/trainer/{part}" for part in ("engines", "evaluation", "lab", "rollout")),
    *("contract/test_code.py", "contract/test_every_engine.py", "unit/test_diagnosis_zoo.py", "e2e"),
)
CHECKED = (
    *("unit/diagnosis/advice", "unit/diagnosis/measure"),
    *("e2e/test_methods.py", "e2e/test_routing_replay.py"),
)

# Tests of what a page says draw its figures without arranging their parts, which is most of the work of drawing. Pages
# that a module shares are arranged: fixtures of a wider scope are made first.
UNARRANGED = (*(f"unit/{part}" for part in ("cli", "diagnosis", "report", "runs")), "e2e")

# Few examples, the same in every run; `--hypothesis-profile many` draws a hundred new ones.
settings.register_profile("few", max_examples=6, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=100, deadline=None)
settings.load_profile("few")


FIRST = "test_vllm_environment.py"  # which takes longest: so that both processes of `make test-slow` end together


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in `e2e` is an end-to-end test, one elsewhere that claims no tier a unit test; slow ones are neither."""
    items.sort(key=lambda item: item.path.name != FIRST)
    for item in items:
        if not any(item.iter_markers("e2e")) and not any(item.iter_markers("slow")):
            item.add_marker("e2e" if item.path.is_relative_to(Path(__file__).parent / "e2e") else "unit")
        if isinstance(item, pytest.Function):
            item.fixturenames[:0] = _fixtures(item.path)


def pytest_collection_finish() -> None:
    """What was imported stays until the end: the garbage collector need not search it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Slow tests that would begin after `TRIMTAB_SLOW_TESTS_UNTIL` (seconds since 1970) are skipped, and it is said."""
    until = os.environ.get("TRIMTAB_SLOW_TESTS_UNTIL")
    if until and time.time() > float(until) and any(item.iter_markers("slow")):
        pytest.skip("not run: the time for slow tests is over on this machine")


@functools.cache
def _fixtures(path: Path) -> list[str]:
    """The fixtures that every test of this file uses."""

    def within(parts: tuple[str, ...]) -> bool:
        return any(path.is_relative_to(Path(__file__).parent / part) for part in parts)

    unchecked = ["shapes_unchecked"] if within(UNCHECKED) and not within(CHECKED) else []
    return [*unchecked, "figures_unarranged"] if within(UNARRANGED) else unchecked


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """No shape checks: they cost more than the arithmetic, where the same calls are repeated hundreds of times."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture
def figures_unarranged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn whole, but the places of their axes do not depend on the sizes of labels."""
    monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)


@pytest.fixture(scope="session")
def benchmark_data() -> Path:
    """The folder with real GSM8K, MAWPS, AIME, AMC and Minerva rows; tests that need it skip without it."""
    return named_folder("TRIMTAB_TEST_DATA", "published benchmark files")


@pytest.fixture(scope="session")
def public_cases() -> Path:
    """The folder with files of faults that people reported."""
    return named_folder("TRIMTAB_TEST_CASES", "files of reported faults")


def named_folder(variable: str, what: str) -> Path:
    """Returns the folder that an environment variable names; nothing outside the repository is read otherwise."""
    name = os.environ.get(variable)
    if not name:
        pytest.skip(f"the repository has no {what}: set {variable} to a folder that holds them")
    if not Path(name).is_dir():
        pytest.fail(f"{variable} = {name} is not a folder")
    return Path(name)
