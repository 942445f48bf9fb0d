"""The environment "openenv": an OpenEnv server, whose actions are the tools.

This module exchanges JSON messages over OpenEnv's WebSocket (`/ws`), as in openenv 0.10. It does not use the client of
the openenv package, which installs a hundred packages and pins some of them to versions older than Trimtab needs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trimtab.errors import TrimtabError
from trimtab.plugins import require_extra
from trimtab.trainer import environments
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.background import in_background
from trimtab.trainer.environments.environment import JSON_SCHEMA, NOT_TOOLS, check_class

CONNECT_SECONDS = 10.0
MAX_MESSAGE = 64 * 2**20  # bytes


class Options(BaseModel):
    """The keywords of the environment "openenv"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="address of the server, http://HOST:PORT")
    tool: str = Field("step", pattern=r"^[a-zA-Z]\w*$", description="name of the one tool, unless the server has tools")
    observation: str | None = Field(
        None, description="field of an observation that is its text; default: its only field, else all as JSON"
    )
    reward: bool = Field(True, description="the reward is the sum over the steps; false: the recipe's rewards")

    def build(self, section: EnvironmentConfig) -> environments.BuiltEnvironment:
        """Asks the server for its tools and returns the environment."""
        kind = openenv_class(self)
        check_class(kind, "openenv")
        return environments.BuiltEnvironment(section, "openenv", kind, functools.partial(kind, self))


class ServerError(Exception):
    """The server refused a message, or the connection was lost."""


