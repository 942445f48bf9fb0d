"""The rewards of the task over which scripted engines work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.scripted_engine import TASK

from trimtab.trainer import rewards


@pytest.fixture
def scorer() -> Iterator[rewards.Scorer]:
    with rewards.build([], TASK) as built:
        yield built
