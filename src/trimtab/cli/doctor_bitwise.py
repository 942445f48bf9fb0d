"""`trimtab doctor --bitwise`: finds the first operation whose bits differ between sampler and trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from trimtab.cli.output import print_json, print_pairs
from trimtab.errors import TrimtabError, require_extra

if TYPE_CHECKING:
    from trimtab.trainer.bitwise.difference import Comparison, Difference
    from trimtab.trainer.config import Config

DEFAULT = "true-on-policy"
MAX_NAMES = 6  # names in a line


def run(what: str | None, pair: str | None, sets: Sequence[str], as_json: bool) -> None:
    """Compare and print the result; exits with code 1 if bits differ."""
    require_extra("train", "trimtab doctor --bitwise")
    if pair is not None:
        if what is not None or sets:
            raise TrimtabError("--pair compares what its function returns: leave out the recipe and --set")
        comparison, sides = _compare_pair(pair)
    else:
        comparison, sides = _compare_recipe(what or DEFAULT, sets)
    if as_json:
        first = None if comparison.first is None else asdict(comparison.first)
        only = {"first": comparison.only[0], "second": comparison.only[1]}
        counts = {"tokens": comparison.tokens, "operations": comparison.operations}
        print_json(
            {"ok": comparison.first is None, **counts, "difference": first, "not_compared": only, "sides": sides}
        )
    else:
        print_pairs(_result_lines(comparison, sides))
    if comparison.first is not None:
        raise typer.Exit(1)


def _compare_recipe(what: str, sets: Sequence[str]) -> tuple[Comparison, dict[str, str]]:
    import torch

    from trimtab.trainer.bitwise.engine_and_trainer import BATCHES, SamplerAndTrainer, compare_sampler_and_trainer
    from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
    from trimtab.trainer.engines.factory import weight_quantization
    from trimtab.trainer.models.load import default_device
    from trimtab.trainer.run import load_model, prepare_model

    config = _config(what, sets)
    loaded, device = load_model(config), default_device()
    loaded.model.to(device)  # pyright: ignore[reportArgumentType]
    # The engine runs in this process, since operations in a worker process cannot be recorded.
    dtype, rounding = getattr(torch, config.engine.dtype), weight_quantization(config)
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype, quantization=rounding)
    autocast = config.model.autocast == "bfloat16"
    sides = SamplerAndTrainer(
        engine,
        prepare_model(loaded.model, config, device),
        lambda: torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast),
        config.sampling.temperature,
    )
    batches = " and ".join(str(len(rows)) for rows in BATCHES)
    precision = f"{config.model.dtype}{' under bfloat16 autocast' if autocast else ''}"
    descriptions = {
        "sampler": f"{config.engine.dtype}, prefilled, then decoded with a cache in batches of {batches}",
        "trainer": f"{precision}, one packed pass with gradient",
        "numerics": config.numerics,
    }
    padding: Any = loaded.tokenizer.pad_token_id
    return compare_sampler_and_trainer(sides, padding), descriptions


def _config(what: str, sets: Sequence[str]) -> Config:
    """Returns the recipe `what`, or the default recipe with the model `what`.

    Raises `TrimtabError` for an engine that is not embedded, or a LoRA adapter.
    """
    from trimtab.trainer.config import is_recipe, load_config

    config = load_config(what, sets) if is_recipe(what) else load_config(DEFAULT, [f"model.path={what}", *sets])
    if config.engine.type != "embedded":
        raise TrimtabError(
            f'--bitwise compares single operations, which engine.type = "{config.engine.type}" does not expose: '
            "add --set engine.type=embedded"
        )
    if config.model.lora.rank:
        raise TrimtabError("adapters are merged in the sampler and not in the trainer: add --set model.lora.rank=0")
    return config


def _compare_pair(path: str) -> tuple[Comparison, dict[str, str]]:
    from trimtab.plugins import check_arguments, load_function
    from trimtab.trainer.bitwise.difference import compare_pair

    function: Callable[..., Any] = load_function(path, "pair")
    check_arguments(function, f"pair {path!r}", {})
    returned = function()
    if (
        not isinstance(returned, tuple)
        or len(returned) not in (4, 5)
        or not (callable(returned[0]) and callable(returned[2]))
    ):
        raise TrimtabError(
            f"pair {path!r} must return (module, inputs, module, inputs), and rows as a fifth where the tokens of "
            "the two are not in the same order"
        )
    names = [type(side).__name__ if hasattr(side, "forward") else str(side) for side in (returned[0], returned[2])]
    return compare_pair(*returned), {"first": names[0], "second": names[1]}


def _result_lines(comparison: Comparison, sides: dict[str, str]) -> dict[str, str]:
    lines = dict(sides)
    counted = f"{comparison.tokens} tokens, {comparison.operations} operations"
    for side, names in zip(list(sides)[:2], comparison.only, strict=True):
        if names:
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            lines[f"only {side}"] = f"not compared: {', '.join(names[:MAX_NAMES])}{more}"
    if comparison.first is None:
        return lines | {"result": f"bit for bit equal: {counted}"}
    lines |= {"compared": counted} | _difference_lines(comparison.first, list(sides)[:2])
    if sides.get("numerics") == "native":
        lines["note"] = "native numerics promise no equal bits: add --set numerics=invariant"
    return lines


def _difference_lines(first: Difference, sides: Sequence[str]) -> dict[str, str]:
    layer = "" if first.layer is None else f", layer {first.layer}"
    what = f"{first.operation} ({first.kind}{layer})"
    if first.half == "input":
        what = f"{first.kind}{layer}, between {first.after or 'the start'} and {first.operation}"
    magnitude = "shapes differ" if first.largest is None else f"largest difference {first.largest:.3g}"
    lines = {"DIFFERS": what, "tokens": f"{first.tokens} of {first.compared} differ, {magnitude}"}
    lines["inputs"] = (
        "equal: this operation computes different bits from them"
        if first.half == "output"
        else "all earlier operations agree: the difference is computed in between, outside of any module"
    )
    if first.types[0] != first.types[1]:
        lines["types"] = " and ".join(f"{kind} ({side})" for kind, side in zip(first.types, sides, strict=True))
    if first.weights is not None:
        lines["weights"] = first.weights
    if first.inside is not None:
        lines["inside"] = first.inside
    return lines
