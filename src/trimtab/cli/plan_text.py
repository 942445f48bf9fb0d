"""Formats a plan as text or as data for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from trimtab.planning.assumptions import assumption_reasons
from trimtab.planning.measured import MeasuredRun
from trimtab.planning.memory import host_memory
from trimtab.planning.pipeline_schedule import steady_cycle, steps_ahead
from trimtab.planning.planner import Plan

GB = 1e9


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as data for JSON; in seconds, bytes and tokens per second."""
    request, steady = plan.request, plan.cycle
    return {
        "model": {**asdict(request.shape), "parameters": request.shape.parameters},
        "device": asdict(request.device),
        "gpus": request.gpus,
        "workload": {**asdict(plan.work), "responses": plan.work.responses, "tokens": plan.work.tokens},
        "fits": plan.fits,
        "engines": {
            "count": plan.engines,
            "gpus": plan.engine.gpus,
            "tokens_per_second": plan.generation_rate,
            "responses_at_once": plan.slots,
            "weights": plan.engine.weights,
            "cache_tokens": int(plan.engine.cache),
            "fits": plan.engine_fits,
            "busy": steady.engines,
        },
        "trainer": {
            "ranks": plan.rank.ranks,
            "tokens_per_second": plan.training_rate,
            "micro_batch_tokens": plan.rank.tokens,
            "gradient_checkpointing": plan.rank.recompute,
            "offload": plan.rank.offload,
            "memory": dict(plan.memory),
            "memory_total": sum(plan.memory.values()),
            "memory_room": plan.memory_limit,
            "longest_response": plan.longest,
            "host_memory": host_memory(request.shape, plan.rank),
            "fits": plan.trainer_fits,
            "busy": steady.trainer,
        },
        "seconds": {**asdict(plan.phases), "step": steady.seconds, "step_in_turn": plan.phases.in_turn},
        "lag": _lag(steady.lag_mean, steady.lag_max, plan.work.updates, plan.max_lag),
        "recipe": plan.keys(),
        "assumptions": asdict(request.assumed),
    }


def plan_text(plan: Plan) -> str:
    request, work, steady = plan.request, plan.work, plan.cycle
    shape, gpu = request.shape, request.device
    tokens = f"{work.tokens / 1e6:.1f} million response tokens"
    lines = [
        f"{shape.name} ({shape.parameters / 1e9:.2f} billion parameters) on {request.gpus} x {gpu.name}",
        f"a step: {work.prompts} prompts of {work.prompt} tokens x {work.samples} responses of {work.response:.0f} "
        f"tokens on average, {work.longest} at most: {tokens}, {work.updates} update{'s' * (work.updates > 1)}",
        "",
        *_phase_lines(plan),
        "",
        f"asynchronous: {_seconds(steady.seconds)} a step, {work.tokens / steady.seconds:.0f} tokens/s; "
        f"engines work {steady.engines:.0%} of it, the trainer {steady.trainer:.0%}",
        f"in turn:      {_seconds(plan.phases.in_turn)} a step on the same split (max_lag = 0)",
        f"tokens are {steady.lag_mean * work.updates:.1f} updates old on average, at most {plan.max_lag} (max_lag)",
        "",
        *_memory_lines(plan),
        "",
        "set in the recipe:",
        *_recipe_lines(plan.keys()),
        "",
        "assumed (change with --assume name=value):",
        *_table((name, f"{value:g}", assumption_reasons()[name]) for name, value in asdict(request.assumed).items()),
        f"peaks of {gpu.name}: {gpu.flops / 1e12:g} TFLOP/s, {gpu.bandwidth / 1e12:g} TB/s, "
        f"{gpu.memory / GB:g} GB ({gpu.source})",
        "none of this was measured: train a few steps, then `trimtab plan --run RUN`",
    ]
    return "\n".join(lines)


