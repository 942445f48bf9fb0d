"""How a model writes a call, and how the result is shown to it: as text (`Format`) and as tokens (`ResultEncoder`)."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ValidationError

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.plugins import load_function
from trimtab.trainer import chat_template
from trimtab.types import IntArray


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

    It may also have `begin`, the strings that begin a call: what follows one is not an answer where the call does not
    end.
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

    `tools` are the names of the tools, each of which has a tag. The content is the only argument, as text; for the
    tools in `multi_argument_tools` it is a JSON object of their arguments: `<add>{"left": 6, "right": 7}</add>`.
    """

    tools: tuple[str, ...]
    multi_argument_tools: frozenset[str] = frozenset()

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{tool}>" for tool in self.tools)

    @property
    def begin(self) -> tuple[str, ...]:
        return tuple(f"<{tool}>" for tool in self.tools)

    def parse(self, text: str) -> Call | None:
        names = "|".join(map(re.escape, self.tools))
        # From the last opening tag on: an earlier one may stand in a sentence, "I will use <python> to compute".
        calls = re.findall(rf"<({names})>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL)
        if not calls:
            return None
        tool, content = calls[-1]
        return Call(tool, _arguments(tool, content) if tool in self.multi_argument_tools else content)

    def render(self, result: str) -> str:
        return f"<output>{result}</output>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Returns what a prompt says of the tools, whose JSON schemas are given."""
        lines = ["Tools can be called. A call ends the turn; its result follows as <output>RESULT</output>."]
        for tool, function in zip(self.tools, (schema["function"] for schema in schemas), strict=True):
            names = list(function["parameters"]["properties"])
            template = ", ".join(f'"{name}": {name.upper()}' for name in names)
            content = f"{{{template}}}" if tool in self.multi_argument_tools else names[0].upper() if names else ""
            lines.append(f"<{tool}>{content}</{tool}>: {_explanation(function)}")
        return "\n".join(lines)


class Fence:
    """A fenced block of code, ```` ```python ````, answered by a block ```` ```output ````. For one tool only."""

    stop = ("\n```\n",)
    begin = ("```python",)

    def parse(self, text: str) -> Call | None:
        blocks = re.findall(r"(?:^|\n)```python[ \t]*\n(.*?)\n```[ \t]*(?:\n|$)", text, re.DOTALL)
        return Call(None, blocks[-1]) if blocks else None

    def render(self, result: str) -> str:
        return f"```output\n{result}\n```\n"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Returns what a prompt says of the tool, whose JSON schema is given."""
        (schema,) = schemas
        return (
            "A tool can be called with a block that begins with ```python and ends with ```. A call ends the "
            f"turn; its result follows as a block ```output. The tool: {_explanation(schema['function'])}"
        )


def _explanation(function: Mapping[str, Any]) -> str:
    """What a tool does and what its parameters are, in one line."""
    parameters = [
        f"{name} ({schema.get('type', 'any')}): {schema['description']}"
        for name, schema in function["parameters"]["properties"].items()
    ]
    return " ".join(" ".join([function["description"], *parameters]).split())


def _arguments(tool: str, content: str) -> dict[str, Any]:
    try:
        arguments = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{tool}: the call is not a JSON object of arguments: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"{tool}: the call is not a JSON object of arguments")
    return arguments


BEGIN, END = "<tool_call>", "</tool_call>"
# The text that a call has before its end, over several lines as most templates teach it.
SHAPE = '<tool_call>\n{"name": "", "arguments": {}}\n'
_QUESTION = {"role": "user", "content": "?"}
# With a thought, because many templates drop those of earlier turns when a result follows them.
_REASONED = "<think>\nThus.\n</think>\n\nI call."
_ADVICE = "take environment.format = 'tag', which works with every model, or a chat template that only appends"


class _Content(BaseModel):
    """What is between the tags of a call; further keys are ignored."""

    name: str
    arguments: dict[str, Any] | None = None


class Chat:
    """A call as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, its result as a message of role "tool".

    What follows a call is the end of the assistant's message and all that the template puts before the beginning of the
    next one; it is appended to the sampled tokens, which are never rendered again.

    Args:
        schemas: JSON schemas of the tools.
    """

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        self._label = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'this tokenizer'}"
        if self._apply([_QUESTION]) == self._apply([_QUESTION], tools=None):
            raise TrimtabError(f"{self._label} does not show tools to the model: {_ADVICE}")
        self.render("")

    stop = (END,)  # a message without a call ends with the end-of-sequence token
    begin = (BEGIN,)

    def parse(self, text: str) -> Call | None:
        call = re.search(rf"{BEGIN}(.*?){END}", text, re.DOTALL)
        if call is None:
            return None
        try:
            content = _Content.model_validate_json(call[1])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise ToolError(f'the call is not {{"name": ..., "arguments": {{...}}}}: {reason}') from None
        return Call(content.name, content.arguments or {})

    def render(self, result: str) -> str:
        function = {"name": self._schemas[0]["function"]["name"], "arguments": {}}
        called = {"role": "assistant", "content": _REASONED, "tool_calls": [{"type": "function", "function": function}]}
        answer = {"role": "tool", "name": function["name"], "content": result}
        before = self._apply([_QUESTION, called])
        after = self._apply([_QUESTION, called, answer], add_generation_prompt=True)
        if not after.startswith(before.rstrip("\n")):
            raise TrimtabError(f"{self._label} changes earlier turns when a result follows them: {_ADVICE}")
        end = self._tokenizer.eos_token
        if not end or end not in before:
            raise TrimtabError(f"{self._label} does not end a message with {end!r}: {_ADVICE}")
        return after[before.rindex(end) :]

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return chat_template.render(self._tokenizer, messages, **{"tools": self._schemas, **options})


def build_format(name: str, tools: tuple[str, ...], multi_argument_tools: frozenset[str] = frozenset()) -> Format:
    """Returns the format `name`: "tag", "fence", or a user's own class as `module:Format`.

    `multi_argument_tools` are the tools that need more than one argument. "chat" needs a tokenizer: see
    `BuiltEnvironment.runner`.
    """
    if name == "tag":
        return Tag(tools, multi_argument_tools)
    if name == "fence":
        if len(tools) != 1:
            raise TrimtabError(f"format 'fence' does not name the tool, and there are {len(tools)}: take format 'tag'")
        if multi_argument_tools:
            raise TrimtabError(f"format 'fence' has one argument, and tool {tools[0]!r} needs more: take format 'tag'")
        return Fence()
    if ":" not in name:
        known = did_you_mean(name, ["tag", "fence", "chat"])
        raise TrimtabError(f"unknown format {name!r}{known}; write your own as module:Format")
    try:
        call_format = load_function(name, "format")()
    except TypeError as error:
        raise TrimtabError(
            f"format {name!r} cannot be made without arguments ({error}): write __init__(self)"
        ) from None
    missing = [part for part in ("stop", "parse", "render") if not hasattr(call_format, part)]
    if missing:
        raise TrimtabError(f"format {name!r} has no {missing[0]!r}: it needs stop, parse(text) and render(result)")
    for part in ("stop", "begin"):
        if isinstance(strings := getattr(call_format, part, ()), str):
            raise TrimtabError(f"format {name!r}: {part} = {strings!r} must be a tuple of strings")
    return call_format


MARK = "\ue000"  # a character of Unicode's private use area
CUT = " ... "  # stands for what is left out of the middle of a long result
CHARACTERS = 32  # of a token that are read of a result too long to be encoded as a whole


class ResultEncoder:
    """Encodes results as the tokens that follow a turn, and decodes turns: a tokenizer with a format.

    Text of a result never becomes a control token: `<|im_end|>` in it must not end a turn.

    Args:
        tokenizer: a copy with a lock is used, because tokenizers are not thread-safe and each engine has a thread.
        form: how a result is written.
        limit: tokens of a result; a longer one is cut in the middle.
    """

    def __init__(self, tokenizer: Any, form: Format, limit: int) -> None:
        self.tokenizer, self._lock = copy.deepcopy(tokenizer), threading.Lock()
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # One character cannot be taken apart, and is not a control token.
        texts = [re.escape(str(token)) for token in added if len(str(token)) > 1]
        # The first character of each text that is one token beside the vocabulary, those that overlap included.
        self._beginning = re.compile(f"(?=(?:{'|'.join(texts)})).", re.DOTALL) if texts else re.compile("(?!)")
        self._form, self._limit = form, limit

    def observation(self, result: str) -> IntArray:
        """Returns the tokens that follow a turn."""
        return self._encode_around(result, self._form.render)

    def shortened(self, result: str) -> str:
        """Returns the text with its middle cut out if it has more tokens than the limit."""
        room = self._limit * CHARACTERS
        if len(result) <= 2 * room:
            head = tail = self._encode_around(result)
            if len(head) <= self._limit:
                return result
        else:
            head, tail = self._encode_around(result[:room]), self._encode_around(result[-room:])
        return self.decode(head[: (self._limit + 1) // 2]) + CUT + self.decode(tail[len(tail) - self._limit // 2 :])

    def decode(self, ids: Iterable[int]) -> str:
        with self._lock:
            return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _encode_around(self, text: str, render: Callable[[str], str] = str) -> IntArray:
        """Encodes what `render` makes of a text, in pieces that keep the text from holding control tokens.

        A mark that the text does not have is put inside of each added token: the parts between are plain text.
        """
        longest = max(map(len, re.findall(f"{MARK}+", text)), default=0)
        mark = MARK * (longest + 1)
        marked = self._beginning.sub(lambda first: first[0] + mark, text)
        pieces: list[IntArray] = []
        for piece in render(marked).split(mark):
            with self._lock:
                ids = self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            pieces.append(np.asarray(ids, dtype=np.int64))
        return np.concatenate(pieces)


def escape_surrogates(text: str) -> str:
    """Returns the text with halves of surrogate pairs, which no tokenizer takes, as `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()