class Session:
    """A session of an OpenEnv server: one environment, until the session is closed."""

    def __init__(self, url: str) -> None:
        self._url = url.replace("http", "ws", 1).rstrip("/") + "/ws"
        self._socket: Any = None

    async def send(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the data of the answer. The first call opens the connection.

        Raises `ServerError` if the server answers with an error, and `OSError` if it cannot be reached.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            self._socket = await connect(self._url, open_timeout=CONNECT_SECONDS, max_size=MAX_MESSAGE, proxy=None)
        with contextlib.suppress(ConnectionClosed):  # the last received message says why it was closed
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            raise ServerError(f"the server closed the connection ({error})") from None
        if answer.get("type") == "error":
            data = answer.get("data", {})
            text = f"{data.get('message', 'unknown error')} ({data.get('code', 'no code')})"
            if data.get("code") == "CAPACITY_REACHED":
                text += ": raise max_concurrent_envs of the server (docs/reference-environments.md, openenv)"
            raise ServerError(text)
        return answer["data"]

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
            self._socket = None


class OpenEnv:
    """An episode on an OpenEnv server; `openenv_class` adds the tools."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._session = Session(options.url)
        self._rewards: list[float | None] = []
        self._done = False

    async def reset(self, **row: Any) -> str:
        """Starts an episode. The server gets the row and a seed, which is the same for all responses to a prompt."""
        self._rewards, self._done = [], False
        answer = await self._session.send("reset", row)
        self._done = bool(answer.get("done"))
        text = read_observation(answer.get("observation", {}), self._options.observation)
        return text and "\n" + text

    async def close(self) -> None:
        """Ends the session of the server."""
        await self._session.close()

    def _get_reward(self) -> float:
        """Returns the sum of the rewards of all steps; 0 if there was no step."""
        known = [reward for reward in self._rewards if reward is not None]
        if self._rewards and not known:
            raise ServerError(
                "no step had a reward: set environment.reward = false, and the rewards of the recipe count"
            )
        return float(sum(known))

    async def _step(self, action: Mapping[str, Any]) -> str:
        if self._done:
            raise ValueError("the episode is over")
        answer = await self._session.send("step", action)
        self._done = bool(answer.get("done"))
        self._rewards.append(answer.get("reward"))
        return read_observation(answer.get("observation", {}), self._options.observation)


def read_observation(observation: Mapping[str, Any], field: str | None) -> str:
    """Returns the text of an observation that the model reads; `field` is `Options.observation`.

    Raises `ServerError` if the observation does not have the field, and `ValueError` if a tool of the server failed.
    """
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    if "tool_name" in fields:
        return _read_tool_result(fields)
    if field is not None:
        if field not in fields:
            raise ServerError(f"an observation has no field {field!r}, only {', '.join(fields)}")
        fields = {field: fields[field]}
    if not fields:
        return ""
    value = next(iter(fields.values())) if len(fields) == 1 else fields
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_tool_result(observation: Mapping[str, Any]) -> str:
    """Returns the text of the result of an MCP tool. Raises `ValueError` if the call failed."""
    if observation.get("error"):
        error = observation["error"]
        raise ValueError(error.get("message", error) if isinstance(error, dict) else error)
    result = observation.get("result")
    if isinstance(result, Mapping):
        parts = [part["text"] for part in result.get("content", ()) if isinstance(part, Mapping) and "text" in part]
        if parts:
            return "\n".join(parts)
        result = result.get("data", result)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def openenv_class(options: Options) -> type:
    """Returns the environment class for a server, with a method for each tool.

    The tools are the MCP tools of the server. A server without MCP tools has a single tool, whose parameters are the
    fields of the server's action.
    """
    require_extra("openenv", "environment 'openenv'")
    call = in_background(lambda: _request_tools(options), CONNECT_SECONDS)
    call.wait(CONNECT_SECONDS)
    try:
        tools = call.value()
    except Exception as error:
        raise TrimtabError(
            f"environment.url = {options.url!r} is not an OpenEnv server ({type(error).__name__}: {error}): "
            "start it, or correct the address"
        ) from None
    methods = {"get_reward": OpenEnv._get_reward} if options.reward else {}
    return type("OpenEnvServer", (OpenEnv,), methods | {tool.__name__: tool for tool in tools})


async def _request_tools(options: Options) -> list[Callable[..., Any]]:
    import httpx2

    async with httpx2.AsyncClient(timeout=CONNECT_SECONDS, trust_env=False) as client:
        answer = await client.get(options.url.rstrip("/") + "/schema")
    answer.raise_for_status()
    action = answer.json()["action"]
    if "tool_name" not in action.get("properties", {}):
        return [make_tool(options.tool, "Makes a step in the environment.", action, lambda arguments: arguments)]
    session = Session(options.url)
    try:
        request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
        tools = (await session.send("mcp", request))["result"]["tools"]
    finally:
        await session.close()
    for name in (tool["name"] for tool in tools):
        if not name.isidentifier() or name.startswith("_") or name in NOT_TOOLS:
            raise ValueError(f"the tool {name!r} has no usable name")
    return [
        make_tool(
            tool["name"],
            tool.get("description") or tool["name"],
            tool.get("inputSchema") or tool.get("input_schema") or {},
            lambda arguments, name=tool["name"]: {"type": "call_tool", "tool_name": name, "arguments": arguments},
        )
        for tool in tools
    ]


def make_tool(
    name: str, description: str, schema: Mapping[str, Any], action: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Callable[..., Any]:
    """Returns a tool with the parameters of a JSON schema. The server checks the values of the arguments."""
    properties = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
    required = [key for key in properties if key in schema.get("required", ())]
    names = [*required, *(key for key in properties if key not in required)]  # parameters with a default come last

    async def tool(self: OpenEnv, *values: Any, **named: Any) -> str:
        return await self._step(action(dict(zip(names, values, strict=False)) | named))  # pyright: ignore[reportPrivateUsage]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = {key: inspect.Parameter.empty if key in required else properties[key].get("default") for key in names}
    parameters = [inspect.Parameter(key, kind, default=default) for key, default in defaults.items()]
    tool.__name__ = tool.__qualname__ = name
    tool.__signature__ = inspect.Signature([inspect.Parameter("self", kind), *parameters])  # pyright: ignore[reportFunctionMemberAccess]
    described = {}
    for key, value in properties.items():
        text = " ".join(str(value.get("description") or key).split())
        described[key] = {word: part for word, part in value.items() if word != "title"} | {"description": text}
    arguments = {**schema, "type": "object", "properties": described, "required": required}
    function = {"name": name, "description": " ".join(description.split()), "parameters": arguments}
    setattr(tool, JSON_SCHEMA, {"type": "function", "function": function})
    return tool
