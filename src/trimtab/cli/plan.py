"""`trimtab plan`: divides GPUs between sampling and training and predicts step time and token age."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.output import Json, echo, print_json, print_pairs
from trimtab.errors import TrimtabError

EXAMPLE = "trimtab plan --model qwen2.5-7b --gpus 8 --prompts 512 --samples 16 --response 16384"
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="qwen2.5-7b, an HF id of the table, or a folder with a config.json."),
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=2, metavar="N", help="How many there are, of one kind.")]
Kind = Annotated[str, typer.Option("--device", metavar="NAME", help="Kind of GPU: a100-80gb, h100, h200, ...")]
Longest = Annotated[int, typer.Option("--response", min=1, metavar="N", help="Longest response, in tokens.")]
Mean = Annotated[
    int | None,
    typer.Option("--mean", min=1, metavar="N", help="Average response. Default: half the longest.", show_default=False),
]
Lag = Annotated[
    int | None,
    typer.Option(
        "--max-lag",
        min=0,
        metavar="N",
        help="Largest age of a token, in updates. Default: the least that hides all waiting.",
        show_default=False,
    ),
]
Run = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN", help="Predict from the measured seconds of a synchronous run instead."),
]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", metavar="NAME=VALUE", help="Change one assumption (all are printed); may be repeated."),
]
Chosen = typer.Option(min=1, metavar="N", help="Default: chosen.", show_default=False)


def register(app: typer.Typer) -> None:
    app.command("plan", epilog=f"Example: [bold]{EXAMPLE}[/bold]")(plan)


def plan(
    model: Model = None,
    gpus: Gpus = None,
    device: Kind = "h100",
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts of a step.")] = 512,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Responses to a prompt.")] = 16,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a prompt.")] = 512,
    response: Longest = 16384,
    mean: Mean = None,
    minibatches: Annotated[int, typer.Option(min=1, metavar="N", help="Updates in an epoch of a batch.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over a batch.")] = 1,
    max_lag: Lag = None,
    rollout_gpus: Annotated[int | None, Chosen] = None,
    tensor_parallel: Annotated[int | None, Chosen] = None,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of one forward and backward; one response at least.")
    ] = 16384,
    assume: Assume = None,
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Split GPUs between sampling and training: seconds of a step, age of tokens, memory, keys of the recipe.

    Nothing is run: figures are arithmetic over public peaks and the printed assumptions. With --run, from a measured
    synchronous run instead: what the asynchronous one will do.
    """
    if run is not None:
        if model or gpus or assume:
            raise TrimtabError("--run predicts from measured times: leave --model, --gpus and --assume out")
        from trimtab.trainer.planning.measured import predict_from_run

        data = predict_from_run(run, max_lag)
        _show(data, as_json, note="provided that engines and trainer keep their speed, which needs separate processors")
        return
    if model is None or gpus is None:
        raise TrimtabError(f"name --model and --gpus, or a measured --run; for example: {EXAMPLE}")
    from trimtab.trainer.planning.estimates import Workload
    from trimtab.trainer.planning.inputs import Assumptions, find_device, find_shape, parse_assumptions
    from trimtab.trainer.planning.planner import PlanRequest, best_plan

    average = (response + 1) // 2 if mean is None else mean
    if average > response:
        raise TrimtabError(f"--mean {average} is above --response {response}, the longest: lower it")
    workload = Workload(prompts, samples, prompt, average, response, updates=minibatches * epochs, epochs=epochs)
    assumed, sizes = parse_assumptions(assume or ()), (rollout_gpus, tensor_parallel, micro_batch_tokens, max_lag)
    data = best_plan(PlanRequest(find_shape(model), find_device(device), gpus, workload, assumed, *sizes)).as_dict()
    reasons = {f"assumptions.{key}": str(field.description) for key, field in Assumptions.model_fields.items()}
    note = (
        "none of this was measured (assumptions: --assume name=value): train a few steps, then trimtab plan --run RUN"
    )
    _show(data, as_json, note, reasons)


def _show(data: Mapping[str, Any], as_json: bool, note: str, reasons: Mapping[str, str] | None = None) -> None:
    """Print a plan as JSON, or a table with a row for each result and the recipe's keys; `reasons` end their rows."""
    if as_json:
        print_json(data)
        return
    results = {key: value for key, value in data.items() if key not in ("model", "device", "workload", "recipe")}
    rows = dict(_rows(results, ""))
    print_pairs({key: f"{value:>9}  {(reasons or {}).get(key, '')}".rstrip() for key, value in rows.items()})
    echo(f"in seconds, bytes and tokens; {note}\n\nset in the recipe:")
    for key, value in data["recipe"].items():
        echo(f"{key} = {json.dumps(value)}")


def _rows(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield f"{prefix}{key}", "yes" if value else "no"
        elif value < 1e8:
            yield f"{prefix}{key}", str(value) if isinstance(value, int) else f"{value:.5g}"
        else:
            yield f"{prefix}{key}", f"{value / 1e9:.4g} G"
