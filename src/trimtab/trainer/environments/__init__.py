"""Environments of multi-turn episodes: `build(section)` returns a `BuiltEnvironment`, built-in or of a user's class.

`environment` defines the protocol of environment classes and calls their tools. `formats` defines how calls and results
are written. `episodes` runs the episodes of a request; `episode` is one of them, with its calls in the `background`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.plugins import load_function
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.environment import check_class, describe_tool, required_parameters, tool_names
from trimtab.trainer.environments.episodes import EpisodeRunner
from trimtab.trainer.environments.formats import END, SHAPE, Chat, Fence, Format, Tag, build_format
from trimtab.trainer.environments.swap_environment import SwapEnvironment
from trimtab.trainer.registry import Registry
from trimtab.types import Problem, Prompt, Task

OWN = "write your own as module:Class"
KINDS = Registry(
    "environment", {"openenv": "environments.openenv:Options", "python": "environments.python_environment:Options"}, OWN
)


@dataclass(frozen=True)
class BuiltEnvironment:
    """A built environment, which creates one environment object for each episode."""

    section: EnvironmentConfig  # how episodes run
    label: str  # name in messages
    kind: Any  # the class of the environment
    factory: Callable[[], Any]  # creates an object of the class
    close: Callable[[], None] = lambda: None  # releases resources that all objects share
    concurrent_calls: int | None = None  # number of calls that run at a time, the others wait; None: no limit

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the tools."""
        return tuple(tool_names(self.kind))

    def adapt(self, task: Task) -> Task:
        """Returns `task` with the stop strings of the format, and with instructions or the tools in its prompts."""
        name, instructions = self.section.format, self.section.instructions
        if name == "chat":
            shape, adapted = SHAPE, task.with_tools((END,), self.schemas(), instructions, "")
        else:
            form = self._build_text_format()
            # The code of a fenced block begins on a new line.
            shape = "".join(getattr(form, "begin", ())) + ("\n" if isinstance(form, Fence) else "")
            description = ""
            if isinstance(form, Tag | Fence) and not instructions:
                description = form.describe(self.schemas())
            adapted = task.with_tools(tuple(form.stop), (), instructions, description)
        inside = [stop for stop in task.stop if stop in shape]
        if inside:
            raise TrimtabError(
                f"a turn of task {task.name!r} ends at {inside[0]!r}, before a call in environment.format = {name!r} "
                "is complete: take another task.stop or format"
            )
        return adapted

    def refuse_unused_rewards(self, given: str | None) -> None:
        """Raises `TrimtabError` if the user gave rewards although the environment class has `get_reward`.

        `given` names the rewards in the message; it is None if the user gave none (the task may have default rewards).
        """
        if given is None or not hasattr(self.kind, "get_reward"):
            return
        other = "take get_reward() out of the class"
        if self.label == "openenv":
            other = "set environment.reward = false, and the rewards score the last turn"
        raise TrimtabError(
            f"environment {self.label!r} has get_reward(), which scores its episodes, so {given} would never be "
            f"called: leave it out, or {other}"
        )

    def runner(
        self,
        tokenizer: Any,
        max_tokens: int,
        encode_prompt: Callable[[Problem, Any], Prompt],
        max_prompt: int | None = None,
    ) -> EpisodeRunner:
        """Returns a runner of episodes with at most `max_tokens` tokens, including observations.

        `encode_prompt` returns the prompt of a problem, encoded by a tokenizer. `max_prompt` is the largest number of
        prompt tokens that fits into the context beside an episode, or None if it is not known.
        """
        form = Chat(tokenizer, self.schemas()) if self.section.format == "chat" else self._build_text_format()
        return EpisodeRunner(
            self.factory, form, self.section, tokenizer, max_tokens, encode_prompt, max_prompt, self.concurrent_calls
        )

    def _build_text_format(self) -> Format:
        multi_argument = frozenset(tool for tool in self.tools if len(required_parameters(self.kind, tool)) > 1)
        return build_format(self.section.format, self.tools, multi_argument)

    def schemas(self) -> tuple[dict[str, Any], ...]:
        """Returns the JSON schemas of the tools."""
        return tuple(describe_tool(getattr(self.kind, tool), f"tool {tool!r}") for tool in self.tools)


def build(section: EnvironmentConfig, kind: type | None = None) -> BuiltEnvironment:
    """Returns the environment that the section describes; the class `kind`, if given, replaces the class it names.

    Raises `TrimtabError` for an unknown name or option, a class that is not an environment, a class that an earlier run
    received in Python and that has no importable name, and a sandbox that cannot run on this machine.
    """
    if kind is None and section.name in KINDS.classes:
        return KINDS.read(section.name, section.keywords).build(section)
    label = section.name if kind is None else kind.__name__
    factory: Any = kind or _load_class(section.name)
    check_class(factory, label)
    try:
        inspect.signature(factory).bind(**section.keywords)
    except TypeError as error:
        raise TrimtabError(f"environment {label!r}: {error}") from None
    return BuiltEnvironment(section, label, factory, functools.partial(factory, **section.keywords))


def _load_class(name: str) -> Any:
    if name == "swap":
        return SwapEnvironment
    if ":" not in name:
        raise TrimtabError(f"unknown environment {name!r}{did_you_mean(name, ['swap', *KINDS.classes])}; {OWN}")
    module, _, kind = name.partition(":")
    if "<locals>" in kind or (module == "__main__" and not hasattr(sys.modules["__main__"], kind)):
        last = kind.rpartition(".")[2]
        raise TrimtabError(
            f"environment {name!r} was given in Python, trimtab.train(environment={last}), and has no name that leads "
            f"to it from here: put the class into a module and add --set environment.name=MODULE:{last}, or pass it "
            "to trimtab.train again"
        )
    return load_function(name, "environment")
