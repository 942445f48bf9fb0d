"""Regimes: controlled mismatch between trainer and sampler, as changes to the `laboratory` recipe.

A regime consists of a mechanism (the difference from on-policy training with equal numerics) and a budget (number of
optimizer updates and learning rate). Mechanisms can be combined: `stale-32+int3` applies both. A combination has the
largest number of updates and the lowest learning rate of its parts. All methods of a regime have the same budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean

RECIPE = "laboratory"
UPDATES, LEARNING_RATE = 80, 1e-4


@dataclass(frozen=True, slots=True)
class Regime:
    """A named regime."""

    name: str
    description: str
    overrides: Mapping[str, Any]  # changed keys (dotted) of the `laboratory` recipe, including the budget

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides as `key=value` strings for `load_config` and `--set`."""
        return tuple(f"{key}={value}" for key, value in self.overrides.items())


@dataclass(frozen=True, slots=True)
class _Mechanism:
    """One mechanism, with the number of updates and the learning rate at which its effect is visible."""

    description: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    updates: int = UPDATES
    rate: float = LEARNING_RATE


def _rounding(bits: int) -> _Mechanism:
    return _Mechanism(f"the sampler's weight matrices rounded to {bits} bits", {"engine.quantize": f"int{bits}"})


def _staleness(lag: int) -> _Mechanism:
    # At the default learning rate all methods collapse with a lag of 32 updates, so they cannot be distinguished.
    return _Mechanism(f"the sampler refreshed every {lag} updates", {"trainer.sync_every": lag}, updates=128, rate=5e-5)


def _reuse(minibatches: int, epochs: int) -> _Mechanism:
    count = minibatches * epochs
    changes = {"trainer.minibatches": minibatches, "trainer.epochs": epochs}
    return _Mechanism(
        f"{count} updates on every batch ({minibatches} mini-batches, {epochs} epochs)", changes, updates=256
    )


PARTS: dict[str, _Mechanism] = {
    "on-policy": _Mechanism("one update a batch, the sampler refreshed after each, float32 on both sides"),
    "bf16": _Mechanism("the sampler in bfloat16", {"engine.dtype": "bfloat16"}),
    "int8": _rounding(8),
    "int4": _rounding(4),
    "int3": _rounding(3),
    # The k3 of `noise` is between those of int4 and int3, but the error changes at every refresh. The error of int3 is
    # constant, and methods differ in how much the policy learns to exploit it.
    "noise": _Mechanism(
        "noise of 20% on the sampler's weight matrices, drawn anew at every refresh", {"engine.noise": 0.2}
    ),
    "stale-8": _staleness(8),
    "stale-32": _staleness(32),
    "reuse-4": _reuse(4, 1),
    "reuse-16": _reuse(4, 4),
    "top-p": _Mechanism("sampled from the smallest set that holds 0.9 of the mass", {"sampling.top_p": 0.9}),
    "moe": _Mechanism("a mixture of experts (8, 2 active) of the dense model's size", {"model.path": "laboratory-moe"}),
    "switch": _Mechanism(
        "a deeper mixture of that size (16 experts, 1 active), whose mismatch is routing",
        {"model.path": "laboratory-switch"},
    ),
}


def regime(name: str) -> Regime:
    """Returns the regime `name`, which may be a combination such as `a+b`."""
    words = name.split("+")
    for index, word in enumerate(words):
        if word not in PARTS:
            raise TrimtabError(f"unknown regime {word!r}{did_you_mean(word, PARTS)}")
        if word in words[:index]:
            raise TrimtabError(f"regime {name!r} names {word!r} twice: name each part once")
    parts = {word: PARTS[word] for word in words}
    owner: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for word, part in parts.items():
        for key, value in part.changes.items():
            if key in changes and changes[key] != value:
                raise TrimtabError(f"regime {name!r}: {owner[key]!r} and {word!r} both set {key}; keep one of them")
            owner[key], changes[key] = word, value
    per_step = changes.get("trainer.minibatches", 1) * changes.get("trainer.epochs", 1)
    changes["trainer.steps"] = -(-max(part.updates for part in parts.values()) // per_step)
    changes["optim.lr"] = min(part.rate for part in parts.values())
    return Regime(name, "; ".join(part.description for part in parts.values()), changes)
