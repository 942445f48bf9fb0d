"""Regimes: controlled mismatch between trainer and sampler, as changes to the `laboratory` recipe.

A regime consists of a mechanism (the difference from on-policy training with equal numerics) and a budget (number of
optimizer updates and learning rate). Mechanisms can be combined: `stale-32+int3` applies both. A combination has the
largest number of updates and the lowest learning rate of its parts. All methods of a regime have the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean

RECIPE = "laboratory"
UPDATES, LEARNING_RATE = 80, 1e-4  # of the recipe


@dataclass(frozen=True, slots=True)
class Regime:
    """A kind of mismatch, with the budget at which its effect is visible."""

    description: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # changed keys (dotted) of the recipe
    updates: int = UPDATES
    rate: float = LEARNING_RATE
    name: str = ""

    def settings(self, steps: int = UPDATES, rate: float = LEARNING_RATE) -> tuple[str, ...]:
        """Returns the changes and the budget as `key=value` strings for `load_config` and `--set`.

        The budget is in proportion to that of the regime `on-policy`: `steps` and the learning rate `rate`.
        """
        per_step = self.changes.get("trainer.minibatches", 1) * self.changes.get("trainer.epochs", 1)
        own_steps = math.ceil(self.updates / per_step)
        budget = {
            "trainer.steps": math.ceil(own_steps * steps / UPDATES),
            "optim.lr": f"{rate * self.rate / LEARNING_RATE:.3g}",
        }
        return tuple(f"{key}={value}" for key, value in {**self.changes, **budget}.items())


PARTS = {
    "on-policy": Regime("one update a batch, the sampler refreshed after each, float32 on both sides"),
    "bf16": Regime("the sampler in bfloat16", {"engine.dtype": "bfloat16"}),
    "int8": Regime("the sampler's weight matrices rounded to 8 bits", {"engine.quantize": "int8"}),
    "int4": Regime("the sampler's weight matrices rounded to 4 bits", {"engine.quantize": "int4"}),
    "int3": Regime("the sampler's weight matrices rounded to 3 bits", {"engine.quantize": "int3"}),
    # The k3 of `noise` is between those of int4 and int3, but the error changes at every refresh. The error of int3 is
    # constant, and methods differ in how much the policy learns to exploit it.
    "noise": Regime(
        "noise of 20% on the sampler's weight matrices, drawn anew at every refresh", {"engine.noise": 0.2}
    ),
    # At the default learning rate all methods collapse with a lag of 32 updates, so they cannot be distinguished.
    "stale-8": Regime("the sampler refreshed every 8 updates", {"trainer.sync_every": 8}, updates=128, rate=5e-5),
    "stale-32": Regime("the sampler refreshed every 32 updates", {"trainer.sync_every": 32}, updates=128, rate=5e-5),
    "reuse-4": Regime(
        "4 updates on every batch (4 mini-batches, 1 epoch)",
        {"trainer.minibatches": 4, "trainer.epochs": 1},
        updates=256,
    ),
    "reuse-16": Regime(
        "16 updates on every batch (4 mini-batches, 4 epochs)",
        {"trainer.minibatches": 4, "trainer.epochs": 4},
        updates=256,
    ),
    "top-p": Regime("sampled from the smallest set that holds 0.9 of the mass", {"sampling.top_p": 0.9}),
    "moe": Regime("a mixture of experts (8, 2 active) of the dense model's size", {"model.path": "laboratory-moe"}),
    "switch": Regime(
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
    owner: dict[str, str] = {}
    for word in words:
        for key in PARTS[word].changes:
            if (other := owner.setdefault(key, word)) != word:
                raise TrimtabError(f"regime {name!r}: {other!r} and {word!r} both set {key}; keep one of them")
    parts = [PARTS[word] for word in words]
    return Regime(
        "; ".join(part.description for part in parts),
        {key: value for part in parts for key, value in part.changes.items()},
        updates=max(part.updates for part in parts),
        rate=min(part.rate for part in parts),
        name=name,
    )
