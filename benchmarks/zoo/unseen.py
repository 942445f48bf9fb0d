"""Kinds that were written without a look at the diagnosis, each from public reports of users: half D.

The diagnosis may not be changed for one of them; a comment names the reports of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
    Kind,
    Lists,
    Sides,
    aging_kind,
    kind_of,
    settings,
)


def _one_side(
    wrong_side: str,
    name: str,
    sides: Callable[[int], tuple[How, How]],
    families: str,
    accepted: str = "quantized?",
    base: str = "",
) -> Kind:
    """sides: what the wrong side has, and the right one."""

    def both(level: int) -> Sides:
        wrong, right = sides(level)
        return Sides(wrong, right, right) if wrong_side == SAMPLER else Sides(right, wrong, right)

    return kind_of(name, both, families, "unexplained " + accepted, wrong_side, base=base)


_sampler, _trainer = partial(_one_side, SAMPLER), partial(_one_side, TRAINER)


def _placed(name: str, place: str, strengths: tuple[float, float, float], families: str, accepted: str = "") -> Kind:
    def sides(level: int) -> Sides:
        return Sides(place=place, strength=strengths[level])

    return kind_of(name, sides, families, "unexplained " + accepted, TRAINER)


def _state(level: int) -> Sides:
    """The first layer has a state, which the trainer does not begin anew where the next sequence of a row begins."""
    right = How(decay=(0.8, 0.9, 0.97)[level], skip=0.5)
    return Sides(right, right, right, place="state")


def _unadapted(level: int, step: int) -> Sides:
    new = How(adapter=(0.004, 0.01, 0.025)[level] * step)
    return Sides(replace(new, unadapted="up gate down"), new, new)


def _one_scale(level: int, step: int) -> Sides:
    """After the first step, weights of 8 bits have the scale of the largest matrix beside them."""
    new = How(ages=(step,) * 3, drift=0.003)
    groups = (("up gate",), ("q k v",), ("q k v", "up gate"))[level] if step else ()
    return Sides(replace(new, bits="fp8", one_scale=groups), new, new)


def _shifted(level: int) -> Sides:
    """From some token on, the sampler's log-probs of some responses are those of the next token."""

    def reported(lists: Lists, random: np.random.Generator) -> Lists:
        found = list(lists)
        for number in np.flatnonzero(random.random(len(lists)) < (0.1, 0.4, 1.0)[level]):
            row = lists[number]
            place = int(random.integers(len(row) - 1))
            found[number] = np.concatenate([row[:place], row[place + 1 :], row[-1:]])
        return found

    return Sides(reported=reported)


def _of_others(level: int) -> Sides:
    """The last responses of a step have the lists of the first ones: those of the first rank."""

    def reported(lists: Lists, _random: np.random.Generator) -> Lists:
        own = max(1, round(len(lists) / (1.1, 2.0, 8.0)[level]))
        return [row if place < own else np.resize(lists[place % own], len(row)) for place, row in enumerate(lists)]

    return Sides(reported=reported)


