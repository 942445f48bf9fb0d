"""The environment "openenv" without a server: tools of a schema, texts of observations, what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.environments import EnvironmentSpec, build
from trimtab.trainer.environments.environment import call_tool, describe_tool
from trimtab.trainer.environments.formats import Call, ToolError
from trimtab.trainer.environments.openenv import method_of, observation_text

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
    method = method_of("go", "Goes\n  there.", SCHEMA, lambda arguments: arguments)
    signature = inspect.signature(method)
    assert signature.parameters["level"].annotation == (str | None)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    assert defaults == {"self": inspect.Parameter.empty, "where": inspect.Parameter.empty, "often": 2, "level": None}
    schema = describe_tool(method, "go")["function"]
    assert (schema["name"], schema["description"]) == ("go", "Goes there.")
    assert schema["parameters"]["properties"]["where"]["description"] == "the place"
    assert schema["parameters"]["required"] == ["where"]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, 3, "x"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "x"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3, [3]),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, [3], 3),
        ({"type": ["number", "null"]}, 2.5, "x"),
        ({"enum": ["up", "down"], "type": "string"}, "up", "left"),
        ({"type": "object"}, {"a": 1}, "a"),
    ],
)
def test_arguments_have_the_types_of_the_schema(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    method = method_of("go", "Goes.", {"properties": {"to": schema}, "required": ["to"]}, lambda arguments: arguments)
    describe_tool(method, "go")
    environment = type("Server", (), {"go": method})()
    call_tool(environment, Call("go", {"to": right})).close()
    with pytest.raises(ToolError, match=r"^go: to.* = "):
        call_tool(environment, Call("go", {"to": wrong}))


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/$defs/Color"}, {}, {"enum": [{"a": 1}]}, {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}],
)
def test_what_a_schema_leaves_open_is_checked_by_the_server(schema: dict[str, Any]) -> None:
    method = method_of("go", "Goes.", {"properties": {"to": schema}, "required": ["to"]}, lambda arguments: arguments)
    describe_tool(method, "go")
    environment = type("Server", (), {"go": method})()
    for value in (3, "red", None, {"a": [1]}):
        call_tool(environment, Call("go", {"to": value})).close()


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
    assert observation_text(observation, field) == text


def test_a_failed_tool_and_a_missing_field_are_errors() -> None:
    with pytest.raises(ValueError, match="too much"):
        observation_text({"tool_name": "a", "error": {"message": "too much"}}, None)
    with pytest.raises(Exception, match="no field 'score', only text"):
        observation_text({"text": "hello"}, "score")


def test_what_is_refused() -> None:
    with pytest.raises(TrimtabError, match="is not an OpenEnv server"):
        build(EnvironmentSpec("openenv", {"url": "http://127.0.0.1:1"}))
    with pytest.raises(TrimtabError, match="environment 'openenv': option 'url' is missing"):
        build(EnvironmentSpec("openenv", {}))
    with pytest.raises(TrimtabError, match=r"environment 'openenv'.*'adress'"):
        build(EnvironmentSpec("openenv", {"url": "http://127.0.0.1:1", "adress": 3}))
