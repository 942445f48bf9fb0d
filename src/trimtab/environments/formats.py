"""How a model writes a call, and how the result is shown to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.plugins import load_function


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. `tool` is None where the format does not name it; a text is the tool's only argument."""

    tool: str | None
    arguments: str | Mapping[str, Any]


class ToolError(Exception):
    """An error that the model reads as the result of its call: `Error: MESSAGE`, without the type of the exception.

    Tools raise it, and `Format.parse` for a call that cannot be understood.
    """


class Format(Protocol):
    """The text of calls and results.

    It may also have `begin`, the strings that begin a call: what follows one is no answer where the call has no end.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a call. Generation stops there, in addition to the stops of the task."""
        ...

    def parse(self, text: str) -> Call | None:
        """Returns the call at the end of a turn, or None. `text` is the whole turn, with the string that ended it.

        Raises:
            ToolError: there is a call that cannot be understood.
        """
        ...

    def render(self, result: str) -> str:
        """Returns the text that follows the turn: the result, and what begins the model's next turn."""
        ...


@dataclass(frozen=True)
class Tag:
    """A call inside the text: `<python>6 * 7</python>`, answered by `<output>42</output>`.

    `tools` are the names of the tools, each with a tag of its own. The content is the only argument, as text.
    """

    tools: tuple[str, ...]

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{tool}>" for tool in self.tools)

    @property
    def begin(self) -> tuple[str, ...]:
        return tuple(f"<{tool}>" for tool in self.tools)

    def parse(self, text: str) -> Call | None:
        names = "|".join(map(re.escape, self.tools))
        calls = re.findall(rf"<({names})>(.*?)</\1>", text, re.DOTALL)
        return Call(*calls[-1]) if calls else None

    def render(self, result: str) -> str:
        return f"<output>{result}</output>"


@dataclass(frozen=True)
class Fence:
    """A fenced block of code, ```` ```python ````, answered by a block ```` ```output ````. For one tool only."""

    language: str = "python"

    @property
    def stop(self) -> tuple[str, ...]:
        return ("\n```\n",)

    @property
    def begin(self) -> tuple[str, ...]:
        return (f"```{self.language}",)

    def parse(self, text: str) -> Call | None:
        blocks = re.findall(rf"(?:^|\n)```{self.language}[ \t]*\n(.*?)\n```[ \t]*(?:\n|$)", text, re.DOTALL)
        return Call(None, blocks[-1]) if blocks else None

    def render(self, result: str) -> str:
        return f"```output\n{result}\n```\n"


def build_format(name: str, tools: tuple[str, ...]) -> Format:
    """Returns the format `name`: "tag", "fence", or a user's own class as `module:Format`.

    Raises:
        TrimtabError: an unknown name; "fence" for several tools; a class that cannot be imported or has no `parse`,
            `render` or `stop`.
    """
    if name == "tag":
        return Tag(tools)
    if name == "fence":
        if len(tools) != 1:
            raise TrimtabError(f"format 'fence' does not name the tool, and there are {len(tools)}: take format 'tag'")
        return Fence()
    if ":" not in name:
        raise TrimtabError(f"unknown format {name!r}{did_you_mean(name, NAMES)}; write your own as module:Format")
    return _load_format(name)


def _load_format(name: str) -> Format:
    try:
        form = load_function(name, "format")()
    except TypeError as error:
        raise TrimtabError(
            f"format {name!r} cannot be made without arguments ({error}): write __init__(self)"
        ) from None
    missing = [part for part in ("stop", "parse", "render") if not hasattr(form, part)]
    if missing:
        raise TrimtabError(f"format {name!r} has no {missing[0]!r}: it needs stop, parse(text) and render(result)")
    for part, verb in (("stop", "end"), ("begin", "begin")):
        strings = getattr(form, part, ())
        if (
            isinstance(strings, str)
            or not isinstance(strings, Sequence)
            or not all(isinstance(one, str) and one for one in strings)
        ):
            raise TrimtabError(
                f"format {name!r}: {part} = {strings!r} must be a tuple of strings: those that {verb} a call"
            )
    return form


NAMES = ("tag", "fence", "chat")
"""The names of the built-in formats; "chat" is in chat_format.py."""
