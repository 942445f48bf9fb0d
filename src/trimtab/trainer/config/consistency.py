"""Finds contradictory settings in a recipe, and keys that have no effect. Does not import torch.

Checks that also need the objective, the number of ranks, the task or the rewards are in `trainer/requirements.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from trimtab.errors import TrimtabError
from trimtab.text import without_credentials
from trimtab.trainer.config.schema import Config

AUTHORIZATION = "TRIMTAB_SERVER_AUTHORIZATION"
"""The environment variable that holds the `Authorization` header of requests to inference servers."""
SET_AUTHORIZATION = f"set {AUTHORIZATION} to the header's value, such as 'Bearer KEY', in the environment"
NO_CREDENTIALS = "use a server that needs none, on a private network"


def refuse(contradictions: Iterable[str]) -> None:
    """Raises `TrimtabError` with the first of `contradictions`, if there are any."""
    for message in contradictions:
        raise TrimtabError(message)


def contradictions(config: Config) -> Iterator[str]:
    """Yields one line for each contradiction in a recipe: what is wrong and what to do."""
    yield from _batches(config)
    yield from _compiled(config)
    yield from _special_batches(config)
    yield from _engines(config)
    yield from _tokens(config)


def _compiled(config: Config) -> Iterator[str]:
    """Yields settings that contradict compilation: they change layers from inside, or turn compilation off."""
    inside, engine = "which works inside of the layers,", config.engine
    in_trainer = engine.type == "vllm" and config.placement == "local" and config.engine_processes == 0
    changes = {
        f"[perturbation], {inside}": config.perturbation is not None and config.perturbation.layers != "logits",
        f"routing.replay, {inside}": config.routing.replay != "none",
        f'numerics = "invariant", {inside}': config.numerics == "invariant",
        "engine.vllm.eager with engine.workers = 0, which turns compilation off in the trainer,": (
            in_trainer and engine.vllm.eager
        ),
    }
    if config.model.compile:
        for name, is_set in changes.items():
            if is_set:
                yield f"model.compile and {name} cannot be combined: leave one out"


def _batches(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.minibatches > trainer.prompts:
        yield (
            f"trainer.minibatches = {trainer.minibatches} is more than trainer.prompts = {trainer.prompts}; a prompt's "
            "samples stay together"
        )
    optim = config.optim
    if optim.schedule == "cosine" and optim.min_lr > optim.lr:
        yield f"optim.min_lr = {optim.min_lr:g} is above optim.lr = {optim.lr:g}, the rate would rise: lower it"
    age = (trainer.sync_every or 1) - 1
    if trainer.max_lag is not None and age > trainer.max_lag:
        yield (
            f"trainer.sync_every = {trainer.sync_every} makes tokens up to {age} updates old, trainer.max_lag allows "
            f"{trainer.max_lag}: lower sync_every or raise max_lag"
        )
    if config.placement == "ray" and config.compare is not None:
        yield 'compare runs on one machine: leave it out or set placement = "local"'
    if config.environment is not None and config.sampling.max_tokens is None:
        yield "[environment] needs sampling.max_tokens: the tokens of a whole episode, results of calls included"
    if config.environment is not None and config.eval.task:
        yield (
            "[[eval.task]] is asked without the tools of [environment]: use `trimtab eval` after training, or leave "
            "one of them out"
        )
    if trainer.proximal == "snapshot" and config.routing.replay == "proximal":
        yield (
            'trainer.proximal = "snapshot" scores with other weights than those whose experts routing.replay = '
            '"proximal" replays: set replay = "rollout", or leave one of them out'
        )


def _special_batches(config: Config) -> Iterator[str]:
    """Yields settings that contradict prefixes and demonstrations: one engine makes their batches, synchronously."""
    trainer, prefix, demonstrations = config.trainer, config.prefix, config.demonstrations
    section = "prefix" if prefix is not None else "demonstrations" if demonstrations is not None else None
    if section is None:
        return
    if prefix is not None and demonstrations is not None:
        yield "[prefix] and [demonstrations] cannot be combined: leave one of them out"
    if config.environment is not None:
        yield (f"[environment] and [{section}] cannot be combined: a response is continued by turns or from a prefix")
    key = "ray.engines" if config.placement == "ray" else "engine.workers"
    engines = config.ray.engines if config.placement == "ray" else config.engine.workers or 1
    if engines > 1:
        yield f"[{section}] works with one engine: leave out {key} = {engines}"
    has_old_prefixes = prefix is not None and prefix.refresh > 1
    if trainer.max_lag or (trainer.max_lag == 0 and has_old_prefixes):
        yield (
            f"[{section}] makes its batches synchronously, of tokens as old as prefix.refresh says: leave "
            "trainer.max_lag out"
        )
    if prefix is not None and trainer.samples % prefix.share:
        yield f"prefix.share = {prefix.share} does not divide {trainer.samples} samples per prompt: choose a divisor"
    if prefix is not None and (trainer.sync_every not in (None, 1) or trainer.dynamic_sampling):
        yield (
            "[prefix] completes responses under the current policy, batch by batch: leave trainer.sync_every and "
            "trainer.dynamic_sampling out"
        )
    if demonstrations is not None and demonstrations.per_group >= trainer.samples:
        yield (
            f"demonstrations.per_group = {demonstrations.per_group} leaves no sampled response among "
            f"{trainer.samples}: lower it"
        )


def address_problem(key: str, url: object, instead: str, *, path: bool = False) -> str | None:
    """Returns what is wrong with the server address `url` at a recipe key, or None if it is valid or not a string.

    instead: what to do if the address contains a user name or a password. path: whether it may have a path.
    """
    if not isinstance(url, str):  # the part that owns the key raises the error
        return None
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is not a number up to 65535, or an unmatched bracket
        valid = False
    else:
        if "@" in parts.netloc:
            shown = re.sub("(?s)://.*@", "://***@", url)  # a password may contain white space
            return f"{key} holds a user name or a password ({shown}), which a run would write to its files: {instead}"
        valid = valid and (path or (parts.path in ("", "/") and not parts.query and not parts.fragment))
    if valid and url.isprintable() and " " not in url:
        return None
    return f"{key}: {without_credentials(url)!r} is not the base URL of a server: write it like http://127.0.0.1:8000"


def _engines(config: Config) -> Iterator[str]:
    engine, ray = config.engine, config.ray
    if engine.type == "server" and not engine.server.urls:
        yield 'engine.server.urls is empty: name at least one server, e.g. ["http://127.0.0.1:8000"]'
    named: list[tuple[str, Any, str]] = [("engine.server.urls", url, SET_AUTHORIZATION) for url in engine.server.urls]
    if config.environment is not None and config.environment.name == "openenv":
        named.append(("environment.url", config.environment.keywords.get("url"), NO_CREDENTIALS))
    found = (address_problem(key, url, instead, path=key == "environment.url") for key, url, instead in named)
    yield from (problem for problem in found if problem is not None)
    urls = [url.rstrip("/") for url in engine.server.urls]
    if repeated := next((url for url in urls if urls.count(url) > 1), None):
        yield (f"engine.server.urls names {repeated} twice: name each server once and raise engine.server.concurrency")
    actors = {"engine": (ray.engine_cpus, ray.engine_gpus), "trainer": (ray.trainer_cpus, ray.trainer_gpus)}
    if actor := next((name for name, resources in actors.items() if not any(resources)), None):
        yield f"ray.{actor}_cpus and {actor}_gpus are both 0: Ray cannot reserve nothing, set one"
    if engine.type != "embedded" and engine.changes_weights:
        yield (
            f'engine.quantize and engine.noise need engine.type = "embedded"; {engine.type!r} has other options '
            "for quantized weights"
        )
    computed = "bfloat16" if config.model.autocast == "bfloat16" else config.model.dtype
    differences = {
        f'engine.type = "{engine.type}"': engine.type != "embedded",
        f'engine.dtype = "{engine.dtype}" beside a trainer that computes in {computed}': engine.dtype != computed,
        "engine.quantize or engine.noise": engine.changes_weights,
        f"model.lora.rank = {config.model.lora.rank}, merged for the sampler alone,": config.model.lora.rank > 0,
    }
    if config.numerics == "invariant" and (setting := next((key for key, on in differences.items() if on), None)):
        yield (
            'numerics = "invariant" needs the same kernels, types and weights in sampler and trainer, which '
            f'{setting} excludes: change it, or set numerics = "native"'
        )


def _tokens(config: Config) -> Iterator[str]:
    """Yields settings that need data the engine lacks: the sets that tokens were drawn from, or the experts used."""
    kind, sampling = config.engine.type, config.sampling
    truncates, has_mask = sampling.top_p < 1 or sampling.top_k > 0, config.engine.vllm.sampling_mask
    lacking = None
    if truncates and config.demonstrations is not None:
        lacking = "traces of [demonstrations] were not drawn from any"
    elif truncates and kind == "server":
        lacking = "servers do not return it"
    elif kind == "vllm" and (truncates or has_mask) and not (has_mask and sampling.top_k):
        lacking = "vLLM returns it on a GPU with both engine.vllm.sampling_mask = true and a sampling.top_k above 0"
    if lacking is not None:
        yield (
            f"sampling.top_p and top_k need the set that each token was drawn from, and {lacking} (without the sets "
            "every ratio would be too small by the mass that was cut): set top_p = 1 and top_k = 0, or both of vLLM's"
        )
    without_experts = {
        "servers return none here": kind == "server",
        "vLLM returns them on GPUs only, where they are not read here": kind == "vllm",
        "no engine ran the traces of [demonstrations]": config.demonstrations is not None,
    }
    reason = next((key for key, on in without_experts.items() if on), None)
    if config.routing.replay == "rollout" and reason is not None:
        yield (
            f'routing.replay = "rollout" needs a record of every token\'s routing, and {reason}: use '
            'engine.type = "embedded" without demonstrations, or replay = "proximal"'
        )


# For each key or section: its condition for having an effect, in words and as a function of the recipe.
EFFECTS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    ("prefix.ratio", 'prefix.rule = "length"', lambda c: c.prefix is not None and c.prefix.rule == "length"),
    ("prefix.whole", 'prefix.rule = "length"', lambda c: c.prefix is not None and c.prefix.rule == "length"),
    ("prefix.top", 'prefix.rule = "entropy"', lambda c: c.prefix is not None and c.prefix.rule == "entropy"),
    ("engine.vllm", 'engine.type = "vllm"', lambda c: c.engine.type == "vllm"),
    ("engine.server", 'engine.type = "server"', lambda c: c.engine.type == "server"),
    ("engine.server.model", 'engine.server.kind = "vllm"', lambda c: c.engine.server.kind == "vllm"),
    (
        "engine.workers",
        'engines on this machine (placement = "local", engine.type "embedded" or "vllm")',
        lambda c: c.placement == "local" and c.engine.type != "server",
    ),
    (
        "engine.hang_timeout",
        "engines in separate processes (engine.workers)",
        lambda c: c.engine_processes > 0 or (c.placement == "ray" and c.engine.type != "server"),
    ),
    ("ray", 'placement = "ray"', lambda c: c.placement == "ray"),
    ("ray.engines", 'engine.type "embedded" or "vllm"', lambda c: c.engine.type != "server"),
    ("trainer.in_flight", "trainer.max_lag above 0", lambda c: bool(c.trainer.max_lag)),
    (
        "trainer.proximal",
        "tokens of older weights (trainer.max_lag, or sync_every above the updates of a step)",
        lambda c: c.trainer.proximal != "snapshot" or c.trainer.max_age >= c.trainer.updates_per_step,
    ),
    *((f"guard.{key}", "guard.on", lambda c: bool(c.guard.on)) for key in ("every", "lr_factor", "times")),
    ("trainer.refill_rounds", "trainer.dynamic_sampling", lambda c: c.trainer.dynamic_sampling),
    ("optim.min_lr", 'optim.schedule = "cosine"', lambda c: c.optim.schedule == "cosine"),
    ("model.lora", "model.lora.rank above 0", lambda c: c.model.lora.rank > 0),
    (
        "trainer.max_lag",
        "the updates of a step (minibatches x epochs) or more",
        lambda c: not 0 < (c.trainer.max_lag or 0) < c.trainer.updates_per_step,
    ),
)


def unused_keys(config: Config) -> Iterator[str]:
    """Yields one line for each key that is set but has no effect."""
    for key, needs, has_effect in EFFECTS:
        if is_set(config, key) and not has_effect(config):
            yield f"{key} has no effect without {needs}: leave it out"


def is_set(config: Config, key: str) -> bool:
    """Whether a dotted key differs from its default."""
    section: Any = config
    *parents, leaf = key.split(".")
    for parent in parents:
        section = getattr(section, parent)
    if section is None:
        return False
    return getattr(section, leaf) != type(section).model_fields[leaf].get_default(call_default_factory=True)
