"""`trimtab recipes`, `trimtab show`, `trimtab explain`: list recipes, print a resolved recipe, print an equation."""

from __future__ import annotations

import shlex
from inspect import getsource
from typing import Annotated, Any

import typer

from trimtab.cli.output import AllowCode, Json, Recipe, Sets, pairs, print_result
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.plugins import allow_code

Trainer = Annotated[
    str | None,
    typer.Option("--for", metavar="TRAINER", help="Print the settings of verl, trl, miles, ...", show_default=False),
]
Code = Annotated[bool, typer.Option("--code", help="Print the loss as one function in plain PyTorch, to paste.")]


def recipes(
    keys: Annotated[
        bool,
        typer.Option(
            "--keys", help="Print every key a recipe may have, with type and default; with --json, as a JSON schema."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the recipes of this installation, one line each."""
    from trimtab.cli import recipe_keys
    from trimtab.trainer.config import Config, load_config, recipe_names

    if keys:
        print_result(as_json, Config.model_json_schema(), recipe_keys.text().removesuffix("\n"))
        return
    described = {name: load_config(name).description for name in recipe_names()}
    print_result(as_json, described, pairs(described))


def show(recipe: Recipe, sets: Sets = None, as_json: Json = False) -> None:
    """Print a recipe with its base, all defaults and --set resolved, as TOML: what a run saves as config.toml.

    Absent keys that have no default are left out; `trimtab recipes --keys` lists all.
    """
    from trimtab.trainer.config import load_config

    config = load_config(recipe, sets or ())
    print_result(as_json, config.model_dump(mode="json"), config.dump().removesuffix("\n"))


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|RECIPE",
            help="An objective, your own as module:function, a recipe, a .toml file, or a run directory. Keywords may "
            "follow an objective as in `trimtab compare`: NAME:KEY=VALUE,KEY=VALUE. Without one: all objectives, and "
            "which one when.",
            show_default=False,
        ),
    ] = None,
    sets: Sets = None,
    trainer: Trainer = None,
    code: Code = False,
    trusted: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Print the equation that is minimized, with every number in place.

    For an objective, --set takes its keywords (`weight_max=1.5`); for a recipe, its keys (`objective.weight_max=1.5`).
    Where both have the name, keywords without a section change both. Settings that contradict each other are refused,
    as by `trimtab train`, which also checks what depends on the model and the task.
    """
    if trusted:
        allow_code()
    from trimtab.objectives import objectives
    from trimtab.objectives.lookup import split_name
    from trimtab.objectives.presets import COMPOSED, is_custom
    from trimtab.trainer.config import is_recipe, recipe_names, split_overrides

    if name is None:
        _list_objectives(sets, trainer, code, as_json)
        return
    known = [*objectives(), COMPOSED.objective.name]
    text, recipe, changes = name, is_recipe(name), sets or []
    if not recipe and ":" in name:
        name, rest = split_name(name)
        changes = [*split_overrides(rest, f"objective {text!r}"), *changes]
    is_objective = name in known or (is_custom(name) and not recipe)
    if not recipe and not is_objective:
        listing = "`trimtab explain` lists objectives, `trimtab recipes` recipes"
        hint = did_you_mean(name, [*known, *recipe_names()], listing)
        raise TrimtabError(f"unknown objective or recipe {name!r}{hint}")
    if trainer is not None or code:
        if not is_objective:
            option = "--code" if code else "--for"
            raise TrimtabError(f"{option} prints an objective, and {name} is a recipe: name the objective")
        command = ["trimtab", "explain", text, *(part for item in sets or [] for part in ("--set", item)), "--code"]
        _print_loss(trainer, shlex.join(command) if code else "", name, _keywords(changes), as_json)
        return
    entries = _entries(name, changes, is_objective=is_objective, is_recipe=recipe)
    text = "\n\n".join(map(_format_entry, entries.values()))
    print_result(as_json, entries if len(entries) > 1 else next(iter(entries.values())), text)


def _entries(name: str, changes: list[str], *, is_objective: bool, is_recipe: bool) -> dict[str, dict[str, Any]]:
    """Returns what to print of the objective and of the recipe `name`; changes without a section apply to both."""
    from trimtab.objectives.lookup import from_section

    entries: dict[str, dict[str, Any]] = {}
    if is_objective:
        keywords = [item for item in changes if "." not in item.partition("=")[0]] if is_recipe else changes
        built = from_section({"name": name, **_keywords(keywords)})
        entries["objective"] = {"objective": name, "equation": built.equation(), "advantage": built.advantage}
        entries["objective"] |= {"source": built.source} if built.source else {}
        changes = [f"objective.{item}" if item in keywords else item for item in changes]
    if is_recipe:
        entries["recipe"] = {"recipe": name, **_describe_recipe(name, changes)}
    return entries


def _print_loss(trainer: str | None, command: str, name: str, keywords: dict[str, Any], as_json: bool) -> None:
    """Prints the settings of a trainer, or the code of the loss, which begins with the command that prints it.

    The code of ALP also contains the function that adds the noise, after the loss.
    """
    from trimtab.adapters.config_lines import lines_for
    from trimtab.objectives.alp_noise import perturb
    from trimtab.objectives.lookup import from_section
    from trimtab.trainer.config import REQUIRED_SECTIONS

    if trainer is not None and command:
        raise TrimtabError("--for prints settings and --code a function: give one of them")
    if trainer is not None:
        text = lines_for(trainer, name, keywords)
        printed: dict[str, Any] = {"objective": name, "for": trainer, "lines": text.splitlines()}
    else:
        text = from_section({"name": name, **keywords}).code(command).rstrip()
        if REQUIRED_SECTIONS.get(name) == "perturbation":
            text += f"\n\n\n{getsource(perturb).rstrip()}"
        printed = {"objective": name, "code": text}
    print_result(as_json, printed, text)


def _list_objectives(sets: list[str] | None, trainer: str | None, code: bool, as_json: bool) -> None:
    from trimtab.diagnosis.advice.rules import list_choices
    from trimtab.objectives.presets import PRESETS

    if sets or code or trainer is not None:
        does = "--set changes" if sets else "--code prints" if code else "--for prints"
        raise TrimtabError(f"{does} one objective: name it")
    described = {name: preset.does for name, preset in PRESETS.items()}
    lines = ["\nWhich one when (the first line that fits; `trimtab diagnose` says which fits your run):"]
    for row in list_choices():
        taken = f"{row.preset}, bounds: {row.bounds}" if row.preset else "nothing: repair it first"
        other = f", grpo {row.uncorrected}" if row.uncorrected else ""
        lines += ["", row.when, f"  {taken}"]
        lines += [f"  accuracy with {row.regime}: {row.accuracy}{other}"] if row.regime else []
    print_result(as_json, described, "\n".join([pairs(described), *lines]))


def _describe_recipe(name: str, sets: list[str]) -> dict[str, Any]:
    """Returns the equation of a recipe, and the sections of the recipe that change its data or its model."""
    from trimtab.objectives.lookup import from_section
    from trimtab.trainer.config import REQUIRED_SECTIONS, load_config
    from trimtab.trainer.requirements import check_recipe

    config = load_config(name, sets)
    objective = from_section(config.objective.model_dump())
    check_recipe(config, objective, world_size=None)
    advantage = config.advantage.kind or objective.advantage
    sections = {name: getattr(config, name) for name in sorted({*REQUIRED_SECTIONS.values()})}
    sections["routing"] = None if config.routing.replay == "none" else config.routing
    return {
        "objective": config.objective.name,
        "equation": objective.equation(advantage),
        "advantage": advantage,
        **{name: section.model_dump() for name, section in sections.items() if section is not None},
    }


def _keywords(sets: list[str]) -> dict[str, Any]:
    from trimtab.trainer.config import parse_override

    parsed = dict(map(parse_override, sets))
    if key := next((key for key in parsed if "." in key), ""):
        raise TrimtabError(f"--set {key}: an objective's keywords have no section, write {key.split('.')[-1]}=...")
    return parsed


def _format_entry(entry: dict[str, Any]) -> str:
    title = f"recipe {entry['recipe']}: objective {entry['objective']}" if "recipe" in entry else entry["objective"]
    sections = [
        f"  [{name}] {', '.join(f'{key} = {value}' for key, value in section.items())}"
        for name, section in entry.items()
        if isinstance(section, dict)
    ]
    sections += [f"  source: {entry['source']}"] if "source" in entry else []
    return "\n".join([f"{title}  (advantage: {entry['advantage']})", "", entry["equation"], *sections])
