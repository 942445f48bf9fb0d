"""Regimes: controlled mismatch between trainer and sampler, as changes to the `laboratory` recipe.

A regime is a mechanism (what differs from on-policy training in equal numerics) and a budget (how many optimizer
updates, at which learning rate). Mechanisms add up: `stale-32+int3` is both at once. Budgets are compared: a mixture
takes the most updates and the lowest rate of its parts. Within a regime every method gets the same budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import TrimtabError, nearest

RECIPE = "laboratory"
UPDATES, RATE = 80, 1e-4


@dataclass(frozen=True, slots=True)
class Regime:
    """`overrides` maps dotted keys of the `laboratory` recipe to values; the budget is among them."""

    name: str
    description: str
    overrides: Mapping[str, Any]

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides as `load_config` and `--set` take them."""
        return tuple(f"{key}={value}" for key, value in self.overrides.items())


@dataclass(frozen=True, slots=True)
class _Part:
    """One mechanism. `updates` and `rate` are what it takes to see it work."""

    description: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    updates: int = UPDATES
    rate: float = RATE


def _rounded(bits: int) -> _Part:
    return _Part(f"the sampler's weight matrices rounded to {bits} bits", {"engine.quantize": f"int{bits}"})


def _stale(lag: int) -> _Part:
    # At the rate of the others every method falls apart after 32 updates of lag, and nothing is told apart.
    return _Part(f"the sampler refreshed every {lag} updates", {"trainer.sync_every": lag}, updates=128, rate=5e-5)


def _reused(minibatches: int, epochs: int) -> _Part:
    count = minibatches * epochs
    changes = {"trainer.minibatches": minibatches, "trainer.epochs": epochs}
    return _Part(f"{count} updates on every batch ({minibatches} mini-batches, {epochs} epochs)", changes, updates=256)


PARTS: dict[str, _Part] = {
    "on-policy": _Part("one update a batch, the sampler refreshed after each, float32 on both sides"),
    "bf16": _Part("the sampler in bfloat16", {"engine.dtype": "bfloat16"}),
    "int8": _rounded(8),
    "int4": _rounded(4),
    "int3": _rounded(3),
    # As far off as between int4 and int3, but never the same way twice: what separates methods at int3 is an error
    # that stays while the policy learns to exploit it.
    "noise": _Part("noise of 20% on the sampler's weight matrices, drawn anew at every refresh", {"engine.noise": 0.2}),
    "stale-8": _stale(8),
    "stale-32": _stale(32),
    "reuse-4": _reused(4, 1),
    "reuse-16": _reused(4, 4),
    "top-p": _Part("sampled from the smallest set that holds 0.9 of the mass", {"sampling.top_p": 0.9}),
    "moe": _Part("a mixture of experts (8, 2 active) of the dense model's size", {"model.path": "laboratory-moe"}),
    "switch": _Part(
        "a deeper mixture of that size (16 experts, 1 active), whose mismatch is routing",
        {"model.path": "laboratory-switch"},
    ),
}
# Names for mixtures that are asked for often.
ALIASES = {"moe-bf16": "moe+bf16", "moe-int8": "moe+int8", "moe-int4": "moe+int4", "moe-int3": "moe+int3"}


def names() -> list[str]:
    """Every regime that has a name of its own; mixtures of them are written with `+`."""
    return [*PARTS, *ALIASES]


def regime(name: str) -> Regime:
    """The regime of that name, or the mixture `a+b`.

    Raises:
        TrimtabError: a part is unknown or named twice, or two parts set one option to different values.
    """
    words = "+".join(ALIASES.get(word, word) for word in name.split("+")).split("+")
    for index, word in enumerate(words):
        if word not in PARTS:
            raise TrimtabError(f"unknown regime {word!r}{nearest(word, names())}")
        if word in words[:index]:
            raise TrimtabError(f"regime {name!r} names {word!r} twice: name each part once")
    parts = [PARTS[word] for word in words]
    changes = _merged(name, words, parts)
    per_step = changes.get("trainer.minibatches", 1) * changes.get("trainer.epochs", 1)
    budget = {
        "trainer.steps": -(-max(part.updates for part in parts) // per_step),
        "optim.lr": min(part.rate for part in parts),
    }
    return Regime(name, "; ".join(part.description for part in parts), {**changes, **budget})


def _merged(name: str, words: list[str], parts: list[_Part]) -> dict[str, Any]:
    owner: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for word, part in zip(words, parts, strict=True):
        for key, value in part.changes.items():
            if key in changes and changes[key] != value:
                raise TrimtabError(f"regime {name!r}: {owner[key]!r} and {word!r} both set {key}; keep one of them")
            owner[key], changes[key] = word, value
    return changes
