"""`trimtab doctor --bitwise`: names the first operation whose bits differ between sampler and trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from trimtab.cli.output import print_json, print_pairs
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.bitwise.difference import Comparison, Difference
    from trimtab.config import Config

DEFAULT = "true-on-policy"
SHOWN = 6  # names in a line


def run(what: str | None, pair: str | None, sets: Sequence[str], as_json: bool) -> None:
    """Compare, print, and exit with code 1 where bits differ."""
    if pair is not None:
        if what is not None or sets:
            raise TrimtabError("--pair compares what its function returns: leave out the recipe and --set")
        found, sides = _of_pair(pair)
    else:
        found, sides = _of_recipe(what or DEFAULT, sets)
    if as_json:
        first = None if found.first is None else asdict(found.first)
        only = {"first": found.only[0], "second": found.only[1]}
        counts = {"tokens": found.tokens, "operations": found.operations}
        print_json({"ok": found.first is None, **counts, "difference": first, "not_compared": only, "sides": sides})
    else:
        print_pairs(_lines(found, sides))
    if found.first is not None:
        raise typer.Exit(1)


def _of_recipe(what: str, sets: Sequence[str]) -> tuple[Comparison, dict[str, str]]:
    import torch

    from trimtab.bitwise.engine_and_trainer import BATCHES, Sides, compare_sides
    from trimtab.engines.embedded.embedded_engine import EmbeddedEngine
    from trimtab.engines.factory import weight_quantization
    from trimtab.models.load import default_device
    from trimtab.training.run import load_model, prepare_model

    config = _config(what, sets)
    loaded, device = load_model(config), default_device()
    loaded.model.to(device)  # pyright: ignore[reportArgumentType]
    # A worker process runs the same engine, where nothing can be looked into.
    dtype, rounding = getattr(torch, config.engine.dtype), weight_quantization(config)
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype, rounding=rounding)
    autocast = config.model.autocast == "bfloat16"
    sides = Sides(
        engine,
        prepare_model(loaded.model, config, device),
        lambda: torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast),
        config.sampling.temperature,
    )
    batches = " and ".join(str(len(rows)) for rows in BATCHES)
    precision = f"{config.model.dtype}{' under bfloat16 autocast' if autocast else ''}"
    said = {
        "sampler": f"{config.engine.dtype}, prefilled, then decoded with a cache in batches of {batches}",
        "trainer": f"{precision}, one packed pass with gradient",
        "numerics": config.numerics,
    }
    padding: Any = loaded.tokenizer.pad_token_id
    return compare_sides(sides, padding), said


def _config(what: str, sets: Sequence[str]) -> Config:
    """The recipe of that name, or the default recipe with the model of that name."""
    from trimtab.config import load_config, recipe_names

    is_recipe = what.endswith(".toml") or what in recipe_names()
    config = load_config(what, sets) if is_recipe else load_config(DEFAULT, [f"model.path={what}", *sets])
    if config.engine.type != "embedded":
        raise TrimtabError(
            f'--bitwise looks into operations, which engine.type = "{config.engine.type}" hides: '
            "add --set engine.type=embedded"
        )
    if config.model.lora.rank:
        raise TrimtabError("adapters are merged in the sampler and not in the trainer: add --set model.lora.rank=0")
    return config


def _of_pair(place: str) -> tuple[Comparison, dict[str, str]]:
    from trimtab.bitwise.difference import compare_pair
    from trimtab.plugins import check_arguments, load_function

    function: Callable[..., Any] = load_function(place, "pair")
    check_arguments(function, f"pair {place!r}", {})
    made = function()
    if not isinstance(made, tuple) or len(made) not in (4, 5) or not (callable(made[0]) and callable(made[2])):
        raise TrimtabError(
            f"pair {place!r} must return (module, inputs, module, inputs), and rows as a fifth where the tokens of "
            "the two are not in the same order"
        )
    names = [type(side).__name__ if hasattr(side, "forward") else str(side) for side in (made[0], made[2])]
    return compare_pair(*made), {"first": names[0], "second": names[1]}


def _lines(found: Comparison, sides: dict[str, str]) -> dict[str, str]:
    lines = dict(sides)
    counted = f"{found.tokens} tokens, {found.operations} operations"
    for side, names in zip(list(sides)[:2], found.only, strict=True):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines[f"only {side}"] = f"not compared: {', '.join(names[:SHOWN])}{more}"
    if found.first is None:
        return lines | {"result": f"bit for bit equal: {counted}"}
    lines |= {"compared": counted} | _difference(found.first, list(sides)[:2])
    if sides.get("numerics") == "native":
        lines["note"] = "native numerics promise no equal bits: add --set numerics=invariant"
    return lines


def _difference(first: Difference, sides: Sequence[str]) -> dict[str, str]:
    layer = "" if first.layer is None else f", layer {first.layer}"
    what = f"{first.operation} ({first.kind}{layer})"
    if first.half == "input":
        what = f"{first.kind}{layer}, between {first.after or 'the start'} and {first.operation}"
    by = "shapes differ" if first.largest is None else f"largest difference {first.largest:.3g}"
    lines = {"DIFFERS": what, "tokens": f"{first.tokens} of {first.compared} differ, {by}"}
    lines["inputs"] = (
        "equal: this operation computes other bits from them"
        if first.half == "output"
        else "all that operations made before is equal: what differs is computed in between, in no module"
    )
    if first.types[0] != first.types[1]:
        lines["types"] = " and ".join(f"{kind} ({side})" for kind, side in zip(first.types, sides, strict=True))
    if first.weights is not None:
        lines["weights"] = first.weights
    if first.inside is not None:
        lines["inside"] = first.inside
    return lines
