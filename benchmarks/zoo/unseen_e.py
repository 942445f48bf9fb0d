"""Kinds that were written without a look at the diagnosis, each from public reports of users: half E.

The diagnosis may not be changed for one of them; a comment names the reports of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.decoder import END, How, Process
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
    Sides,
    aging_kind,
    kind_of,
    settings,
)


def _divided(level: int) -> Sides:
    """The sampler's log-probs, of logits as they are, are divided by the temperature."""
    temperature = (0.9, 0.7, 0.5)[level]
    right = How(gain=1 / temperature)
    divided = lambda b, p, _random: (b / temperature, p)  # noqa: E731
    return Sides(How(), right, right, settings(temperature=temperature), raw=True, change=divided)


def _without_end(length: int) -> Process:
    """The end token is not sampled before prompt and response have `length` tokens."""

    def process(z: Tensor, seen: Tensor) -> Tensor:
        z = z.clone()
        z[seen.sum(1) < length, END] = -torch.inf
        return z

    return process


def _woken(level: int, step: int) -> Sides:
    """In some steps, the sampler has the weights with which it was started."""
    new = How(ages=(step,) * 3, drift=(0.003, 0.006, 0.012)[level])
    return Sides(How() if step % (3, 2, 2)[level] == 1 else new, new, new)


def _renamed(level: int, step: int) -> Sides:
    """After the first step, some experts are loaded in place of others."""
    right = How(experts=True, expert_scale=(0.1, 0.25, 0.6)[level])
    order = ((0, 1, 3, 2), (1, 0, 3, 2), (1, 2, 3, 0))[level] if step else (0, 1, 2, 3)
    return Sides(How(experts=True, expert_scale=right.expert_scale, experts_as=order), right, right)


def _unbiased(level: int) -> Sides:
    return Sides((right := How(experts=True, choice_bias=(0.1, 0.5, 1.5)[level])), How(experts=True), right)


def _windows(level: int) -> Sides:
    right = How(window=(110, 90, 60)[level], windowed=(0,))
    return Sides(right, How(window=right.window, windowed=(1,)), right)


def _low_frequencies(level: int) -> Sides:
    return Sides((right := How(slow=(12.0, 16.0, 32.0)[level])), How(slow=8.0), right)


def _cap_first(level: int) -> Sides:
    right = How(cap=30.0, gain=(0.8, 0.6, 0.4)[level], formula="within")
    return Sides(right, How(cap=30.0, gain=right.gain), right)


def _merged(level: int, step: int) -> Sides:
    """The adapter is added to weights of 4 bits, which are rounded again; the trainer keeps it beside them."""
    adapter = (0.004, 0.01, 0.025)[level] * step
    right = How(bits="int4", adapter=adapter, beside=True)
    return Sides(How(bits="int4", adapter=adapter), right, right)


def _half_precision(level: int) -> Sides:
    """The trainer has float32, the sampler float16 or bfloat16."""
    return Sides(How(rounding=(2.0**-12, 2.0**-9, 2.0**-8)[level], coarse=("", "weights", "weights logits")[level]))


def _adapter_dropout(level: int, step: int) -> Sides:
    right = How(adapter=(0.008, 0.02, 0.04)[level] * (1 + step))
    return Sides(right, How(adapter=right.adapter, adapter_dropout=(0.1, 0.1, 0.2)[level]), right)


