"""Modules of other trainers that adapters import, in place of the real ones, which are not installed."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest

NEMO_RL_LOSS = SimpleNamespace(use_fused_linear_logprobs=False, reference_policy_kl_penalty=0)
"""The loss that NeMo-RL's `setup` returns, with the attributes that have no default."""


def install_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the module with the three enumerations that the adapter of NeMo-RL takes from it."""
    interfaces = ModuleType("nemo_rl.algorithms.loss.interfaces")
    interfaces.LossType = Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")  # type: ignore[attr-defined]
    interfaces.LossInputType = Enum("LossInputType", "LOGPROB")  # type: ignore[attr-defined]
    interfaces.MetricNormalizer = Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")  # type: ignore[attr-defined]
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interfaces.__name__, interfaces)
