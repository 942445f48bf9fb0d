"""An environment ready for use, built from its description in a recipe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trimtab.errors import TrimtabError, did_you_mean, explain
from trimtab.plugins import load_function
from trimtab.trainer.environments.environment import check_class, describe_tool, required_parameters, tool_names
from trimtab.trainer.environments.episodes import EpisodeLimits, EpisodeRunner
from trimtab.trainer.environments.formats import END, SHAPE, Chat, Fence, Format, Tag, build_format
from trimtab.trainer.environments.swap_environment import SwapEnvironment
from trimtab.types import Problem, Prompt, Task

T = TypeVar("T", bound=BaseModel)

NAMES = ("python", "swap", "openenv")
"""The names of the built-in environments."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment and how its episodes run.

    Attributes:
        name: "python", "swap", "openenv", a class, or a user's own class as `module:Class`.
        options: keywords of the environment; those of a class are arguments of its constructor.
        format: "tag", "fence", "chat", or a user's own class as `module:Format`.
        instructions: text before every prompt.
        turn_tokens: largest number of tokens of a turn; None: those of the whole episode.
        turns, observation_tokens, timeout, answer: see `EpisodeLimits`.
    """

    name: str | type
    options: Mapping[str, Any] = field(default_factory=dict)
    format: str = "tag"
    instructions: str = ""
    turns: int = 5
    turn_tokens: int | None = None
    observation_tokens: int = 256
    timeout: float = 10.0
    answer: str | None = None


@dataclass(frozen=True)
class BuiltEnvironment:
    """An environment ready for use.

    Attributes:
        spec: how its episodes run.
        kind: its class.
        factory: makes one for an episode.
        close: ends what all of them share.
        concurrent_calls: how many calls run at a time; more wait. None: all.
    """

    spec: EnvironmentSpec
    kind: Any
    factory: Callable[[], Any]
    close: Callable[[], None] = lambda: None
    concurrent_calls: int | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the tools."""
        return tuple(tool_names(self.kind))

    def adapt(self, task: Task) -> Task:
        """Returns `task` with the stops of the format, and instructions or the tools in its prompts.

        Raises:
            TrimtabError: the format is unknown, or does not fit the tools or the style of the prompts.
        """
        if self.spec.format == "chat":
            shape, adapted = SHAPE, task.with_tools((END,), self.schemas(), self.spec.instructions, "")
        else:
            form = self._text_format()
            # The code of a block begins in a new line.
            shape = "".join(getattr(form, "begin", ())) + ("\n" if isinstance(form, Fence) else "")
            description = ""
            if isinstance(form, Tag | Fence) and not self.spec.instructions:
                description = form.describe(self.schemas())
            adapted = task.with_tools(tuple(form.stop), (), self.spec.instructions, description)
        inside = [stop for stop in task.stop if stop in shape]
        if inside:
            raise TrimtabError(
                f"a turn of task {task.name!r} ends at {inside[0]!r}, before a call in environment.format = "
                f"{self.spec.format!r} is complete: take another task.stop or format"
            )
        return adapted

    def runner(
        self,
        tokenizer: Any,
        max_tokens: int,
        encode_prompt: Callable[[Problem, Any], Prompt],
        max_prompt: int | None = None,
    ) -> EpisodeRunner:
        """Returns the runner of episodes of at most `max_tokens` tokens, observations included.

        `encode_prompt` returns the prompt of a problem for a tokenizer. `max_prompt` is the number of its tokens that
        the context holds besides an episode; None if it is not known.

        Raises:
            TrimtabError: what `adapt` raises; a chat template that cannot be continued.
        """
        spec = self.spec
        form = Chat(tokenizer, self.schemas()) if spec.format == "chat" else self._text_format()
        limits = EpisodeLimits(
            spec.turns, spec.turn_tokens or max_tokens, spec.observation_tokens, spec.timeout, spec.answer
        )
        return EpisodeRunner(
            self.factory, form, limits, tokenizer, max_tokens, encode_prompt, max_prompt, self.concurrent_calls
        )

    def _text_format(self) -> Format:
        multi_argument = frozenset(tool for tool in self.tools if len(required_parameters(self.kind, tool)) > 1)
        return build_format(self.spec.format, self.tools, multi_argument)

    def schemas(self) -> tuple[dict[str, Any], ...]:
        """Returns the JSON schemas of the tools."""
        return tuple(describe_tool(getattr(self.kind, tool), f"tool {tool!r}") for tool in self.tools)


def build(spec: EnvironmentSpec) -> BuiltEnvironment:
    """Returns the environment.

    Raises:
        TrimtabError: an unknown name or option, a class that is not an environment, a sandbox that cannot run here.
    """
    name = SwapEnvironment if spec.name == "swap" else spec.name
    if name == "python":
        return _python(spec)
    if name == "openenv":
        return _openenv(spec)
    if isinstance(name, str) and ":" not in name:
        raise TrimtabError(f"unknown environment {name!r}{did_you_mean(name, NAMES)}; write your own as module:Class")
    kind = load_function(name, "environment") if isinstance(name, str) else name
    label = spec.name if isinstance(spec.name, str) else spec.name.__name__
    check_class(kind, label)
    try:
        inspect.signature(kind).bind(**spec.options)
    except TypeError as error:
        raise TrimtabError(f"environment {label!r}: {error}") from None
    return BuiltEnvironment(spec, kind, functools.partial(kind, **spec.options))


def _python(spec: EnvironmentSpec) -> BuiltEnvironment:
    from trimtab.trainer.environments.python_environment import Options, PythonEnvironment, build_pool

    options = _options(Options, spec)
    pool = build_pool(options, spec.timeout)
    factory = functools.partial(PythonEnvironment, pool, stateful=options.stateful)
    return BuiltEnvironment(spec, PythonEnvironment, factory, pool.close, concurrent_calls=options.workers)


def _openenv(spec: EnvironmentSpec) -> BuiltEnvironment:
    from trimtab.trainer.environments.openenv import Options, openenv_class

    options = _options(Options, spec)
    kind = openenv_class(options)
    check_class(kind, "openenv")
    return BuiltEnvironment(spec, kind, functools.partial(kind, options))


def _options(options: type[T], spec: EnvironmentSpec) -> T:
    try:
        return options(**spec.options)
    except ValidationError as error:
        raise TrimtabError(f"environment {spec.name!r}: {explain(error, options.model_fields)}") from None
