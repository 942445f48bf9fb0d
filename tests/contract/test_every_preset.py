"""Every preset has the properties of properties.py. A new preset is tested automatically."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.contract import properties
from tests.contract.conftest import Laboratory
from tests.support.named_cases import named

CHECKED = (properties.a_missing_policy_is_named, properties.low_precision_inputs_are_computed_in_float32)
"""Run with the checks of shapes, which cost more than the arithmetic; the others make the same calls without."""


@pytest.mark.parametrize("holds", [*properties.FOR_ALL, *properties.FOR_PRESETS], ids=lambda one: one.__name__)
def test_every_preset(lab: Laboratory, holds: Callable[..., None], request: pytest.FixtureRequest) -> None:
    if holds not in CHECKED:
        request.getfixturevalue("shapes_unchecked")
    for name in lab.names:
        with named(name):
            holds(lab, name)
