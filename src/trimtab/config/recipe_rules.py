"""Refused combinations that a recipe shows by itself: keys without effect, and settings that contradict each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trimtab.config.engine_sections import EngineConfig, RayConfig, ServerConfig, VllmConfig
from trimtab.config.optim_sections import SurgeConfig
from trimtab.config.rule import Facts, Rule
from trimtab.config.section import Section


def _changed_key(section: Section, keys: tuple[str, ...]) -> str | None:
    """Returns the first of `keys` whose value is not the default."""
    return next((key for key in keys if getattr(section, key) != type(section).model_fields[key].default), None)


def _unused_surge_key(facts: Facts) -> str | None:
    surge = facts.config.optim.surge
    return None if surge.at is None else _changed_key(surge, ("factor", "baseline", "window"))


def _unused_prefix_key(facts: Facts) -> str | None:
    prefix = facts.config.prefix
    if prefix is None:
        return None
    used = {"length": ("ratio", "whole"), "entropy": ("top",)}.get(prefix.rule, ())
    return _changed_key(prefix, tuple(key for key in ("ratio", "top", "whole") if key not in used))


def _repeated_url(facts: Facts) -> str | None:
    counts = Counter(url.rstrip("/") for url in facts.config.engine.server.urls)
    return next((url for url, count in counts.items() if count > 1), None)


def _unused_engine_section(facts: Facts) -> str | None:
    engine = facts.config.engine
    sections: dict[str, Any] = {"vllm": VllmConfig(), "server": ServerConfig()}
    return next((name for name in sections if name != engine.type and getattr(engine, name) != sections[name]), None)


def _actor_without_resources(facts: Facts) -> str | None:
    ray = facts.config.ray
    actors = {"engine": (ray.engine_cpus, ray.engine_gpus), "trainer": (ray.trainer_cpus, ray.trainer_gpus)}
    return next((actor for actor, resources in actors.items() if not any(resources)), None)


def _single_engine_section(facts: Facts) -> str | None:
    """Returns the section that makes batches synchronously and so works with one engine."""
    return next((name for name in ("prefix", "demonstrations") if getattr(facts.config, name) is not None), None)


def _truncates(facts: Facts) -> bool:
    return facts.config.sampling.top_p < 1 or facts.config.sampling.top_k > 0


def _compute_dtype(facts: Facts) -> str | None:
    """Returns the type the trainer computes in, if the engine computes in another."""
    model = facts.config.model
    dtype = "bfloat16" if model.autocast == "bfloat16" else model.dtype
    return dtype if dtype != facts.config.engine.dtype else None


def _prefix_age(facts: Facts) -> int:
    """Returns the age in updates of the oldest prefix."""
    return (
        0 if facts.config.prefix is None else (facts.config.prefix.refresh - 1) * facts.config.trainer.updates_per_step
    )


def _is_invariant(facts: Facts) -> bool:
    return facts.config.numerics == "invariant"


def _on_ray(facts: Facts) -> bool:
    return facts.config.placement == "ray"


def _has_engine_processes(facts: Facts) -> bool:
    return facts.config.engine_processes > 0 or (_on_ray(facts) and facts.config.engine.type != "server")


def _sync_age(facts: Facts) -> int:
    """Returns the age in updates of the weights right before they are published."""
    return (facts.config.trainer.sync_every or 1) - 1


_WITHOUT_EXPERTS = {
    "server": "servers return none here",
    "vllm": "vLLM returns them on GPUs only, where they are not read here",
}
_MASS = "without the sets each token was drawn from every ratio would be too small by the mass that was cut"

RECIPE_RULES = (
    Rule(
        "surge-unused-key",
        _unused_surge_key,
        "optim.surge: {value} has no effect with at = {optim.surge.at}: leave it out",
    ),
    Rule(
        "surge-needs-schedule",
        lambda f: f.config.optim.schedule != "surge" and f.config.optim.surge != SurgeConfig(),
        'optim.surge has no effect with schedule = {optim.schedule!r}: leave it out or set optim.schedule = "surge"',
    ),
    Rule(
        "environment-needs-max-tokens",
        lambda f: f.config.environment and f.config.sampling.max_tokens is None,
        "[environment] needs sampling.max_tokens: the tokens of a whole episode, results of calls included",
    ),
    Rule(
        "environment-excludes",
        lambda f: f.config.environment and _single_engine_section(f),
        "[environment] and [{value}] cannot be combined: a response is either continued by turns or from a prefix",
    ),
    Rule(
        "prefix-unused-key",
        _unused_prefix_key,
        "prefix: {value} has no effect with rule = {prefix.rule!r}: leave it out",
    ),
    Rule(
        "server-model-unused",
        lambda f: f.config.engine.server.model is not None and f.config.engine.server.kind != "vllm",
        "engine.server: model has no effect with kind = {engine.server.kind!r}, whose servers have one model: "
        "leave it out",
    ),
    Rule(
        "server-url-twice",
        _repeated_url,
        "engine.server.urls names {value} twice: name each server once and raise engine.server.concurrency",
    ),
    Rule(
        "engine-unused-section",
        _unused_engine_section,
        'engine.{value} has no effect with engine.type = {engine.type!r}: leave it out or set engine.type = "{value}"',
    ),
    Rule(
        "server-needs-urls",
        lambda f: f.config.engine.type == "server" and not f.config.engine.server.urls,
        'engine.server.urls is empty: name at least one server, e.g. ["http://127.0.0.1:8000"]',
    ),
    Rule(
        "ray-reserves-nothing",
        _actor_without_resources,
        "ray.{value}_cpus and {value}_gpus are both 0: Ray cannot reserve nothing, set one",
    ),
    Rule(
        "sync-exceeds-lag",
        lambda f: f.config.trainer.max_lag is not None and _sync_age(f) > f.config.trainer.max_lag and _sync_age(f),
        "trainer.sync_every = {trainer.sync_every} makes tokens up to {value} updates old, trainer.max_lag allows "
        "{trainer.max_lag}: lower sync_every or raise max_lag",
    ),
    Rule(
        "ray-unused",
        lambda f: f.config.placement == "local" and f.config.ray != RayConfig(),
        'ray has no effect with placement = "local": leave it out or set placement = "ray"',
    ),
    Rule(
        "ray-compare",
        lambda f: _on_ray(f) and f.config.compare is not None,
        'compare runs on one machine: leave it out or set placement = "local"',
    ),
    Rule(
        "ray-workers",
        lambda f: _on_ray(f) and f.config.engine.workers is not None,
        'engine.workers has no effect with placement = "ray": use ray.engines',
    ),
    Rule(
        "ray-one-engine",
        lambda f: _on_ray(f) and f.config.ray.engines > 1 and _single_engine_section(f),
        "[{value}] works with one engine: leave out ray.engines = {ray.engines}",
    ),
    Rule(
        "ray-server-engines",
        lambda f: _on_ray(f) and f.config.engine.type == "server" and f.config.ray.engines != RayConfig().engines,
        'ray.engines has no effect with engine.type = "server": leave it out',
    ),
    Rule(
        "quantize-embedded-only",
        lambda f: f.config.engine.type != "embedded" and f.config.engine.changes_weights,
        'engine.quantize and engine.noise need engine.type = "embedded"; {engine.type!r} has options of its own '
        "for quantized weights",
    ),
    Rule(
        "server-workers",
        lambda f: f.config.engine.type == "server" and f.config.engine.workers,
        "engine.workers = {value} has no effect on servers, which are processes already: leave it out, or name more "
        "engine.server.urls",
    ),
    Rule(
        "sampling-mask-needs-top-k",
        lambda f: f.config.engine.vllm.sampling_mask and not f.config.sampling.top_k,
        "engine.vllm.sampling_mask without sampling.top_k: vLLM would return the whole vocabulary with every token; "
        "set sampling.top_k, or leave sampling_mask out",
    ),
    Rule(
        "hang-timeout-unused",
        lambda f: f.config.engine.hang_timeout != EngineConfig().hang_timeout and not _has_engine_processes(f),
        "engine.hang_timeout = {engine.hang_timeout:g} has no effect without engines in processes of their own: leave "
        "it out, or set engine.workers",
    ),
    Rule(
        "truncation-servers",
        lambda f: _truncates(f) and f.config.engine.type == "server",
        f"sampling.top_p and top_k do not work with servers, which do not return sampling masks ({_MASS}): set "
        'top_p = 1 and top_k = 0, or use engine.type = "embedded"',
    ),
    Rule(
        "truncation-vllm",
        lambda f: _truncates(f) and f.config.engine.type == "vllm" and not f.config.engine.vllm.sampling_mask,
        f"sampling.top_p and top_k need engine.vllm.sampling_mask = true (vLLM on a GPU): {_MASS}; or set top_p = 1 "
        "and top_k = 0",
    ),
    Rule(
        "workers-one-engine",
        lambda f: (f.config.engine.workers or 0) > 1 and _single_engine_section(f),
        "[{value}] works with one engine: leave engine.workers out, or set it to 1 or 0",
    ),
    Rule(
        "invariant-embedded-only",
        lambda f: _is_invariant(f) and f.config.engine.type != "embedded",
        'numerics = "invariant" needs engine.type = "embedded": kernels of {engine.type!r} choose their order '
        "of summation by the batch, and are not the trainer's",
    ),
    Rule(
        "invariant-one-dtype",
        lambda f: _is_invariant(f) and _compute_dtype(f),
        'numerics = "invariant" needs one type on both sides: engine.dtype = "{engine.dtype}", and the trainer '
        'computes in {value}; set engine.dtype = "{value}", or model.dtype and model.autocast to match',
    ),
    Rule(
        "invariant-no-quantization",
        lambda f: _is_invariant(f) and f.config.engine.changes_weights,
        'numerics = "invariant" has nothing to keep equal with engine.quantize or engine.noise',
    ),
    Rule(
        "invariant-no-lora",
        lambda f: _is_invariant(f) and f.config.model.lora.rank,
        'numerics = "invariant" trains whole weights: adapters are merged for the sampler and not for the trainer; set '
        "model.lora.rank = 0",
    ),
    Rule(
        "demonstrations-fill-group",
        lambda f: f.config.demonstrations and f.config.demonstrations.per_group >= f.config.trainer.samples,
        "demonstrations.per_group = {demonstrations.per_group} leaves no sampled response among {trainer.samples}: "
        "lower it",
    ),
    Rule(
        "demonstrations-truncation",
        lambda f: f.config.demonstrations and _truncates(f),
        "[demonstrations]: traces were not drawn from the sampler's top-p or top-k sets and could not be scored over "
        "them: set sampling.top_p = 1 and sampling.top_k = 0",
    ),
    Rule(
        "prefix-share-divides",
        lambda f: f.config.prefix and f.config.trainer.samples % f.config.prefix.share,
        "prefix.share = {prefix.share} does not divide {trainer.samples} samples per prompt: choose a divisor",
    ),
    Rule(
        "prefix-sync",
        lambda f: (
            f.config.prefix and (f.config.trainer.sync_every not in (None, 1) or f.config.trainer.dynamic_sampling)
        ),
        "[prefix] completes responses under the current policy, batch by batch: leave trainer.sync_every and "
        "trainer.dynamic_sampling out",
    ),
    Rule(
        "prefix-age-exceeds-lag",
        lambda f: f.config.trainer.max_lag is not None and _prefix_age(f) > f.config.trainer.max_lag and _prefix_age(f),
        "prefix.refresh = {prefix.refresh} makes prefixes up to {value} updates old, trainer.max_lag allows "
        "{trainer.max_lag}: lower refresh or leave max_lag out",
    ),
    Rule(
        "in-flight-needs-lag",
        lambda f: not f.config.trainer.max_lag and f.config.trainer.in_flight != "finish",
        'trainer.in_flight = "{trainer.in_flight}" has no effect while generation and training take turns: leave '
        "it out, or set trainer.max_lag above 0",
    ),
    Rule(
        "oversample-sync-only",
        lambda f: f.config.is_async and f.config.trainer.oversample > 1,
        "trainer.oversample has no effect where engines run beside the trainer, which replace groups without signal "
        "one by one: leave it out",
    ),
    Rule(
        "lag-sync-only",
        lambda f: f.config.trainer.max_lag and _single_engine_section(f),
        "[{value}] makes its batches synchronously: leave trainer.max_lag out",
    ),
    Rule(
        "lag-below-one-step",
        lambda f: 0 < (f.config.trainer.max_lag or 0) < f.config.trainer.updates_per_step,
        "trainer.max_lag = {trainer.max_lag} is less than the {trainer.updates_per_step} updates of a "
        "step: nothing could ever be generated during training; set it to {trainer.updates_per_step} or more, or "
        "to 0",
    ),
    Rule(
        "replay-proximal-single-update",
        # The proximal pass of a single update is its own forward, which would replay its own choice.
        lambda f: f.config.routing.replay == "proximal" and f.config.trainer.updates_per_step == 1,
        'routing.replay = "proximal" has no effect with one update per batch, whose proximal policy is the current '
        'one: raise trainer.minibatches or trainer.epochs, or use "rollout"',
    ),
    Rule(
        "replay-rollout-engine",
        lambda f: f.config.routing.replay == "rollout" and _WITHOUT_EXPERTS.get(f.config.engine.type),
        'routing.replay = "rollout" needs an engine that returns experts, and {value}: use engine.type = "embedded", '
        'or replay = "proximal"',
    ),
    Rule(
        "replay-demonstrations",
        lambda f: f.config.routing.replay == "rollout" and f.config.demonstrations,
        'routing.replay = "rollout" needs the experts of every token, and no engine ran the traces of '
        '[demonstrations]: leave one of them out, or use replay = "proximal"',
    ),
    Rule(
        "minibatches-exceed-prompts",
        lambda f: f.config.trainer.minibatches > f.config.trainer.prompts,
        "trainer.minibatches = {trainer.minibatches} is more than trainer.prompts = {trainer.prompts}; a "
        "prompt's samples stay together",
    ),
    Rule(
        "eval-task-environment",
        lambda f: f.config.environment and f.config.eval.task,
        "[[eval.task]] is asked without the tools of [environment]: use `trimtab eval` after training, or leave one of "
        "them out",
    ),
)
