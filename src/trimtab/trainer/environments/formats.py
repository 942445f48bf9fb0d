"""How a model writes tool calls and how results are shown to it: as text (`Format`) and tokens (`ResultEncoder`)."""

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
    """A tool call."""

    tool: str | None  # None if the format does not name the tool
    arguments: str | Mapping[str, Any]  # a text is the only argument


class ToolError(Exception):
    """An error that the model reads as the result of its call, as `Error: MESSAGE` without the type of the exception.

    Tools raise it, and `Format.parse` raises it for a call that cannot be parsed.
    """


class Format(Protocol):
    """Protocol: how calls and results are written as text.

    A format may also have an attribute `begin`, a tuple of the strings that begin a call: text after an unfinished call
    is not an answer.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a call. Generation stops at them, and at the stop strings of the task."""
        ...

    def parse(self, text: str) -> Call | None:
        """Returns the call at the end of a turn, or None. `text` is the whole turn with its stop string.

        Raises:
            ToolError: there is a call that cannot be parsed.
        """
        ...

    def render(self, result: str) -> str:
        """Returns the text that follows the turn: the result, and the beginning of the model's next turn."""
        ...


@dataclass(frozen=True)
class Tag:
    """A call inside the text: `<python>6 * 7</python>`, answered by `<output>42</output>`.

    `tools` are the names of the tools, which are also the names of the tags. The content of a tag is the only argument,
    as text. For tools in `multi_argument_tools`, it is a JSON object: `<add>{"left": 6, "right": 7}</add>`.
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
        return Call(tool, _parse_arguments(tool, content) if tool in self.multi_argument_tools else content)

    def render(self, result: str) -> str:
        return f"<output>{result}</output>"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Returns the description of the tools for a prompt, from their JSON schemas."""
        lines = ["Tools can be called. A call ends the turn; its result follows as <output>RESULT</output>."]
        for tool, function in zip(self.tools, (schema["function"] for schema in schemas), strict=True):
            names = list(function["parameters"]["properties"])
            template = ", ".join(f'"{name}": {name.upper()}' for name in names)
            content = f"{{{template}}}" if tool in self.multi_argument_tools else names[0].upper() if names else ""
            lines.append(f"<{tool}>{content}</{tool}>: {_explain_tool(function)}")
        return "\n".join(lines)


class Fence:
    """A call as a fenced block ```` ```python ````, answered by a block ```` ```output ````. For a single tool."""

    stop = ("\n```\n",)
    begin = ("```python",)

    def parse(self, text: str) -> Call | None:
        blocks = re.findall(r"(?:^|\n)```python[ \t]*\n(.*?)\n```[ \t]*(?:\n|$)", text, re.DOTALL)
        return Call(None, blocks[-1]) if blocks else None

    def render(self, result: str) -> str:
        return f"```output\n{result}\n```\n"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Returns the description of the tool for a prompt, from its JSON schema."""
        (schema,) = schemas
        return (
            "A tool can be called with a block that begins with ```python and ends with ```. A call ends the "
            f"turn; its result follows as a block ```output. The tool: {_explain_tool(schema['function'])}"
        )


def _explain_tool(function: Mapping[str, Any]) -> str:
    """Returns one line with the purpose and the parameters of a tool."""
    parameters = [
        f"{name} ({schema.get('type', 'any')}): {schema['description']}"
        for name, schema in function["parameters"]["properties"].items()
    ]
    return " ".join(" ".join([function["description"], *parameters]).split())


def _parse_arguments(tool: str, content: str) -> dict[str, Any]:
    try:
        arguments = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{tool}: the call is not a JSON object of arguments: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"{tool}: the call is not a JSON object of arguments")
    return arguments


BEGIN, END = "<tool_call>", "</tool_call>"
# The text of a call before its end, on several lines as in most chat templates.
SHAPE = '<tool_call>\n{"name": "", "arguments": {}}\n'
_QUESTION = {"role": "user", "content": "?"}
# Contains reasoning, because many templates drop the reasoning of earlier turns if a result follows.
_REASONED = "<think>\nThus.\n</think>\n\nI call."
_ADVICE = "take environment.format = 'tag', which works with every model, or a chat template that only appends"


class _Content(BaseModel):
    """The JSON between the tags of a call; other keys are ignored."""

    name: str
    arguments: dict[str, Any] | None = None


class Chat:
    """A call as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, its result as a message of role "tool".

    The observation contains the end of the assistant's message and all text of the template up to the next assistant
    message. It is appended to the sampled tokens, which are never rendered again.

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
        parts, reason = call[1].split(BEGIN), ""
        for index in range(len(parts)):  # the opening tag may also stand in a sentence before the call, or inside it
            try:
                content = _Content.model_validate_json(BEGIN.join(parts[index:]))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                reason = ": ".join([*map(str, first["loc"]), first["msg"]])
            else:
                return Call(content.name, content.arguments or {})
        raise ToolError(f'the call is not {{"name": ..., "arguments": {{...}}}}: {reason}')

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
    """Returns the format `name`: "tag", "fence", or a user's class as `module:Format`.

    `multi_argument_tools` are the tools that require more than one argument. The format "chat" needs a tokenizer and is
    created by `BuiltEnvironment.runner`.
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
CUT = " ... "  # replaces the middle of a long result
CHARACTERS = 32  # per token of the limit: only so many at each end of a very long result are encoded


class ResultEncoder:
    """Encodes results as the tokens that follow a turn, and decodes turns.

    Text of a result never becomes a control token: `<|im_end|>` in a result must not end a turn.

    Args:
        tokenizer: is copied and locked, because tokenizers are not thread-safe and each engine has a thread.
        form: how results are written.
        limit: largest number of tokens of a result; the middle of a longer result is cut out.
    """

    def __init__(self, tokenizer: Any, form: Format, limit: int) -> None:
        self.tokenizer, self._lock = copy.deepcopy(tokenizer), threading.Lock()
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # Tokens of a single character cannot be split, and are not control tokens.
        texts = [re.escape(str(token)) for token in added if len(str(token)) > 1]
        # Matches the first character of each added token in a text; matches of overlapping tokens are all found.
        self._beginning = re.compile(f"(?=(?:{'|'.join(texts)})).", re.DOTALL) if texts else re.compile("(?!)")
        self._form, self._limit = form, limit

    def observation(self, result: str) -> IntArray:
        """Returns the tokens that follow a turn: the rendered result."""
        return self._encode_around(result, self._form.render)

    def shortened(self, result: str) -> str:
        """Returns the text; if it has more tokens than the limit, its middle is cut out."""
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
        """Returns the tokens of `render(text)`, such that `text` itself contains no control tokens.

        A mark that does not occur in the text is inserted after the first character of each added token. The rendered
        text is then split at the marks, and the pieces are encoded separately.
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
    """Returns the text with unpaired surrogates, which tokenizers do not accept, written as `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()
