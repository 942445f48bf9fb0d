"""Kinds that were written without a look at the diagnosis, each from public reports of users: half F.

The diagnosis may not be changed for one of them; a comment names the reports of each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zoo.decoder import How
from zoo.sides import (
    CONFIG,
    ENDS,
    LAST,
    LAYOUT,
    PAIRS,
    PRECISION,
    PROMPT,
    QUANTIZED,
    RANDOM,
    ROUTING,
    SAMPLER,
    SAMPLING,
    TRAINER,
    VALUES,
    WEIGHTS,
    Lists,
    Sides,
    aging_kind,
    kind_of,
)


def _crossed(level: int, step: int) -> Sides:
    """The adapter of the gate takes the place of that of the matrix beside it."""
    new = How(adapter=(0.006, 0.012, 0.025)[level] * step)
    return Sides(replace(new, crossed=True), new, new)


def _exchanged(level: int, step: int) -> Sides:
    """From the first update on, some columns of the fused matrix are in the other half."""
    new = How(ages=(step,) * 3, drift=0.003)
    return Sides(replace(new, swapped=(0.016, 0.1, 1.0)[level] if step else 0.0), new, new)


def _copied(level: int, step: int) -> Sides:
    """The output matrix is a copy, made at the first step, of the embedding, which has all updates."""
    new = How(ages=(step,) * 3, drift=(0.006, 0.012, 0.03)[level])
    return Sides(replace(new, output_age=0), new, new)


def _other_adapter(level: int) -> Sides:
    """Some prompts were answered without the adapter before; their keys and values are taken from there."""
    right = How(adapter=(0.02, 0.03, 0.04)[level])
    return Sides(right, right, right, some=((0.3, 0.6, 1.0)[level], Sides(right, right, right, cached=How())))


def _unscaled(level: int) -> Sides:
    return Sides(How(), (right := How(growth=(0.05, 0.12, 0.4)[level])), right)


def _unbiased(level: int) -> Sides:
    return Sides(How(), (right := How(skew=(0.1, 0.3, 1.0)[level])), right)


def _activated(level: int) -> Sides:
    right = How(activations=("gelu", "gelu"))
    return Sides(How(activations=(("quick", "quick"), ("gelu", "silu"), ("silu", "silu"))[level]), right, right)


def _unquantized(level: int) -> Sides:
    """Both sides have weights of few bits, but for some of the sampler's that are meant to have them, too."""
    right = How(bits=("fp8", "fp8", "int4")[level])
    return Sides(replace(right, bare=("gate", "up gate", "up gate")[level]), right, right)


def _coarse_router(level: int) -> Sides:
    """Scores have much in common, so that few bits are left for what tells them apart."""
    right = How(experts=True, router_offset=(20.0, 80.0, 300.0)[level])
    return Sides(replace(right, coarse="router"), right, right)


def _without_first(level: int) -> Sides:
    """Some requests get their first token from another engine, which does not hand on its log-prob."""

    def reported(lists: Lists, random: np.random.Generator) -> Lists:
        lost = random.random(len(lists)) < (0.4, 0.7, 1.0)[level]
        return [np.append(0.0, row[1:]) if one else row for row, one in zip(lists, lost, strict=True)]

    return Sides(reported=reported)


def _columns(level: int) -> Sides:
    """Each row is read some columns late, by how much its prompt is longer than the shortest of a batch."""

    def reported(lists: Lists, random: np.random.Generator) -> Lists:
        longer = random.random(len(lists)) < (0.1, 0.4, 0.9)[level]
        late = np.where(longer, random.integers(1, (2, 4, 16)[level], len(lists)), 0)
        return [np.append(row[count:], np.zeros(count)) for row, count in zip(lists, late.tolist(), strict=True)]

    return Sides(reported=reported)


