"""Environments of multi-turn episodes: tools, the text format of calls and results, the episodes of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from trimtab.environments.chat_format import Chat
from trimtab.environments.environment import check_class, describe_tool, tool_names
from trimtab.environments.formats import Format, build_format
from trimtab.errors import TrimtabError, did_you_mean, explain
from trimtab.plugins import load_function
from trimtab.types import Task

NAMES = ("python",)
"""The names of the built-in environments."""


@dataclass(frozen=True)
class BuiltEnvironment:
    """An environment ready for use.

    Attributes:
        kind: its class.
        factory: makes one for an episode.
        tools: the names of its tools.
        close: ends what all of them share.
    """

    kind: Any
    factory: Callable[[], Any]
    tools: tuple[str, ...]
    close: Callable[[], None] = lambda: None

    def adapt(self, task: Task, form: str, instructions: str) -> Task:
        """Returns `task` with the stops of the format, and instructions or the tools in its prompts.

        Raises:
            TrimtabError: the format is unknown, or does not fit the tools or the style of the prompts.
        """
        if form == "chat":
            return task.with_tools(stop=(), schemas=self.schemas(), instructions=instructions)
        return task.with_tools(stop=build_format(form, self.tools).stop, schemas=(), instructions=instructions)

    def format(self, name: str, tokenizer: Any) -> Format:
        """Returns the format of calls and results. Raises what `adapt` raises, and what `Chat` raises."""
        return Chat(tokenizer, self.schemas()) if name == "chat" else build_format(name, self.tools)

    def schemas(self) -> tuple[dict[str, Any], ...]:
        """Returns the JSON schemas of the tools."""
        return tuple(describe_tool(getattr(self.kind, tool), f"tool {tool!r}") for tool in self.tools)


def build(name: str | type, options: Mapping[str, Any]) -> BuiltEnvironment:
    """Returns the environment `name`: "python", a class, or a user's own class as `module:Class`.

    Args:
        options: keywords of the environment; those of a class are arguments of its constructor.

    Raises:
        TrimtabError: an unknown name or option, a class that is no environment, a sandbox that cannot run here.
    """
    if not isinstance(name, str):
        return _of_class(name, name.__name__, options)
    if name == "python":
        from trimtab.environments import python_environment

        try:
            checked = python_environment.Options(**options)
        except ValidationError as error:
            fields = python_environment.Options.model_fields
            raise TrimtabError(f"environment {name!r}: {explain(error, fields)}") from None
        pool = python_environment.build_pool(checked)
        kind = python_environment.PythonEnvironment
        return BuiltEnvironment(kind, functools.partial(kind, pool), tuple(tool_names(kind)), pool.close)
    if ":" not in name:
        raise TrimtabError(f"unknown environment {name!r}{did_you_mean(name, NAMES)}; write your own as module:Class")
    return _of_class(load_function(name, "environment"), name, options)


def _of_class(kind: Callable[..., Any], name: str, options: Mapping[str, Any]) -> BuiltEnvironment:
    check_class(kind, name)
    return BuiltEnvironment(kind, functools.partial(kind, **options), tuple(tool_names(kind)))
