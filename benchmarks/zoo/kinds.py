"""Kinds of computed faults: one thing is changed on one side of a model, and what a diagnosis may say of it.

Thresholds of the diagnosis may be set on the kinds of one half only; `half` says which half a kind belongs to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from zoo.decoder import RANK, START, How
from zoo.sides import (
    CONFIG,
    LAST,
    LAYOUT,
    NEITHER,
    PRECISION,
    PROMPT,
    QUANTIZED,
    ROUTING,
    SAMPLER,
    SAMPLING,
    TRAINER,
    VALUES,
    VERSIONED,
    WEIGHTS,
    Kind,
    Sides,
    aging_kind,
    kind_of,
    model_kind,
    settings,
)
from zoo.unseen import UNSEEN
from zoo.unseen_e import UNSEEN_E
from zoo.unseen_f import UNSEEN_F


def half(name: str) -> str:
    """`C` to `F` for a kind of `NEW` or the `UNSEEN` ones, else `A` or `B` by a fixed hash of its name."""
    for side, kinds in (("C", NEW), ("D", UNSEEN), ("E", UNSEEN_E), ("F", UNSEEN_F)):
        if any(name == kind.name for kind in kinds):
            return side
    return "AB"[hashlib.sha256(name.encode()).digest()[0] % 2]


def _formula(level: int) -> Sides:
    """z * tanh(z / cap) in place of cap * tanh(z / cap)."""
    right = How(cap=(60.0, 40.0, 30.0)[level])
    return Sides(right, replace(right, formula="wrong"), right)


def _trainer(name: str, sides: Callable[[int], Sides]) -> Kind:
    return kind_of(name, sides, LAYOUT, "unexplained", TRAINER)


def _prompt(name: str, change: Callable[[np.ndarray, int], np.ndarray]) -> Kind:
    """The trainer has another prompt than the sampler."""

    def sides(level: int) -> Sides:
        return Sides(prompts=lambda prompt: change(prompt, level))

    return kind_of(name, sides, PROMPT, "unexplained misaligned? retokenized?", TRAINER)


def _settings(
    name: str,
    values: Sequence[dict[str, float]],
    accepted: str,
    *,
    raw: bool = False,
    detector: bool = False,
    stated: bool = False,
) -> Kind:
    def sides(level: int) -> Sides:
        shown = values[level] if stated else {}
        return Sides(process=settings(**values[level]), settings=shown, raw=raw)  # type: ignore[arg-type]

    layouts = ("jsonl",) if stated else ()
    doubt = "" if detector else "unexplained "
    return kind_of(name, sides, SAMPLING, doubt + accepted, SAMPLER, detector=detector, layouts=layouts)


# Weights, adapters, caches.


def _undelivered(level: int, step: int) -> Sides:
    """No weights arrive after step 0."""
    ages = ((1, 1, 1), (2, 2, 2), (4, 4, 4))[level]
    new = How(ages=tuple(age * step for age in ages), drift=0.004)
    return Sides(How(drift=0.004), new, new, lag=0)


def _old(first: int | None) -> Callable[[int, int], Sides]:
    """Weights of some updates ago; `first`: the version of the first step, None where no versions are written."""

    def sides(level: int, step: int) -> Sides:
        lag = (2, 4, 8)[level]
        new = How(ages=(step + lag,) * 3, drift=0.003)
        return Sides(How(ages=(step,) * 3, drift=0.003), new, new, lag=None if first is None else lag)

    return sides


def _adapter(scale: float | None, rank: int = RANK) -> Callable[[int, int], Sides]:
    """The trainer's adapter grows with every step; the sampler applies it `scale` times, or with fewer columns."""

    def sides(level: int, step: int) -> Sides:
        size = (0.0008, 0.0016, 0.003)[level] * step
        new = How(adapter=size)
        return Sides(replace(new, adapter_scale=scale, adapter_rank=rank), new, new)

    return sides


