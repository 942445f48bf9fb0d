"""Calls and results in the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from trimtab.errors import TrimtabError
from trimtab.trainer import chat_template
from trimtab.trainer.environments.formats import Call, ToolError

BEGIN, END = "<tool_call>", "</tool_call>"
"""What begins a call, and what ends it and with it the turn."""
SHAPE = '<tool_call>\n{"name": "", "arguments": {}}\n'
"""The text that a call has before its end, over several lines as most templates teach it."""
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

    Raises:
        TrimtabError: the template shows no tools, changes earlier messages when a result follows them, or does not end
            a message with the tokenizer's end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        self._label = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'this tokenizer'}"
        if self._apply([_QUESTION]) == self._apply([_QUESTION], tools=None):
            raise TrimtabError(f"{self._label} does not show tools to the model: {_ADVICE}")
        self.render("")

    @property
    def stop(self) -> tuple[str, ...]:
        """The end of a call; a message without one ends with the end-of-sequence token."""
        return (END,)

    @property
    def begin(self) -> tuple[str, ...]:
        return (BEGIN,)

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
        called = {
            "role": "assistant",
            "content": _REASONED,
            "tool_calls": [{"type": "function", "function": function}],
        }
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