UNSEEN_F = (
    # Where the budget of the reasoning ends, its end is forced on the sampler: vllm#54864, vllm#45727.
    kind_of(
        "end of the reasoning forced",
        lambda level: Sides(How(forced=((100, 101), (64, 66), (32, 36))[level])),
        f"{SAMPLING} {VALUES}",
        "unexplained placeholder truncated-sampling?",
        SAMPLER,
    ),
    # The adapter of gate_proj is loaded into the place of up_proj: unsloth-zoo#941.
    aging_kind("adapter of another matrix", _crossed, WEIGHTS, "undelivered? stale? unexplained", 8),
    # Gate and up have another order after the conversion: slime#1840; see Megatron-Bridge#1690, vime#274.
    aging_kind("gate and up exchanged", _exchanged, WEIGHTS, "undelivered? stale? unexplained", 4),
    # A copy of the output matrix does not get the updates: prime-rl#2438, open-instruct#1387, vllm#51665.
    aging_kind("copy of the output matrix", _copied, f"{LAST} {WEIGHTS}", "undelivered? stale? unexplained", 8),
    # The scale of queries that grows with the position is not read: vllm#48621.
    kind_of("scale of late queries", _unscaled, CONFIG, "unexplained quantized?", SAMPLER),
    # Another activation function: Megatron-Bridge#4661, vllm#3411, vllm#41574, candle#3745.
    kind_of("another activation function", _activated, CONFIG, "unexplained quantized?", SAMPLER),
    # The bias of the output matrix is lost: vllm#46835.
    kind_of("bias of the output matrix lost", _unbiased, f"{LAST} {WEIGHTS}", "unexplained", SAMPLER),
    # The prefix cache does not tell adapters apart: vllm#30931, vllm#42125, vllm#44250, LMCache#2961.
    kind_of(
        "prefix cache of another adapter",
        _other_adapter,
        f"{LAYOUT} {WEIGHTS}",
        "unexplained stale-cache? undelivered? stale?",
        SAMPLER,
    ),
    # A mask of padding takes the place of the causal one: unsloth-zoo#963.
    kind_of(
        "later tokens attended to",
        lambda level: Sides(place="future", strength=(-7.0, -5.0, -2.0)[level]),
        LAYOUT,
        "unexplained",
        TRAINER,
    ),
    # The end of line between two turns is missing on one side: verl#3720, verl#6719.
    kind_of(
        "separator of turns missing",
        lambda level: Sides(between=(1, 2, 6)[level]),
        PROMPT,
        "unexplained misaligned? retokenized?",
        TRAINER,
    ),
    # The engine leaves matrices out that the trainer quantizes: verl#7519; see miles#1261.
    kind_of("matrices left out of quantization", _unquantized, QUANTIZED, "quantized? unexplained", SAMPLER),
    # Scores of experts are rounded to bfloat16: prime-rl#2952, vllm#58076, Automodel#3650, AstrAI#57.
    kind_of(
        "router in bfloat16",
        _coarse_router,
        f"{ROUTING} {PRECISION}",
        "routing unexplained precision?",
        SAMPLER,
        base="float16",
    ),
    # Norms or sums of layers are in bfloat16: vllm#36101, TransformerEngine#1132, transformers#33133, prime-rl#1167.
    kind_of(
        "norms in bfloat16",
        lambda level: Sides(How(coarse=("squares", "squares norms", "squares norms residual")[level])),
        PRECISION,
        "unexplained precision quantized?",
        SAMPLER,
        base="float16",
    ),
    # Megatron's dropout of hidden states is left on: reef#536, verl#4708, trl#2042.
    kind_of(
        "dropout of hidden states",
        lambda level: Sides(trainer=How(hidden_dropout=(0.001, 0.004, 0.015)[level])),
        RANDOM,
        "unexplained precision? quantized?",
        TRAINER,
    ),
    # The log-prob of the first token is not handed on by another engine: TensorRT-LLM#11727, higgs#32.
    kind_of("first token without a log-prob", _without_first, f"{ENDS} {VALUES}", "unexplained placeholder", SAMPLER),
    # Columns of a batch begin at the shortest prompt on one side only: trl#6191; see ms-swift#8196.
    kind_of("log-probs of late columns", _columns, f"{PAIRS} {VALUES}", "unexplained misaligned placeholder?", SAMPLER),
)
"""Written before the diagnosis saw one of them, by a reader of reports who had not read it."""