def _stale_cache(level: int, step: int) -> Sides:
    new = How(ages=(2 * step,) * 3, drift=(0.003, 0.005, 0.01)[level])
    return Sides(new, new, new, cached=replace(new, ages=(0, 0, 0)), lag=0)


def _quantized(name: str, bits: str, *, stated: bool = False) -> Kind:
    return kind_of(
        name,
        lambda _level: Sides(sampler=How(bits=bits)),
        QUANTIZED,
        "quantized" if stated else "quantized? unexplained",
        SAMPLER,
        detector=stated,
        intended=stated,
        layouts=("trimtab",) if stated else (),
        recipe=bits if stated else "",
    )


def _routing(level: int) -> Sides:
    """Experts are chosen by scores that differ a little between the sides."""
    noisy = How(experts=True, router_noise=(0.005, 0.02, 0.06)[level])
    return Sides(noisy, noisy, How(experts=True))


def _old_replica(level: int, step: int) -> Sides:
    """A part of the prompts is answered by weights of four updates ago."""
    new = How(ages=(step + 4,) * 3, drift=0.004)
    old = Sides(How(ages=(step,) * 3, drift=0.004), new, new)
    return Sides(new, new, new, some=((0.15, 0.25, 0.5)[level], old))


def _changed_within(level: int, step: int) -> Sides:
    new = How(ages=(step + (1, 2, 6)[level],) * 3, drift=0.004)
    return Sides(How(ages=(step,) * 3, drift=0.004), new, new, later=new)


# Changes of the columns themselves.


def _healthy(name: str, stored: Callable[[np.ndarray], np.ndarray] | None = None, *, base: str) -> Kind:
    sides = Sides() if stored is None else Sides(change=lambda b, p, _random: (stored(b), stored(p)))
    layouts = () if stored is None else ("jsonl", "trimtab")
    return kind_of(name, lambda _level: sides, "none precision", "none precision", NEITHER, base=base, layouts=layouts)


def _equal(_level: int) -> Sides:
    return Sides(change=lambda b, _p, _random: (b, b))


