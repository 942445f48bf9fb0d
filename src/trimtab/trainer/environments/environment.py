"""The protocol of environments, their tools, and calls of these.

An environment is an object of any class with `reset(**row)` and public methods, which are the tools. It is TRL's
`environment_factory` protocol, so that one class serves both:

    class Counter:
        def reset(self, **row) -> str | None:     # text appended to the question, or None
            self.count = 0

        def increment(self, step: int) -> int:    # a tool: type hints and docstring describe it to the model
            '''Adds to the count.

            Args:
                step: the number to add.
            '''
            self.count += step
            return self.count

        def get_reward(self) -> float:            # optional; otherwise the recipe's rewards score the last turn
            return float(self.count == 10)

Methods may be coroutines.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from trimtab.errors import TrimtabError, first_line
from trimtab.trainer.environments.background import EnvironmentFailed
from trimtab.trainer.environments.formats import Call, ToolError

NOT_TOOLS = {"reset", "get_reward", "close"}
JSON_SCHEMA = "json_schema"
"""An attribute of a tool that has its schema, which is otherwise made from type hints and docstring."""

_COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def check_class(factory: Callable[[], Any], name: str) -> None:
    """Raises `TrimtabError` for a class that is not an environment.

    It needs a `reset` that takes a row, and tools with descriptions.
    """
    reset = getattr(factory, "reset", None)
    if not callable(reset):
        raise TrimtabError(f"environment {name!r} has no method reset(self, **row): add one; it may return None")
    try:
        # What else is in a row depends on the task: parameters without a value here may get one there.
        inspect.signature(reset).bind_partial(id="", question="", answer="")
    except (TypeError, ValueError) as error:
        raise TrimtabError(
            f"environment {name!r}: reset does not take the row of a problem ({error}): write reset(self, **row)"
        ) from None
    methods = tool_names(factory)
    if not methods:
        raise TrimtabError(f"environment {name!r} has no tool: add a public method with type hints and a docstring")
    for method in methods:
        describe_tool(getattr(factory, method), f"environment {name!r}, tool {method!r}")


def row_for(reset: Callable[..., Any], columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns the keywords of `reset`: the columns of a problem, with `prompt` and `seed` where it takes them.

    `prompt` is the question, as in TRL's rows, and `seed` one for the random draws of the environment, unless columns
    of the problem have these names.
    """
    parameters = inspect.signature(reset).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    more = {"prompt": columns["question"], "seed": seed}
    return {name: value for name, value in more.items() if takes_all or name in parameters} | dict(columns)


def tool_names(kind: Any) -> list[str]:
    """Returns the names of the tools of a class: its public methods besides `reset`, `get_reward` and `close`.

    Classes and other callables in its body do not count, and neither do class methods: TRL takes the same ones.
    """
    members = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in NOT_TOOLS]


def required_parameters(kind: Any, tool: str) -> list[str]:
    """Returns the names of the parameters of a tool without a default, but for `self`."""
    parameters = list(inspect.signature(getattr(kind, tool)).parameters.values())
    own = parameters if isinstance(inspect.getattr_static(kind, tool), staticmethod) else parameters[1:]
    return [item.name for item in own if item.default is item.empty and item.kind not in _COLLECTED]


def describe_tool(method: Callable[..., Any], name: str) -> dict[str, Any]:
    """Returns the JSON schema of a tool as chat templates take it."""
    if (schema := getattr(method, JSON_SCHEMA, None)) is not None:
        return schema
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(method)
    except Exception as error:
        raise TrimtabError(
            f"{name}: {first_line(error)} (write type hints, and a docstring with a line for each parameter under Args)"
        ) from None


def call_tool(environment: Any, call: Call) -> Any:
    """Calls a tool. Returns its value, or an awaitable.

    Raises:
        ToolError: there is no such tool, or the arguments do not fit.
        Exception: what the tool raised.
    """
    # Of the class: what an object holds is not shown to the model, and may be the solution.
    names = tool_names(type(environment))
    if call.tool is None and len(names) == 1:
        name = names[0]
    elif call.tool in names:
        name = call.tool
    else:
        raise ToolError(f"there is no tool {call.tool!r}; there are: {', '.join(names)}")
    method = getattr(environment, name)
    signature = inspect.signature(method)
    try:
        arguments = call.arguments
        if isinstance(arguments, str):  # is the first one, a blank text none
            first = next(iter(signature.parameters), None)
            arguments = {first: arguments} if first is not None and arguments.strip() else {}
        bound = signature.bind(**arguments)
    except TypeError as error:
        raise ToolError(f"{name}: {error}") from None
    _convert(name, method, bound, as_json=isinstance(call.arguments, str))
    return method(*bound.args, **bound.kwargs)


def _convert(name: str, method: Callable[..., Any], bound: inspect.BoundArguments, *, as_json: bool) -> None:
    """Converts the arguments to the annotated types, such as "3" to a number; raises `ToolError` where it cannot.

    With `as_json` a text that does not fit may be the JSON of a value that does.
    """
    hints = get_type_hints(method)
    for parameter, value in bound.arguments.items():
        if parameter not in hints or bound.signature.parameters[parameter].kind in _COLLECTED:
            continue
        try:
            adapter = TypeAdapter(hints[parameter], config=_ANY_CLASS)
        except PydanticUserError:  # a class that pydantic cannot configure: taken as it is
            continue
        try:
            bound.arguments[parameter] = adapter.validate_python(value)
        except ValidationError as error:
            if as_json:
                with contextlib.suppress(ValidationError):
                    bound.arguments[parameter] = adapter.validate_json(value)
                    continue
                with contextlib.suppress(ValidationError):
                    bound.arguments[parameter] = adapter.validate_python(value.strip())
                    continue
            raise ToolError(f"{name}: {_reason(parameter, error)}") from None


def _reason(parameter: str, error: ValidationError) -> str:
    """Returns where the value of a parameter does not fit, and what fits there."""
    first = error.errors(include_url=False)[0]
    value = json.dumps(first["input"], default=lambda other: type(other).__name__)
    return f"{'.'.join(map(str, [parameter, *first['loc']]))} = {value[:80]}: {first['msg']}"


def _plain(value: Any) -> Any:
    """Returns a value of JSON: arrays and sets become lists, other objects their text."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):  # whose order differs from process to process
        return sorted(value, key=lambda item: json.dumps(item, default=_plain))
    return value.tolist() if hasattr(value, "tolist") else _own_text(value)


def _own_text(value: Any) -> str:
    """Returns the text of an object; raises `EnvironmentFailed` where it is an address, different in every run."""
    text = str(value)
    if _ADDRESS.search(text):
        kind = type(value).__name__
        raise EnvironmentFailed(f"returned a {kind} whose text is an address in memory: return a text or a list")
    return text


def text_of(value: Any) -> str:
    """Returns the result of a tool as text: a string as it is, None as nothing, containers as JSON, others by `str`.

    Raises `EnvironmentFailed` for an object whose text has an address in memory.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Mapping | list | tuple | set | frozenset | bool):
        return json.dumps(value, default=_plain, ensure_ascii=False)
    return _own_text(value)
