"""The form of a refused combination of settings, and the facts it is decided from. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from trimtab.config.schema import Config

Stage = Literal["config", "objective", "task"]
"""When a rule can be decided: with the recipe alone; with the built objective, the number of ranks and the files of
this machine; with the built task and rewards."""


class ObjectiveTraits(Protocol):
    """What rules read of an `Objective`, without importing torch."""

    @property
    def name(self) -> str: ...
    @property
    def ratio(self) -> Any: ...
    @property
    def masks(self) -> Sequence[Any]: ...
    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def policy_needs(self) -> frozenset[str]: ...
    @property
    def advantage(self) -> str: ...
    @property
    def single_behavior(self) -> bool: ...
    @property
    def one_advantage_per_response(self) -> bool: ...


class TaskTraits(Protocol):
    """What rules read of a `Task`."""

    @property
    def name(self) -> str: ...
    @property
    def train(self) -> Sequence[Any]: ...


class Facts(NamedTuple):
    """What is known about a run: its recipe, and from a later stage on its built parts.

    `world_size` is the number of ranks of this run's process group, None where it is not known. `rewards` are the names
    under which rewards are logged, `eval_metrics` the keys of all accuracies that are measured.
    """

    config: Config
    objective: ObjectiveTraits | None = None
    world_size: int | None = 1
    task: TaskTraits | None = None
    rewards: Sequence[str] = ()
    eval_metrics: Sequence[str] = ()


class Rule(NamedTuple):
    """A refused combination of settings.

    `broken` returns a true value if the facts break the rule. `message` says what is wrong and what to do: a format
    string over the sections and keys of the recipe, the built `objective` and `task`, and `value`, which is what
    `broken` returned.
    """

    name: str
    broken: Callable[[Any], Any]
    message: str

    def check(self, facts: Facts) -> str | None:
        """Returns the message if `facts` break the rule, else None."""
        value = self.broken(facts)
        return self.message.format(**{**dict(facts.config), **facts._asdict()}, value=value) if value else None
