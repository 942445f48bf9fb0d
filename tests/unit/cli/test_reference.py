"""The page of recipe keys is the schema: complete, true, described."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.support.commands import Printed

from trimtab.cli import recipe_keys
from trimtab.objectives import keywords_of, objectives
from trimtab.trainer import rewards, tasks
from trimtab.trainer.config import Config, load_config

DOCS = Path(__file__).parents[3] / "docs"
PAGE: str = runpy.run_path(str(DOCS / "recipes.py"))["markdown"]()
# Sections that are absent by default, each with what it takes to be there.
OPTIONAL = {"perturbation": "token-alp", "prefix": "soup", "demonstrations": "luffy"}


def rows(section: str) -> dict[str, list[str]]:
    """The rows of a section's table: key -> its other cells."""
    title = "Top level" if not section else f"`[[{section}]]`" if section == "reward" else f"`[{section}]`"
    block = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    cells = [re.split(r"(?<!\\\\)\|", line)[1:-1] for line in block.splitlines() if line.startswith("| `")]
    return {key.strip(" `"): [cell.strip() for cell in rest] for key, *rest in cells}


def flat(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str, Any]]:
    """Section, key and value of everything in a resolved recipe but the keywords of named parts."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{section}.{key}" if section else key)
        else:
            yield section, key, value


def test_the_command_prints_every_key_with_type_default_and_description(printed: Printed) -> None:
    blocks = {block.splitlines()[0]: block.splitlines()[1:] for block in printed("recipes", "--keys").split("\n\n")}
    lines = {" ".join(line.split()) for block in blocks.values() for line in block}
    for start in ("max_lag = none integer ≥ 0 largest allowed age", 'type = "embedded" "embedded", "vllm", "server"'):
        assert any(line.startswith(start) for line in lines), start
    assert "  weight_max = 2.0" in blocks['[objective] name = "token-tis"']
    for section in recipe_keys.sections():
        assert [line.split()[0] for line in blocks[section.title]] == list(section.keys)
    parts = [f'[task] name = "{name}"' for name in tasks.KINDS.names()]
    parts += [f'[[reward]] name = "{name}"' for name in rewards.KINDS.names()]
    assert set(parts) < set(blocks)


@pytest.mark.parametrize(("section", "names"), [("perturbation", "`token-alp`, `seq-alp`"), ("prefix", "`soup`")])
def test_an_optional_section_says_what_it_needs_and_names_no_objective_as_the_only_one(
    section: str, names: str
) -> None:
    about = PAGE.partition(f"## `[{section}]`\n\n")[2].partition("\n\n")[0]
    assert f"Present by default with {names}." in about
    assert "an objective whose ratio is π/μ" in about


def test_every_key_is_there_with_the_default_that_a_recipe_really_has() -> None:
    data: dict[str, Any] = {"objective": {"name": "token-tis"}}
    result = 0
    for section, key, value in flat(Config.model_validate(data).model_dump(mode="json")):
        if (section, key) in (("", "reward"), ("eval", "task")) or (
            value is None and key in {*OPTIONAL, "compare", "environment", "ess"}
        ):
            continue  # sections of their own
        default = rows(section)[key][1]
        assert default == ("none" if value is None else f"`{json.dumps(value)}`"), f"{section}.{key}"
        result += 1
    assert result > 100
    for section, objective in OPTIONAL.items():
        resolved = load_config("quickstart", [f"objective.name={objective}"]).model_dump()[section]
        assert set(rows(section)) == set(resolved)
    assert set(rows("compare")) == {"objectives", "seeds", "workers"}
    assert set(rows("reward")) == {"name", "weight", "timeout"}


def test_types_and_bounds_in_words() -> None:
    assert rows("optim")["betas"][:2] == ["2 x number ≥ 0 < 1", "`[0.9, 0.95]`"]
    assert rows("trainer")["max_lag"][:2] == ["integer ≥ 0", "none"]
    assert rows("trainer")["steps"][:2] == ["integer > 0", "`30`"]
    assert rows("engine")["type"][0] == "`embedded`, `vllm`, `server`"
    assert rows("model.lora")["targets"][0] == "text or list of text"
    assert rows("compare")["seeds"][:2] == ["list of integer", "required"]
    assert rows("sharding")["offload"][:2] == ["true or false", "`false`"]


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        inner = recipe_keys.section_of(field.annotation)
        if inner is not None:
            yield from models(inner)


def test_every_section_and_every_key_is_described_in_one_line() -> None:
    for model in models(Config):
        assert model.__doc__, f"{model.__name__} has no docstring"
        for key, field in model.model_fields.items():
            if recipe_keys.section_of(field.annotation) is None:
                assert field.description, f"{model.__name__}.{key}: add Field(description=...)"
                assert "\n" not in field.description
    parts = {f"task {name}": tasks.KINDS.options(name) for name in tasks.KINDS.names()}
    parts |= {f"reward {name}": rewards.KINDS.options(name) for name in rewards.KINDS.names()}
    for name, fields in parts.items():
        for key, field in fields.items():
            assert field.description, f"{name}: {key} has no description"
            assert f"| `{key}` |" in PAGE


def test_every_keyword_of_every_objective_is_listed() -> None:
    lines = {
        name: next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")) for name in objectives()
    }
    shared = {"denominator", "kl", "kl_coef", "entropy_coef", "aggregation", "length_max"}
    for name, line in lines.items():
        for key in set(keywords_of(name)) - shared:
            assert f"`{key} = " in line, f"{name}: {key}"
    assert all(f"`{key}`" in PAGE for key in shared)
    assert "`weight_max = 2.0`" in lines["token-tis"]


def test_no_cell_breaks_its_table() -> None:
    for line in PAGE.splitlines():
        if line.startswith("| "):
            outside = re.sub(r"`[^`]*`", "", line)
            assert "<" not in outside.replace("< ", ""), line  # a tag, but for bounds such as `< 1`


def test_the_schema_as_json(printed: Printed) -> None:
    schema = json.loads(printed("recipes", "--keys", "--json"))
    assert schema["properties"]["seed"]["minimum"] == 0
    assert "description" in schema["$defs"]["TrainerConfig"]["properties"]["steps"]