UNSEEN = (
    # The kernel of the engine ignores the soft cap of the scores: sglang#33915, sglang#34093, sgl-kernel-xpu#491.
    _sampler(
        "soft cap of attention left out",
        lambda level: (How(), How(score_cap=(8.0, 4.0, 2.0)[level])),
        CONFIG,
    ),
    # Long sequences have other rotary factors than the keys in the cache: transformers#33129, vllm#6135.
    _sampler(
        "rotary factors change behind the cache",
        lambda level: ((how := How(long_from=(100, 80, 60)[level], long_stretch=(1.01, 1.04, 1.15)[level])), how),
        CONFIG,
    ),
    # partial_rotary_factor is not read: vllm#43770, maxtext#4616.
    _sampler(
        "whole heads rotated",
        lambda level: (How(), How(turned=(7, 6, 4)[level])),
        CONFIG,
    ),
    # routed_scaling_factor is left out: sglang-jax#1282; weights of experts are computed otherwise: miles#2722.
    _sampler(
        "scale of experts left out",
        lambda level: (How(experts=True), How(experts=True, expert_scale=(0.85, 1.0, 2.0)[level])),
        CONFIG,
        base="float32",
    ),
    # The bias of each expert is added whatever its probability: Automodel#2591.
    _trainer(
        "bias of experts in full",
        lambda level: (replace(right := How(experts=True, expert_bias=(0.3, 1.0, 1.6)[level]), weighted=False), right),
        CONFIG,
        base="float32",
    ),
    # Replay of experts: one row is repeated from the border of a chunk on: sglang#36404, SkyRL#1908.
    _trainer(
        "replayed experts of another token",
        lambda level: (How(experts=True, repeated=(40, (48, 64, 104)[level])), How(experts=True)),
        ROUTING,
        "routing",
    ),
    # Every rank loads the first slice of fused matrices: vllm-gguf-plugin#103.
    _sampler(
        "every rank with the first heads",
        lambda level: (How(one_shard=("k1", "q1 k1", "q0 k0 v0 q1 k1 v1")[level]), How()),
        WEIGHTS,
        "undelivered? stale?",
    ),
    # A parameter is lost as weights are loaded: prime-rl#2714; a buffer is, after a pause: vllm#16564, NeMo-RL#2631.
    _sampler(
        "parameter lost on loading",
        lambda level: (How(decay=0.9), How(decay=0.9, skip=(0.02, 0.1, 0.5)[level])),
        WEIGHTS,
        "undelivered? stale?",
    ),
    # The adapter of experts is read and not used, that of attention is: vllm#41754, unsloth-zoo#1250.
    aging_kind("adapter on attention only", _unadapted, WEIGHTS, "undelivered? unexplained", 8),
    # New weights of 8 bits are served with one scale for matrices that have their own: modal-projects/stitch#16.
    aging_kind(
        "8-bit weights with one scale",
        _one_scale,
        f"{QUANTIZED} {WEIGHTS}",
        "quantized? undelivered? stale? unexplained",
        4,
    ),
    # The state of a layer without attention crosses from sequence to sequence: Automodel#2147, lmms-engine#167.
    kind_of("state across packed sequences", _state, LAYOUT, "unexplained", TRAINER),
    # The engine has no attention in both directions between tokens of an image: vllm#14660, sglang#10707.
    _sampler(
        "image attended one way",
        lambda level: (How(), How(two_way=(3, 5, 7)[level])),
        f"{LAYOUT} {CONFIG}",
        "",
    ),
    # Positions of images in one dimension or three: verl-omni#254.
    _placed("positions of an image", "grid", (2, 5, 24), f"{LAYOUT} {CONFIG}"),
    # The template drops the reasoning of earlier turns, the trainer keeps it: verl#6854.
    kind_of(
        "reasoning of the last turn kept",
        lambda level: Sides(forgotten=(0.25, 0.5, 1.0)[level]),
        PROMPT,
        "unexplained misaligned? retokenized?",
        TRAINER,
    ),
    # Labels are shifted after the sequence was cut into slices for the ranks: ChatLearn#343, bionemo-recipes#1449.
    _placed("labels shifted within slices", "slices", (2, 4, 8), PAIRS, "misaligned? wrong-token?"),
    # Slices in a row are put together in zigzag order: ms-swift#10071.
    _placed("log-probs in zigzag order", "zigzag", (2, 4, 8), PAIRS, "misaligned?"),
    # Requests of other ranks have the log-probs of the first rank: sglang-jax#975; see vllm#27615.
    kind_of("log-probs of another rank", _of_others, PAIRS, "unexplained misaligned? wrong-token?", SAMPLER),
    # Discarded draft tokens count in the offsets of log-probs: vllm#29216, vllm#38711.
    kind_of("offsets count drafts", _shifted, f"{PAIRS} {VALUES}", "unexplained misaligned", SAMPLER),
    # The text of responses is encoded again: SkyRL#123, rllm#272, prime-rl#1352.
    kind_of(
        "response encoded again",
        lambda level: Sides(encoded=(0.03, 0.1, 0.4)[level]),
        f"{PAIRS} {VALUES}",
        "unexplained retokenized",
        TRAINER,
    ),
    # The trainer expands an image into many tokens and takes the logits of earlier ones: LightRFT#53.
    kind_of(
        "image counted otherwise",
        lambda level: Sides(some=((0.1, 0.3, 0.8)[level], Sides(trainer=How(ahead=5)))),
        f"{PAIRS} {VALUES}",
        "unexplained misaligned",
        TRAINER,
    ),
    # The last token of responses that are cut is overwritten by an end token: OpenRLHF#238.
    kind_of(
        "end token in place of the last one",
        lambda level: Sides(ended=(0.2, 0.5, 1.0)[level]),
        ENDS,
        "unexplained wrong-token?",
        SAMPLER,
    ),
    # An end token that was not sampled is appended with log-prob 0: SkyRL#758, SkyRL#2148, open-instruct#1041.
    kind_of(
        "end token appended with log-prob 0",
        lambda level: Sides(ended=(0.2, 0.5, 1.0)[level], end_logp=0.0),
        f"{ENDS} {VALUES}",
        "unexplained placeholder",
        SAMPLER,
    ),
    # Requests without a temperature have another default than the trainer: tinker-cloud#26.
    kind_of(
        "temperature of some requests",
        lambda level: Sides(some=((0.15, 0.4, 0.8)[level], Sides(process=settings(temperature=0.7)))),
        SAMPLING,
        "unexplained temperature",
        SAMPLER,
    ),
    # The softmax runs over the slice of the vocabulary on one device: tt-metal#47902.
    _sampler(
        "softmax over a slice of the vocabulary",
        lambda level: (How(slices=(2, 4, 8)[level]), How()),
        LAST,
        "truncated-sampling?",
    ),
    # The trainer's log-probs depend on the size of the micro-batch: trl#6789, torchtitan#3629.
    _trainer(
        "kernels by micro-batch",
        lambda level: (How(tiles=(0.006, 0.012, 0.03)[level]), How()),
        f"{RANDOM} {PRECISION}",
        "precision quantized?",
    ),
    # Sums over ranks are kept in bfloat16, with more error on more ranks: NeMo-RL#1289, NeMo-RL#1767.
    kind_of(
        "sums over ranks in bfloat16",
        lambda level: Sides(trainer=How(ranks=(4, 16, 64)[level])),
        PRECISION,
        "unexplained precision quantized?",
        TRAINER,
        base="float16",
    ),
)
"""Written before the diagnosis saw one of them, by a reader of reports who had not read it."""
