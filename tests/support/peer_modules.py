"""Modules of other trainers that adapters import, in place of the real ones, which are not installed."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NEMO_RL_LOSS = SimpleNamespace(use_fused_linear_logprobs=False, reference_policy_kl_penalty=0)
"""The loss that NeMo-RL's `setup` returns, with the attributes that have no default."""


def install_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Installs a module of these members, and the packages that it is in."""
    parts = name.split(".")
    for end in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: end + 1]), ModuleType(".".join(parts[: end + 1])))
    vars(sys.modules[name]).update(members)


def install_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the module with the three enumerations that the adapter of NeMo-RL takes from it."""
    install_module(
        monkeypatch,
        "nemo_rl.algorithms.loss.interfaces",
        LossType=Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL"),
        LossInputType=Enum("LossInputType", "LOGPROB"),
        MetricNormalizer=Enum("MetricNormalizer", "TOKENS SEQUENCES NONE"),
    )