UNSEEN_E = (
    # Log-probs are divided by the temperature, not logits: prime-rl#697.
    kind_of(
        "log-probs divided by the temperature", _divided, SAMPLING, "unexplained raw-logprobs temperature?", SAMPLER
    ),
    # The end token is banned until a response has a minimum length: trl#235, trl#1003, vllm#46243.
    kind_of(
        "no end token before a minimum length",
        lambda level: Sides((how := How(ending=6.0)), how, how, _without_end((64, 96, 999)[level])),
        f"{ENDS} {SAMPLING}",
        "unexplained truncated-sampling?",
        SAMPLER,
    ),
    # An engine that is woken has its first weights again until the next update: trl#5312, trl#5313.
    aging_kind("first weights after a pause", _woken, WEIGHTS, "undelivered? stale? unexplained", 8),
    # Weights of experts arrive under the names of others: SkyRL#1816, vllm#25171; see SkyRL#1680.
    aging_kind(
        "experts under other names", _renamed, f"{WEIGHTS} {ROUTING}", "routing undelivered? stale? unexplained", 4
    ),
    # The bias of the router takes no part in the choice of experts: transformers#41663, transformers#42546.
    kind_of("experts chosen without their bias", _unbiased, f"{ROUTING} {CONFIG}", "unexplained routing", TRAINER),
    # The template of one side ends with the beginning of the reasoning: ms-swift#9168, trl#6510.
    kind_of(
        "end of the prompt missing",
        lambda level: Sides(prompts=lambda prompt: prompt[: -(1, 2, 4)[level]]),
        PROMPT,
        "unexplained misaligned? retokenized?",
        TRAINER,
    ),
    # A response is decoded and encoded again before the next turn: trl#5224, NeMo-RL#1337, agentcore-rl-toolkit#119.
    kind_of(
        "earlier turn encoded again",
        lambda level: Sides(rewritten=(0.02, 0.1, 0.4)[level]),
        PROMPT,
        "unexplained misaligned? retokenized?",
        TRAINER,
    ),
    # The first of several log-probs of a place is taken for that of the sampled token: NeMo-RL#3297, trl#3867.
    kind_of(
        "log-prob of the most probable token",
        lambda level: Sides(some=((0.1, 0.4, 1.0)[level], Sides(How(top=True)))),
        f"{PAIRS} {VALUES}",
        "unexplained wrong-token misaligned?",
        SAMPLER,
    ),
    # The mask is made of ids, and the padding id is one of the text: trl#4970, trl#6357, open-unlearning#128.
    kind_of(
        "padding id within the text",
        lambda level: Sides(place="holes", strength=(192, 64, 16)[level]),
        LAYOUT,
        "unexplained",
        TRAINER,
    ),
    # Linear attention reads the slices of all ranks in another order than they have: miles#885, prime-rl#2080.
    kind_of(
        "slices in zigzag order for linear attention",
        lambda level: Sides(
            (right := How(decay=(0.6, 0.8, 0.9)[level], skip=0.5)), right, right, place="order", strength=2
        ),
        LAYOUT,
        "unexplained",
        TRAINER,
    ),
    # Layers with a window and those without one are exchanged: Megatron-Bridge#4875; see vllm#21927.
    kind_of("window on the other layers", _windows, CONFIG, "unexplained quantized?", TRAINER),
    # The scale of low rotary frequencies is not read: Megatron-LM#6305, ms-swift#6056.
    kind_of("default scale of low frequencies", _low_frequencies, CONFIG, "unexplained quantized?", TRAINER),
    # The soft cap comes before the scale of the logits, not behind it: trl#5691.
    kind_of("soft cap before the scale", _cap_first, f"{LAST} {CONFIG}", "unexplained temperature?", TRAINER),
    # An adapter is merged into weights of 4 bits: trl#3466, peft#2321, peft#1043.
    aging_kind(
        "adapter merged into 4 bits", _merged, f"{QUANTIZED} {WEIGHTS}", "quantized? undelivered? stale? unexplained", 8
    ),
    # The trainer's weights are float32, those of the engine are not: trl#6774, trl#5416, trl#2669.
    kind_of(
        "half precision on one side",
        _half_precision,
        PRECISION,
        "unexplained precision none quantized?",
        SAMPLER,
        base="float32",
        intended=True,
    ),
    # Dropout of the adapter is left on: trl#3234, unsloth-zoo#832, LlamaFactory#10779.
    kind_of(
        "dropout of the adapter",
        _adapter_dropout,
        RANDOM,
        "unexplained precision? quantized? undelivered?",
        TRAINER,
        steps=8,
    ),
)
"""Written before the diagnosis saw one of them, by a reader of reports who had not read it."""