def _some(values: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    return random.random(len(values)) < share


def _filled(value: float, shares: Sequence[float]) -> Callable[[int], Sides]:
    """A constant in place of a share of the sampler's values."""

    def sides(level: int) -> Sides:
        return Sides(change=lambda b, p, random: (np.where(_some(b, shares[level], random), value, b), p))

    return sides


def _above_zero(level: int) -> Sides:
    """The normalizer is missing at a share of the trainer's values."""

    def change(b: np.ndarray, p: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return b, np.where(_some(b, (0.1, 0.3, 0.6)[level], random), p + random.uniform(76, 124, len(p)), p)

    return Sides(change=change)


HEALTHY = (
    *(_healthy(f"healthy: {base}", base=base) for base in ("bfloat16", "float16", "float32", "rough", "heavy")),
    _healthy("healthy: stored as float16", lambda b: b.astype(np.float16).astype(float), base="bfloat16"),
    _healthy("healthy: two decimals", lambda b: b.round(2), base="rough"),
    kind_of("healthy: equal", _equal, "none values", "none copied", NEITHER, base="float32"),
)
"""Kinds without a fault."""

FAULTS = (
    model_kind("rope: base", [{"theta": v} for v in (9500.0, 8500.0, 5000.0)], "quantized?"),
    model_kind("rope: scale", [{"stretch": v} for v in (1.002, 1.006, 1.02)], "quantized?"),
    model_kind("rope: attention factor", [{"attention": (1.0, v)} for v in (1.1, 1.25, 1.6)], "quantized?"),
    model_kind("attention scale", [{"attention": (v, v)} for v in (1.03, 1.08, 1.2)], "quantized?"),
    model_kind("attention window", [{"window": v} for v in (110, 100, 80)], "quantized?"),
    model_kind("soft cap missing", [{"cap": v} for v in (120.0, 70.0, 40.0)], "temperature?", f"{LAST} {CONFIG}"),
    kind_of("soft cap formula", _formula, f"{LAST} {CONFIG}", "unexplained temperature?", TRAINER),
    model_kind("logit scale", [{"gain": v} for v in (1.08, 1.2, 0.8)], "temperature", f"{LAST} {SAMPLING}"),
    model_kind("norm epsilon", [{"epsilon": v} for v in (1e-4, 3e-4, 1e-3)]),
    model_kind("norm gain", [{"offset": v} for v in (0.03, 0.08, 0.2)], "temperature?"),
    model_kind("output matrix untied", [{"untied": v} for v in (0.02, 0.05, 0.15)], "quantized?", f"{LAST} {WEIGHTS}"),
    model_kind(
        "output matrix old", [{"ages": (v, 0, 0)} for v in (1, 3, 8)], "undelivered? stale?", f"{LAST} {WEIGHTS}"
    ),
    model_kind("one layer old", [{"ages": (0, v, 0)} for v in (1, 3, 8)], "undelivered? stale?", WEIGHTS),
    model_kind("dropout", [{"dropout": v} for v in (0.01, 0.03, 0.1)], wrong=TRAINER),
    model_kind(
        "padded vocabulary",
        [{"padded": v} for v in (16, 64, 256)],
        "truncated-sampling?",
        f"{LAST} {SAMPLING}",
        wrong=TRAINER,
    ),
    _trainer("left padding: positions", lambda level: Sides(place="gap", strength=(0.02, 0.1, 1.0)[level])),
    _trainer("left padding: attended", lambda level: Sides(place="pads", strength=(-5.0, -3.0, 0.0)[level])),
    _trainer("packed sequences attend", lambda level: Sides(place="pack", strength=(-7.0, -5.5, -4.0)[level])),
    _prompt("start token doubled", lambda prompt, _level: np.append(START, prompt)),
    _prompt("another template", lambda prompt, level: np.insert(prompt, 1, np.arange(5, 6 + 2 * level))),
    _prompt("prompt cut", lambda prompt, level: prompt[min(len(prompt) - 2, (1, 4, 12)[level]) :]),
    aging_kind("undelivered", _undelivered, WEIGHTS, "undelivered", 8, detector=True, layouts=VERSIONED),
    aging_kind("old weights, versions", _old(0), WEIGHTS, "stale", 4, detector=True, intended=True, layouts=VERSIONED),
    aging_kind("old weights, no versions", _old(None), WEIGHTS, "stale undelivered? unexplained", 4),
    *(
        aging_kind(name, _adapter(scale, rank), WEIGHTS, "undelivered? unexplained", 8)
        for name, scale, rank in (
            ("adapter twice", 2.0, RANK),
            ("adapter unmerged", 0.0, RANK),
            ("adapter of another rank", 1.0, RANK // 2),
        )
    ),
    aging_kind("stale prefix cache", _stale_cache, WEIGHTS, "stale-cache", 6, detector=True, layouts=VERSIONED),
    model_kind(
        "8-bit cache from a position on", [{"cache_bits_from": v} for v in (90, 60, 0)], "quantized?", QUANTIZED
    ),
    _quantized("int8 weights, stated", "int8", stated=True),
    *(_quantized(f"{bits} weights", bits) for bits in ("int8", "fp8", "int4")),
    _settings("repetition penalty", [{"repetition": v} for v in (1.02, 1.05, 1.2)], ""),
    _settings("presence penalty", [{"presence": v} for v in (0.2, 0.5, 1.5)], ""),
    _settings("minimum probability", [{"min_p": v} for v in (0.02, 0.05, 0.2)], "truncated-sampling", detector=True),
    _settings("top-p", [{"top_p": v} for v in (0.98, 0.95, 0.8)], "truncated-sampling", detector=True),
    _settings("top-k", [{"top_k": v} for v in (10, 4, 2)], "truncated-sampling", detector=True),
    _settings("temperature", [{"temperature": v} for v in (0.9, 0.7, 1.2)], "temperature", detector=True),
    _settings(
        "temperature, stated", [{"temperature": v} for v in (0.9, 0.7, 1.2)], "temperature", detector=True, stated=True
    ),
    _settings(
        "temperature, raw log-probs",
        [{"temperature": v} for v in (0.9, 0.7, 0.5)],
        "raw-logprobs",
        raw=True,
        detector=True,
    ),
    _settings(
        "several settings",
        [
            {"temperature": 0.8, "top_p": 0.95},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition": 1.05},
        ],
        "temperature truncated-sampling",
    ),
    _settings("banned ids", [{"banned": v} for v in (1, 4, 16)], "truncated-sampling?"),
    kind_of("routing", _routing, ROUTING, "routing", NEITHER, detector=True),
    kind_of(
        "padding constant trained", _filled(-1.0, (0.01, 0.03, 0.1)), VALUES, "placeholder", SAMPLER, detector=True
    ),
    kind_of("values above 0", _above_zero, VALUES, "unexplained refused placeholder", TRAINER),
    kind_of(
        "logarithms to base 10",
        lambda _: Sides(change=lambda b, p, _r: (b / np.log(10), p)),
        VALUES,
        "log-base",
        SAMPLER,
        detector=True,
    ),
)

NEW = (
    # The attention kernel of a trainer has no sinks: radixark/miles#1500, verl#3894.
    kind_of(
        "attention sinks left out",
        lambda level: Sides((right := How(sink=(-1.0, 0.5, 2.0)[level])), right=right),
        CONFIG,
        "unexplained quantized?",
        TRAINER,
    ),
    # transformers#29285, Modalities#462.
    model_kind(
        "rotary positions in bfloat16",
        [{"coarse": v} for v in ("frequencies", "angles", "frequencies angles")],
        "quantized?",
    ),
    # sglang#2050: weights reach the first of several replicas.
    aging_kind("one replica old", _old_replica, WEIGHTS, "undelivered? stale? unexplained", 4),
    # NeMo labs-molt#124: weights are loaded while responses are written.
    aging_kind("weights change within responses", _changed_within, WEIGHTS, "undelivered? stale? unexplained", 4),
    # sgl-cookbook#237, vllm#54705: a cache of 8 bits without scales cuts off large values.
    kind_of(
        "8-bit cache without scales",
        lambda level: Sides(How(cache_bits_from=0, cache_top=(2.5, 2.0, 1.5)[level])),
        QUANTIZED,
        "quantized? unexplained",
        SAMPLER,
    ),
    # prime-rl#3112: the trainer computes in 8 bits.
    kind_of(
        "8-bit trainer",
        lambda level: Sides(trainer=How(bits=("", "fp8", "int4")[level], inputs="fp8")),
        QUANTIZED,
        "quantized? unexplained",
        TRAINER,
    ),
    # trl#2811.
    _settings("guided decoding", [{"grammar": v} for v in (2, 4, 8)], "truncated-sampling?"),
    # Megatron-LM#7452: each of several ranks counts the whole vocabulary.
    kind_of(
        "vocabulary counted several times",
        lambda level: Sides(change=lambda b, p, _random: (b, p - np.log((2, 4, 8)[level]))),
        LAST,
        "unexplained",
        TRAINER,
    ),
    # prime-rl#2438, NeMo-RL#3936.
    model_kind(
        "logits in bfloat16",
        [{"coarse": v} for v in ("logits", "logits", "logits log-probs")],
        "precision quantized?",
        f"{LAST} {PRECISION}",
    ),
    # vllm#37152: a request reads blocks of the prefix cache that belong to another one.
    kind_of(
        "prefix cache of another request",
        lambda level: Sides(some=((0.15, 0.25, 0.5)[level], Sides(foreign=16))),
        LAYOUT,
        "unexplained stale-cache?",
        SAMPLER,
    ),
)
"""Kinds that were written after all log odds had been set, and before the diagnosis saw one of them: half C."""

KINDS = (*HEALTHY, *FAULTS, *NEW, *UNSEEN, *UNSEEN_E, *UNSEEN_F)
