"""Assumptions: named, bounded, explained."""

from __future__ import annotations

import pytest

from trimtab.errors import TrimtabError
from trimtab.planning.inputs import DEVICES, Assumptions, find_device, parse_assumptions


def test_every_assumption_says_why() -> None:
    reasons = [field.description or "" for field in Assumptions.model_fields.values()]
    assert all(len(why) > 10 and "\n" not in why for why in reasons)


def test_changes_replace_defaults() -> None:
    assert parse_assumptions(["train_flops=0.5", "score=12"]) == Assumptions(train_flops=0.5, score=12)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train_flop=1", "unknown assumption 'train_flop'.*train_flops"),
        ("score", "--assume score=: .*valid number"),
        ("score=fast", "score=fast: .*valid number"),
        ("score=-1", "greater than or equal to 0"),
        ("train_flops=1.5", "less than or equal to 1"),
        ("handover=0", "greater than 0"),
        ("handover=nan", "finite number"),
        ("decode_overhead=inf", "finite number"),
    ],
)
def test_mistakes_are_one_line(change: str, named: str) -> None:
    with pytest.raises(TrimtabError, match=named):
        parse_assumptions([change])


def test_devices_carry_their_source() -> None:
    assert all(entry.source and entry.memory > 1e10 for entry in DEVICES.values())
    assert find_device("H100").flops == 989e12
    with pytest.raises(TrimtabError, match=r"unknown device 'h1000'.*did you mean 'h100'"):
        find_device("h1000")
