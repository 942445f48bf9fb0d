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
import concurrent.futures
import contextlib
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
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
    """Raises `TrimtabError` for a class that is no environment.

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


def tool_names(kind: Any) -> list[str]:
    """Returns the names of the tools of a class: its public methods besides `reset`, `get_reward` and `close`.

    Classes and other callables of its body are no methods, and neither are class methods: TRL takes the same ones.
    """
    members = inspect.getmembers(kind, inspect.isfunction)
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

    `convert` makes the value of what the function returned, in the same thread and the same time.

    A thread cannot be stopped: one that hangs stays behind until the process ends, and costs its stack. A coroutine
    that waits is canceled.
    """

    def __init__(
        self, function: Callable[[], Any], timeout: float, convert: Callable[[Any], Any] | None = None
    ) -> None:
        self._function, self._convert = function, convert
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def _run(self) -> None:
        try:
            value = self._function()
            if inspect.isawaitable(value):
                value = self._awaited(value)
            self._value = value if self._convert is None else self._convert(value)
        except BaseException as error:
            self._error = error
        self._done.set()

    def _awaited(self, awaitable: Awaitable[Any]) -> Any:
        # Half of the time: after that of a loop that does not answer, some remains for the call in a new one.
        loop = _event_loop(self._timeout / 2)
        future = asyncio.run_coroutine_threadsafe(_result_of(awaitable), loop)
        concurrent.futures.wait([future], max(0.0, self._deadline - time.monotonic()))
        if not future.done():
            future.cancel()
            raise self._given_up()
        return future.result()

    def _given_up(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"did not return within {self._timeout:g} s (environment.timeout)")

    def wait(self, timeout: float) -> bool:
        """Returns whether the call has ended or was given up, after at most `timeout` seconds."""
        remaining = self._deadline - time.monotonic()
        return self._done.wait(max(0.0, min(timeout, remaining))) or time.monotonic() >= self._deadline

    def value(self) -> Any:
        """Returns what the function returned, once `wait` is True.

        Raises:
            EnvironmentFailed: it did not return in time.
            Exception: what the function or `convert` raised.
        """
        if not self._done.is_set():
            raise self._given_up()
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:  # sys.exit() of a tool must not end the trainer
            raise EnvironmentFailed(f"raised {describe(self._error)}")
        return self._value


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _event_loop(patience: float) -> asyncio.AbstractEventLoop:
    """Returns the one event loop of all coroutines: what an environment opened in one call must work in the next.

    A loop that does not answer within `patience` seconds is blocked by a coroutine, and a new one replaces it.
    """
    global _loop
    with _loop_lock:
        if _loop is None or not _answers(_loop, patience):
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(_loop,), name="environment-loop", daemon=True).start()
        return _loop


def _answers(loop: asyncio.AbstractEventLoop, patience: float) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(patience)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a coroutine, whose call has it as well
            loop.run_forever()


def describe(error: BaseException) -> str:
    """Returns the type and the text of an exception, whatever its text is."""
    try:
        text = str(error)
    except (Exception, SystemExit):
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
        if isinstance(call.arguments, str):
            single = call.arguments.strip() and signature.parameters
            bound = signature.bind(*([call.arguments] if single else []))
        else:
            bound = signature.bind(**call.arguments)
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
        except PydanticUserError:  # a class of its own that pydantic cannot configure: taken as it is
            continue
        try:
            bound.arguments[parameter] = adapter.validate_python(value)
        except ValidationError as error:
            if as_json:
                with contextlib.suppress(ValidationError):
                    bound.arguments[parameter] = adapter.validate_json(value)
                    continue
            raise ToolError(f"{name}: {_reason(parameter, error)}") from None


def _reason(parameter: str, error: ValidationError) -> str:
    """Returns where the value of a parameter does not fit, and what fits there."""
    first = error.errors(include_url=False)[0]
    value = json.dumps(first["input"], default=lambda other: type(other).__name__)
    return f"{'.'.join(map(str, [parameter, *first['loc']]))} = {value[:80]}: {first['msg']}"


def text_of(value: Any) -> str:
    """Returns the result of a tool as text: a string as it is, None as nothing, other values as JSON where possible.

    Raises:
        EnvironmentFailed: a generator, whose items are not known.
    """
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise EnvironmentFailed("returned a generator: return one text, or a list")
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
