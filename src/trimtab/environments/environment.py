"""Environments: the protocol, their tools, and calls that are bounded in time.

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

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from trimtab.environments.formats import Call, ToolError
from trimtab.errors import TrimtabError

NOT_TOOLS = {"reset", "get_reward", "close"}

_COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


class EnvironmentFailed(Exception):
    """An environment raised where it must not, or did not return in time; its episode is dropped."""


def check_class(factory: Callable[[], Any], name: str) -> None:
    """Raises `TrimtabError` for a class that is no environment: no `reset`, no tool, or a tool without description."""
    if not callable(getattr(factory, "reset", None)):
        raise TrimtabError(f"environment {name!r} has no method reset(self, **row): add one; it may return None")
    methods = tool_names(factory)
    if not methods:
        raise TrimtabError(f"environment {name!r} has no tool: add a public method with type hints and a docstring")
    for method in methods:
        describe_tool(getattr(factory, method), f"environment {name!r}, tool {method!r}")


def tool_names(environment: Any) -> list[str]:
    """Returns the names of the tools: the public methods besides `reset`, `get_reward` and `close`."""
    members = inspect.getmembers(environment, callable)
    return [name for name, _ in members if not name.startswith("_") and name not in NOT_TOOLS]


def describe_tool(method: Callable[..., Any], name: str) -> dict[str, Any]:
    """Returns the JSON schema of a tool as chat templates take it.

    Raises:
        TrimtabError: a parameter has no type hint, or the docstring does not describe it.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(method)
    except Exception as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TrimtabError(
            f"{name}: {text} (write type hints, and a docstring with a line for each parameter under Args)"
        ) from None


class BackgroundCall:
    """A function that runs in a thread of its own and is given up after `timeout` seconds.

    A thread cannot be stopped: one that hangs stays behind until the process ends, and costs its stack.
    """

    def __init__(self, function: Callable[[], Any], timeout: float) -> None:
        self._function = function
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def _run(self) -> None:
        try:
            value = self._function()
            if inspect.iscoroutine(value):
                value = asyncio.run_coroutine_threadsafe(value, _event_loop()).result()
            self._value = value
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: float) -> bool:
        """Returns whether the call has ended or was given up, after at most `timeout` seconds."""
        remaining = self._deadline - time.monotonic()
        return self._done.wait(max(0.0, min(timeout, remaining))) or time.monotonic() >= self._deadline

    def value(self) -> Any:
        """Returns what the function returned, once `wait` is True.

        Raises:
            EnvironmentFailed: it did not return in time.
            Exception: what the function raised.
        """
        if not self._done.is_set():
            raise EnvironmentFailed(f"did not return within {self._timeout:g} s (environment.timeout)")
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:  # sys.exit() of a tool must not end the trainer
            raise EnvironmentFailed(f"raised {type(self._error).__name__}: {self._error}")
        return self._value


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the one event loop of all coroutines: what an environment opened in one call must work in the next."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="environment-loop", daemon=True).start()
        return _loop


def call_tool(environment: Any, call: Call) -> Any:
    """Calls a tool. Returns its value, or a coroutine.

    Raises:
        ToolError: there is no such tool, or the arguments do not fit.
        Exception: what the tool raised.
    """
    names = tool_names(environment)
    if call.tool is None and len(names) == 1:
        name = names[0]
    elif call.tool in names:
        name = call.tool
    else:
        raise ToolError(f"there is no tool {call.tool!r}; there are: {', '.join(names)}")
    method = getattr(environment, name)
    signature = inspect.signature(method)
    try:
        if isinstance(call.arguments, str):
            bound = signature.bind(*_single_argument(signature, call.arguments))
        else:
            bound = signature.bind(**call.arguments)
    except TypeError as error:
        raise ToolError(f"{name}: {error}") from None
    _convert(name, method, bound)
    return method(*bound.args, **bound.kwargs)


def _convert(name: str, method: Callable[..., Any], bound: inspect.BoundArguments) -> None:
    """Converts the arguments to the annotated types, such as "3" to a number; raises `ToolError` where it cannot."""
    hints = get_type_hints(method)
    for parameter, value in bound.arguments.items():
        if parameter not in hints or bound.signature.parameters[parameter].kind in _COLLECTED:
            continue
        try:
            bound.arguments[parameter] = TypeAdapter(hints[parameter], config=_ANY_CLASS).validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise ToolError(f"{name}: {parameter} = {json.dumps(value, default=str)[:80]}: {reason}") from None
        except PydanticUserError:  # a class of its own that pydantic cannot configure: taken as it is
            continue


def _single_argument(signature: inspect.Signature, text: str) -> list[Any]:
    """Returns the arguments for a text: none for an empty one, a number or truth value where the parameter is one."""
    if not text.strip() or not signature.parameters:
        return []
    kind = next(iter(signature.parameters.values())).annotation
    if kind in (int, float, bool, "int", "float", "bool"):
        try:
            return [json.loads(text.strip())]
        except json.JSONDecodeError:
            raise ToolError(f"{text.strip()!r} is not a value of type {getattr(kind, '__name__', kind)}") from None
    return [text]


def text_of(value: Any) -> str:
    """Returns the result of a tool as text: a string as it is, None as nothing, other values as JSON where possible."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Mapping | list | tuple | bool):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            pass
    return str(value)
