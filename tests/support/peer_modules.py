"""Modules of other trainers that adapters import, in place of the real ones, which are not installed."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType

import pytest


def install_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the module with the three enumerations that the adapter of NeMo-RL takes from it."""
    interfaces = ModuleType("nemo_rl.algorithms.loss.interfaces")
    interfaces.LossType = Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")  # type: ignore[attr-defined]
    interfaces.LossInputType = Enum("LossInputType", "LOGPROB")  # type: ignore[attr-defined]
    interfaces.MetricNormalizer = Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")  # type: ignore[attr-defined]
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interfaces.__name__, interfaces)
