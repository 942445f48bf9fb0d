"""The environment "openenv" without a server: tools of a schema, texts of observations, what is refused."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments import build
from trimtab.trainer.environments.environment import call_tool, describe_tool
from trimtab.trainer.environments.formats import Call, Tag, ToolError
from trimtab.trainer.environments.openenv import OpenEnv, make_tool, read_observation

SCHEMA = {
    "properties": {
        "where": {"type": "string", "description": "the\n place"},
        "metadata": {"type": "object"},
        "often": {"type": "integer", "default": 2},
        "level": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["where"],
}


def test_a_schema_becomes_a_method() -> None:
    method = make_tool("go", "Goes\n  there.", SCHEMA, lambda arguments: arguments)
    signature = inspect.signature(method)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    assert defaults == {"self": inspect.Parameter.empty, "where": inspect.Parameter.empty, "often": 2, "level": None}
    schema = describe_tool(method, "go")["function"]
    assert (schema["name"], schema["description"]) == ("go", "Goes there.")
    assert list(schema["parameters"]["properties"]) == ["where", "often", "level"]
    assert schema["parameters"]["properties"]["where"] == {"type": "string", "description": "the place"}
    assert schema["parameters"]["properties"]["level"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert schema["parameters"]["properties"]["level"]["description"] == "level"
    assert schema["parameters"]["required"] == ["where"]
    assert "where (string): the place" in Tag(("go",)).describe([{"function": schema}])


class Server(OpenEnv):
    """Returns the action instead of sending it."""

    def __init__(self) -> None: ...

    async def _step(self, action: Any) -> Any:
        return action

    go = make_tool("go", "Goes.", SCHEMA, lambda arguments: {"sent": arguments})


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ({"where": "up"}, {"where": "up"}),
        ({"where": 3, "level": "x"}, {"where": 3, "level": "x"}),
        ("up", {"where": "up"}),
    ],
)
def test_arguments_reach_the_server_as_they_are(arguments: Any, sent: dict[str, Any]) -> None:
    answer = asyncio.run(call_tool(Server(), Call("go", arguments)))
    assert answer == {"sent": sent}
    with pytest.raises(ToolError, match="missing a required argument: 'where'"):
        call_tool(Server(), Call("go", {}))


@pytest.mark.parametrize(
    ("field", "observation", "text"),
    [
        (None, {"text": "hello", "metadata": {"a": 1}}, "hello"),
        (None, {"number": 5}, "5"),
        (None, {"text": "é", "legal": [1, 2]}, '{"text": "é", "legal": [1, 2]}'),
        ("legal", {"text": "hello", "legal": [1, 2]}, "[1, 2]"),
        (None, {}, ""),
        (None, {"tool_name": "a", "result": {"content": [{"text": "one"}, {"text": "two"}]}}, "one\ntwo"),
        (None, {"tool_name": "a", "result": {"data": {"x": 1}}, "error": None}, '{"x": 1}'),
    ],
)
def test_the_text_of_an_observation(field: str | None, observation: dict[str, Any], text: str) -> None:
    assert read_observation(observation, field) == text


def test_a_failed_tool_and_a_missing_field_are_errors() -> None:
    with pytest.raises(ValueError, match="too much"):
        read_observation({"tool_name": "a", "error": {"message": "too much"}}, None)
    with pytest.raises(Exception, match="no field 'score', only text"):
        read_observation({"text": "hello"}, "score")


def test_what_is_refused() -> None:
    with pytest.raises(TrimtabError, match="is not an OpenEnv server"):
        build(EnvironmentConfig(name="openenv", url="http://127.0.0.1:1"))
    with pytest.raises(TrimtabError, match="environment 'openenv': option 'url' is missing"):
        build(EnvironmentConfig(name="openenv"))
    with pytest.raises(TrimtabError, match=r"environment 'openenv'.*'adress'"):
        build(EnvironmentConfig(name="openenv", url="http://127.0.0.1:1", adress=3))