def measured_dict(measured: MeasuredRun, max_lag: int | None) -> dict[str, Any]:
    """Returns the prediction for the asynchronous run from the measured phases of a synchronous one, for JSON."""
    ahead = steps_ahead(max_lag, measured.updates, measured.phases)
    steady = steady_cycle(measured.phases, ahead)
    return {
        "measured": {**asdict(measured.phases), "step": measured.phases.in_turn, "steps": measured.steps},
        "tokens_per_second": {
            "generate": measured.generated / max(measured.phases.generate, 1e-9),
            "train": measured.trained / max(measured.phases.train, 1e-9),
        },
        "predicted": {"step": steady.seconds, "engines_busy": steady.engines, "trainer_busy": steady.trainer},
        "lag": _lag(steady.lag_mean, steady.lag_max, measured.updates, ahead * measured.updates),
        "recipe": {"trainer.max_lag": ahead * measured.updates},
    }


def measured_text(measured: MeasuredRun, data: Mapping[str, Any]) -> str:
    phases, predicted, lag = measured.phases, data["predicted"], data["lag"]
    speed = data["tokens_per_second"]
    seconds = ", ".join(f"{name} {value:.3g}" for name, value in asdict(phases).items() if value)
    return "\n".join(
        [
            f"measured: {_seconds(phases.in_turn)} a step, medians of {measured.steps} ({seconds})",
            f"          generation {speed['generate']:.0f} tokens/s, training {speed['train']:.0f} tokens/s",
            f"predicted with engines running during training and trainer.max_lag = {lag['max_lag']}:",
            f"          {_seconds(predicted['step'])} a step ({phases.in_turn / predicted['step']:.2f}x), engines work "
            f"{predicted['engines_busy']:.0%} of it, the trainer {predicted['trainer_busy']:.0%}",
            f"          tokens {lag['mean']:.1f} updates old on average, {lag['max']} at most",
            "provided that both keep their speed, which needs separate processors",
        ]
    )


def _lag(mean: float, most: int, updates: int, max_lag: int) -> dict[str, float]:
    return {"mean": mean * updates, "max": most * updates, "max_lag": max_lag, "updates": updates}


def _phase_lines(plan: Plan) -> list[str]:
    phases, engine = plan.phases, plan.engine
    return _table(
        [
            (
                "engines",
                f"{plan.engines} on {engine.gpus} GPU{'s' * (engine.gpus > 1)} each",
                f"{_seconds(phases.generate)}, {plan.generation_rate:.0f} tokens/s, {plan.slots} responses at once",
            ),
            (
                "trainer",
                f"{plan.rank.ranks} rank{'s' * (plan.rank.ranks > 1)}",
                f"{_seconds(phases.train)}, {plan.training_rate:.0f} tokens/s, {plan.rank.tokens} tokens at once",
            ),
            ("weights", "", f"{_seconds(phases.publish)} to hand over, {_seconds(phases.load)} to take"),
        ]
    )


def _memory_lines(plan: Plan) -> list[str]:
    total = sum(plan.memory.values())
    parts = [(name, f"{value / GB:8.1f} GB", "") for name, value in plan.memory.items()]
    verdict = "fits" if plan.trainer_fits else f"DOES NOT FIT: responses of {plan.longest} tokens would"
    options = ", ".join(word for word, on in _memory_options(plan) if on) or "nothing recomputed, nothing offloaded"
    cache = f"{plan.engine.cache / 1e3:.0f} thousand tokens of keys and values"
    lines = [f"memory of a training rank ({options}): {total / GB:.1f} of {plan.memory_limit / GB:.1f} GB, {verdict}"]
    lines += _table(parts)
    lines.append(f"CPU memory of all ranks: {host_memory(plan.request.shape, plan.rank) / GB:.0f} GB")
    engine_verdict = "fits" if plan.engine_fits else "DOES NOT FIT: a response of full length needs more"
    lines.append(
        f"memory of an engine's GPU: {plan.engine.weights / GB:.1f} GB of weights, room for {cache}, {engine_verdict}"
    )
    return lines


def _memory_options(plan: Plan) -> Iterable[tuple[str, bool]]:
    return ("gradient checkpointing", plan.rank.recompute), ("optimizer in CPU memory", plan.rank.offload)


def _recipe_lines(keys: Mapping[str, Any]) -> list[str]:
    return _table((key, "=", _toml(value)) for key, value in keys.items())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    listed = list(rows)
    first, second = (max(len(row[column]) for row in listed) for column in (0, 1))
    return [f"  {a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in listed]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"
