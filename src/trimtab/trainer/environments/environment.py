"""The protocol of environments, and functions that describe and call their tools.

An environment is an object of any class with a method `reset(**row)` and public methods, which are the tools. This is
also TRL's `environment_factory` protocol, so one class works with both:

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
import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import numpy as np
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from trimtab.errors import TrimtabError, first_line
from trimtab.trainer.environments.background import EnvironmentFailed
from trimtab.trainer.environments.formats import Call, ToolError
from trimtab.types import Problem

NOT_TOOLS = {"reset", "get_reward", "close"}
JSON_SCHEMA = "json_schema"
"""An attribute of a tool that holds its JSON schema. Without it, the schema is made from type hints and docstring."""

_COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def check_class(factory: Callable[[], Any], name: str) -> None:
    """Raises `TrimtabError` unless the class has a method `reset` that accepts a row, and tools with descriptions."""
    reset = getattr(factory, "reset", None)
    if not callable(reset):
        raise TrimtabError(f"environment {name!r} has no method reset(self, **row): add one; it may return None")
    try:
        # Rows have more columns, which depend on the task. `reset` may require parameters that are missing here.
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


def make_row(reset: Callable[..., Any], problem: Problem, seed: int) -> dict[str, Any]:
    """Returns the keyword arguments of `reset`: the columns of a problem, plus `prompt` and `seed` if it accepts them.

    `prompt` is the question, as in TRL's rows. `seed` is for random draws of the environment. Columns of the problem
    with these names take precedence.
    """
    parameters = inspect.signature(reset).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    more = {"prompt": problem.question, "seed": seed}
    accepted = {name: value for name, value in more.items() if takes_all or name in parameters}
    # A copy: if an environment changes its row, the next episode must not see the changes.
    extra = copy.deepcopy(dict(problem.extra))
    return {**accepted, **extra, "id": problem.id, "question": problem.question, "answer": problem.answer}


def tool_names(kind: Any) -> list[str]:
    """Returns the names of the tools of a class: its public methods except `reset`, `get_reward` and `close`.

    As in TRL, only functions count: class methods, nested classes and other callables are not tools.
    """
    members = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in NOT_TOOLS]


def required_parameters(kind: Any, tool: str) -> list[str]:
    """Returns the names of the parameters of a tool that have no default, without `self`."""
    parameters = list(inspect.signature(getattr(kind, tool)).parameters.values())
    own = parameters if isinstance(inspect.getattr_static(kind, tool), staticmethod) else parameters[1:]
    return [item.name for item in own if item.default is item.empty and item.kind not in _COLLECTED]


def describe_tool(method: Callable[..., Any], name: str) -> dict[str, Any]:
    """Returns the JSON schema of a tool in the form that chat templates expect."""
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
    """Calls a tool and returns its value, or an awaitable.

    Raises:
        ToolError: there is no such tool, or the arguments do not match its parameters.
        Exception: the tool raised it.
    """
    # Methods of the class only: callables stored in the object are not shown to the model and may be the solution.
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
        if isinstance(arguments, str):  # the text is the first argument; a blank text means no argument
            first = next(iter(signature.parameters), None)
            arguments = {first: arguments} if first is not None and arguments.strip() else {}
        bound = signature.bind(**arguments)
    except TypeError as error:
        raise ToolError(f"{name}: {error}") from None
    _convert(name, method, bound, as_json=isinstance(call.arguments, str))
    return method(*bound.args, **bound.kwargs)


def _convert(name: str, method: Callable[..., Any], bound: inspect.BoundArguments, *, as_json: bool) -> None:
    """Converts the arguments to the annotated types, such as "3" to a number; raises `ToolError` if that fails.

    With `as_json`, a text that is not a valid value is also parsed as the JSON of a value.
    """
    hints = get_type_hints(method)
    for parameter, value in bound.arguments.items():
        if parameter not in hints or bound.signature.parameters[parameter].kind in _COLLECTED:
            continue
        try:
            adapter = TypeAdapter(hints[parameter], config=_ANY_CLASS)
        except PydanticUserError:  # pydantic cannot handle this class: the value is passed unchanged
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
            raise ToolError(f"{name}: {_describe_error(parameter, error)}") from None


def _describe_error(parameter: str, error: ValidationError) -> str:
    """Returns which part of an argument is invalid, and why."""
    first = error.errors(include_url=False)[0]
    value = json.dumps(first["input"], default=lambda other: type(other).__name__)
    return f"{'.'.join(map(str, [parameter, *first['loc']]))} = {value[:80]}: {first['msg']}"


def _plain(value: Any) -> Any:
    """Returns a value that JSON can represent: arrays and sets become lists, other objects become text."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):  # sorted, because the order of a set differs between processes
        return sorted(value, key=lambda item: json.dumps(item, default=_plain))
    return value.tolist() if hasattr(value, "tolist") else _own_text(value)


def _own_text(value: Any) -> str:
    """Returns `str(value)`; raises `EnvironmentFailed` if it contains a memory address, which differs in every run."""
    text = str(value)
    if _ADDRESS.search(text):
        kind = type(value).__name__
        raise EnvironmentFailed(f"returned a {kind} whose text is an address in memory: return a text or a list")
    return text


def text_of(value: Any) -> str:
    """Returns a result as text: strings unchanged, None as "", containers and NumPy arrays as JSON, others by `str`.

    Raises `EnvironmentFailed` if the text of an object contains a memory address.
    """
    if value is None or isinstance(value, str):
        return value or ""
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    if is_array or isinstance(value, Mapping | list | tuple | set | frozenset | bool):
        return json.dumps(value, default=_plain, ensure_ascii=False)
    return _own_text(value)
