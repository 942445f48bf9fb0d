"""Assumptions: named, bounded, explained."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from trimtab.errors import TrimtabError
from trimtab.planning.assumptions import DEVICES, Assumptions, assumption_reasons, find_device, parse_assumptions


def test_every_assumption_says_why() -> None:
    assert assumption_reasons().keys() == asdict(Assumptions()).keys()
    assert all(len(why) > 10 for why in assumption_reasons().values())


def test_changes_replace_defaults() -> None:
    assert parse_assumptions(["train_flops=0.5", "score=12"]) == Assumptions(train_flops=0.5, score=12)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train_flop=1", "unknown assumption 'train_flop'.*train_flops"),
        ("score", "write it as name=value"),
        ("score=fast", "'fast' is not a number"),
        ("score=-1", "above 0"),
        ("train_flops=1.5", "at most 1"),
        ("handover=0", "above 0"),
        ("handover=nan", "above 0"),
        ("decode_overhead=inf", "above 0"),
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
