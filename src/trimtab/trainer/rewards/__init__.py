"""Rewards: `build(specs, task) -> Scorer`; see docs/reference-tasks.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.plugins import check_arguments, load_function
from trimtab.trainer.registry import Registry
from trimtab.trainer.rewards.scorer import Built, Response, Score, Scorer, Weighted
from trimtab.types import RewardSpec, Task

__all__ = ["KINDS", "Response", "Score", "Scorer", "Weighted", "build", "weighted"]

KINDS = Registry(
    "reward",
    {
        "exact": "rewards.builtin:Exact",
        "numeric": "rewards.builtin:Numeric",
        "math": "rewards.builtin:MathEqual",
        "format": "rewards.builtin:Format",
        "overlong": "rewards.builtin:Overlong",
        "reasoning-gym": "rewards.builtin:GymScore",
        "python-tests": "rewards.builtin:PythonTests",
        "by-task": "rewards.builtin:ByTask",
    },
    "write your own as module:function",
)


Spec = RewardSpec | tuple[str | Callable[..., Any], float, float, Mapping[str, Any]]


def build(specs: Sequence[Spec], task: Task) -> Scorer:
    """Returns a scorer for these rewards, or for the task's rewards if `specs` is empty.

    Each spec is `(name or callable, weight, timeout in seconds, options)`. The first is by convention the one that says
    "correct". Build it before torch and models are loaded: it forks the process that will run untrusted rewards.

    Raises `TrimtabError`: unknown reward or option (naming the nearest), a user function that cannot be imported.
    """
    return Scorer(weighted(specs, task))


def weighted(specs: Sequence[Spec], task: Task) -> list[Weighted]:
    """Returns the rewards of `build` without the processes that run them. Raises what `build` raises."""
    entries: list[Weighted] = []
    labels: list[str] = []
    for spec in specs or task.rewards:
        given = RewardSpec(*spec)
        label = given.name if isinstance(given.name, str) else getattr(given.name, "__name__", "reward")
        labels.append(label)
        if not math.isfinite(given.weight):
            raise TrimtabError(f"reward {label!r}: weight must be a finite number, got {given.weight}")
        if not 0 < given.timeout < math.inf:
            raise TrimtabError(f"reward {label!r}: timeout must be a positive number of seconds, got {given.timeout}")
        name = f"{label}-{count}" if (count := labels.count(label)) > 1 else label
        entries.append(Weighted(name, given.weight, given.timeout, _built(label, given, task)))
    return entries


def _built(label: str, spec: RewardSpec, task: Task) -> Built:
    if not isinstance(spec.name, str) or ":" in spec.name:
        if spec.options:
            given = ", ".join(map(repr, spec.options))
            raise TrimtabError(f"reward {label!r}: your own function takes no options, got {given}")
        function = load_function(spec.name, "reward") if isinstance(spec.name, str) else spec.name
        check_arguments(function, f"reward {label!r}", {"completion": "str", "problem": "Problem"})
        return Built(lambda response, problem: function(response.text, problem), isolated=True)
    return KINDS.read(spec.name, spec.options).build(task)
