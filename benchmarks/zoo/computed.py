"""Data sets of computed faults: responses that are drawn, with the log-probs of sampler, trainer and right model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from zoo.bases import FOLDER, read
from zoo.decoder import END, START, VOCABULARY, Context, Decoder, decoder, padded
from zoo.sides import SAMPLER, TRAINER, Kind, Sides
from zoo.streams import Stream, prompt_ids

SHORTEST, LONGEST, GROUP, PACKED = 24, 120, 8, 5
RARE, IMAGE = 60, 4
"""The first id that is rare, and the position of an image in a prompt."""
BASES: Mapping[str, dict[str, float]] = {
    "bfloat16": {"rounding": 2.0**-9},
    "float16": {"rounding": 2.0**-12},
    "float32": {},
    "rough": {"rounding": 2.0**-7.5},
    "heavy": {"rounding": 2.0**-9, "spread": 1.2},
}
"""Noise of both sides, as fields of `How`."""
FILE = FOLDER / "computed" / "smollm2.parquet"
COLUMNS = ("ids", "behavior", "trainer", "rescored")
OFTEN = ("bfloat16", "bfloat16", "rough", "heavy", "float32")


@dataclass(frozen=True, eq=False)
class DataSet:
    """One data set. stream: its tokens, with `rescored`, the log-probs of the right model in float32.

    prompts: ids of the prompt of each response. sides: of the last step. noise: k3 of the base alone.
    """

    kind: Kind
    level: int
    tokens: int
    base: str
    stream: Stream
    prompts: Sequence[np.ndarray]
    sides: Sides
    noise: float

    @property
    def wrong(self) -> str:
        """The side at fault."""
        same = replace(self.sides.sampler, rounding=0.0) == self.sides.right
        return self.kind.wrong or (TRAINER if same or self.base == "smollm2" else SAMPLER)


def compute(kind: Kind, level: int, tokens: int, seed: int = 0) -> DataSet:
    """Draws and scores responses of at least `tokens` tokens; the same for the same arguments."""
    random = np.random.default_rng([seed, level, tokens, *kind.name.encode()])
    base = kind.base or OFTEN[int(random.integers(len(OFTEN)))]
    steps = kind.steps if tokens >= 5_000 or kind.steps == 1 else max(4, kind.steps // 2)
    if kind.steps == 1 and tokens >= 5_000 and random.random() < 0.5:
        steps = 4
    model = decoder((seed + level) % 3)
    responses = round(2 * tokens / (SHORTEST + LONGEST) / steps)
    group = min(GROUP, max(2, responses // 2))
    groups = max(2, round(responses / group))
    parts, prompts, sides = [], [], Sides()
    for step in range(steps):
        sides = on_base(kind.sides(level, step), base)
        own = [np.append(START, random.integers(1, VOCABULARY, int(random.integers(8, 48)))) for _ in range(groups)]
        batches = [(own, replace(sides, cached=None))]
        if sides.cached is not None and step:  # half of the prompts are those of the first step
            old = prompts[: group * (groups // 2) : group]
            batches = [(old, sides), (own[len(old) :], replace(sides, cached=None))]
        if sides.some is not None:
            count, other = round(sides.some[0] * groups) or 1, sides.some[1]
            batches = [(own[:count], other), (own[count:], sides)]
        for these, how in batches:
            asked = [prompt for prompt in these for _ in range(group)]
            if asked:
                lengths = random.integers(SHORTEST, LONGEST + 1, len(asked))
                parts.append(_step(model, how, asked, lengths, random))
                prompts += asked
    lengths = np.concatenate([part["lengths"] for part in parts])
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    if sides.change is not None:
        columns["behavior"], columns["trainer"] = sides.change(columns["behavior"], columns["trainer"], random)
    step = np.repeat(np.arange(steps), groups * group)
    number = {prompt.tobytes(): count for count, prompt in enumerate(prompts)}
    reward = (random.random(len(prompts)) < 0.5).astype(float)
    rows = {
        "step": step,
        "prompt": np.array([number[prompt.tobytes()] for prompt in prompts]),
        "prompt_length": np.array([len(prompt) for prompt in prompts]),
        "group": np.arange(len(prompts)) // group,
        "reward": reward,
        "advantage": (reward.reshape(-1, group) - reward.reshape(-1, group).mean(1, keepdims=True)).ravel(),
    }
    if sides.lag is not None:
        rows["proximal_version"] = step + (sides.lag or 0)
        columns["version"] = np.repeat(step, lengths)
    stream = Stream(np.append(0, np.cumsum(lengths)), columns, rows)
    return DataSet(kind, level, tokens, base, stream, prompts, sides, noise(base))


@cache
def scored() -> Stream | None:
    """Text of SmolLM2 in bfloat16, with the log-probs of trainers with one thing changed, by kind; None without it."""
    return read(FILE) if FILE.exists() else None


def measured(kind: Kind) -> DataSet | None:
    """The data set of a kind in SmolLM2, or None."""
    stream = scored()
    if stream is None or kind.name not in stream.tokens:
        return None
    columns = {"ids": stream["ids"], "behavior": stream["behavior"], "rescored": stream["trainer"]}
    count = np.arange(stream.responses)
    rows = {
        **stream.rows,
        "step": 0 * count,
        "group": stream.rows["prompt"],
        "reward": 0.0 * count,
        "advantage": 0.0 * count,
    }
    lengths = zip(rows["prompt"], rows["prompt_length"], strict=True)
    prompts = [np.array(prompt_ids(*item)) for item in lengths]
    changed = Stream(stream.starts, {**columns, "trainer": stream[kind.name]}, rows)
    return DataSet(kind, 1, len(stream), "smollm2", changed, prompts, kind.sides(1, 0), stream.k3)


def on_base(sides: Sides, base: str) -> Sides:
    """Both sides with the rounding errors of a base; the right model has its sharpness only."""
    more = BASES[base]
    exact = {name: value for name, value in more.items() if name != "rounding"}
    cached, later = (None if how is None else replace(how, **more) for how in (sides.cached, sides.later))
    some = None if sides.some is None else (sides.some[0], on_base(sides.some[1], base))
    return replace(
        sides,
        sampler=replace(sides.sampler, **more),
        trainer=replace(sides.trainer, **more),
        right=replace(sides.right, **exact),
        cached=cached,
        later=later,
        some=some,
    )


def _step(
    model: Decoder, sides: Sides, prompts: Sequence[np.ndarray], lengths: np.ndarray, random: np.random.Generator
) -> dict[str, np.ndarray]:
    sampling, training = (torch.Generator().manual_seed(int(random.integers(2**31))) for _ in range(2))
    held = [with_foreign(prompt, sides.foreign) for prompt in prompts]
    if sides.forgotten or sides.rewritten or sides.between:
        return _turns(model, sides, held, lengths, sampling, training, random)
    ids, processed, raw = model.sample(
        sides.sampler,
        held,
        int(lengths.max()),
        sampling,
        process=sides.process,
        prompt_how=sides.cached,
        later=sides.later,
    )
    responses = [row[:length] for row, length in zip(ids.numpy(), lengths, strict=True)]
    reported = lists(raw if sides.raw else processed, lengths)
    for row in np.flatnonzero(random.random(len(responses)) < sides.ended) if sides.ended else ():
        responses[row] = np.append(responses[row][:-1], END)
        if sides.end_logp is not None:
            reported[row] = np.append(reported[row][:-1], sides.end_logp)
    if sides.reported is not None:
        reported = sides.reported(reported, random)
    seen = prompts if sides.prompts is None else [sides.prompts(prompt) for prompt in prompts]
    after = int(lengths.max())
    if sides.place in ("pack", "state", "zigzag"):
        trainer = packed(model, sides, seen, responses, training, random)
    else:
        others = responses if not sides.encoded else [encoded(row, sides.encoded, random) for row in responses]
        context = laid_out(padded(seen, others), after, seen, sides, lengths)
        trainer = flat(model.score(sides.trainer, context, training)[:, -after:], lengths)
    right = model.score(sides.right, padded(prompts, responses), training)[:, -after:]
    return {
        "lengths": lengths,
        "ids": np.concatenate(responses),
        "behavior": np.concatenate(reported).astype(float),
        "trainer": trainer,
        "rescored": flat(right, lengths),
    }


def lists(table: torch.Tensor, lengths: np.ndarray) -> list[np.ndarray]:
    """The first values of each row."""
    return [row[:n] for row, n in zip(table.numpy(), lengths, strict=True)]


def flat(table: torch.Tensor, lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(lists(table, lengths)).astype(float)


def _turns(
    model: Decoder,
    sides: Sides,
    prompts: Sequence[np.ndarray],
    lengths: np.ndarray,
    sampling: torch.Generator,
    training: torch.Generator,
    random: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Responses of two turns: to the sampler's second one, the first one is cut or has other tokens, or more."""
    turns = (lengths // 2, lengths - lengths // 2)
    asked, answers, behavior, rescored = list(prompts), [], [], []
    for turn in turns:
        after = int(turn.max())
        ids, logps, _ = model.sample(sides.sampler, asked, after, sampling)
        answers.append(lists(ids, turn))
        behavior.append(lists(logps, turn))
        right = model.score(sides.right, padded(asked, answers[-1]), training)[:, -after:]
        rescored.append(lists(right, turn))
        kept = [answer[int(sides.forgotten * len(answer)) :] for answer in answers[-1]]
        if sides.rewritten:
            kept = [encoded(answer, sides.rewritten, random) for answer in kept]
        asked = [np.concatenate([*parts, 5 + np.arange(sides.between)]) for parts in zip(asked, kept, strict=True)]
    joined = lambda parts: [np.concatenate(pair) for pair in zip(*parts, strict=True)]  # noqa: E731
    responses, after = joined(answers), int(lengths.max())
    trainer = model.score(sides.trainer, padded(prompts, responses), training)[:, -after:]
    return {
        "lengths": lengths,
        "ids": np.concatenate(responses),
        "behavior": np.concatenate(joined(behavior)).astype(float),
        "trainer": flat(trainer, lengths),
        "rescored": np.concatenate(joined(rescored)).astype(float),
    }


def encoded(response: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    """Returns a response in which a rare token and the one behind it are two frequent ones, for a share of them."""
    other = response.copy()
    for place in np.flatnonzero((response[:-1] >= RARE) & (random.random(len(response) - 1) < share)):
        other[place : place + 2] = 1 + response[place] % 12, 1 + response[place + 1] % 12
    return other


def with_foreign(prompt: np.ndarray, count: int) -> np.ndarray:
    """Returns a prompt with other first ids; its last one stays."""
    count = min(count, len(prompt) - 1)
    return np.append(prompt[::-1][:count], prompt[count:])


def laid_out(context: Context, after: int, prompts: Sequence[np.ndarray], sides: Sides, lengths: np.ndarray) -> Context:
    """The batch as a trainer with a fault has it.

    gap: positions of the response continue behind those of the padded prompt, for `strength` of it. pads: padding is
    attended to, with `strength` added to its scores. grid: the `strength` tokens of an image in the prompt have one
    position. slices: labels are shifted within the slices of `strength` ranks, two for each. order: linear attention
    reads these slices rank by rank. holes: one of `strength` ids is taken for padding. future: tokens attend to
    later ones, with `strength` added to their scores.
    """
    before = context.ids.shape[1] - after
    missing = before - torch.tensor([len(prompt) for prompt in prompts])
    if sides.place == "gap":
        positions = context.positions.float()
        positions[:, before:] += sides.strength * missing[:, None]
        return replace(context, positions=positions)
    if sides.place == "grid":
        sizes = torch.tensor([min(int(sides.strength), len(prompt) - IMAGE - 1) for prompt in prompts])[:, None]
        behind = context.positions - (sizes - 1)
        return replace(
            context, positions=torch.where(context.positions < IMAGE, context.positions, behind.clamp_min(IMAGE))
        )
    if sides.place == "slices":
        labels = context.ids.clone()
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            begin, ranks = before - len(prompt), int(sides.strength)
            starts = begin + np.arange(2 * ranks) * (len(prompt) + int(length)) // (2 * ranks)
            for rank in range(ranks - 1):
                labels[row, starts[rank + 1]] = context.ids[row, starts[2 * ranks - 1 - rank]]
                labels[row, starts[2 * ranks - 1 - rank]] = START
        return replace(context, labels=labels)
    if sides.place == "order":
        order = torch.arange(context.ids.shape[1]).expand_as(context.ids).clone()
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            parts = np.array_split(before - len(prompt) + np.arange(len(prompt) + length), 2 * int(sides.strength))
            read = [part for rank in range(len(parts) // 2) for part in (parts[rank], parts[-1 - rank])]
            order[row, np.concatenate(read)] = torch.from_numpy(np.concatenate(parts))
        return replace(context, order=order)
    if sides.place == "holes":
        padding = (context.ids % int(sides.strength) == END)[:, None, None]
        own = torch.eye(context.ids.shape[1], dtype=torch.bool)
        return replace(context, allowed=context.allowed & (~padding | own))
    if sides.place == "future":
        places = torch.arange(context.ids.shape[1])
        real = (places >= missing[:, None]) & (places < before + torch.from_numpy(lengths)[:, None])
        later = torch.triu(torch.ones_like(context.allowed), 1) * sides.strength
        return replace(context, allowed=real[:, None, None].expand_as(context.allowed), bias=later)
    if sides.place == "pads":
        places = torch.arange(context.ids.shape[1])
        pads = (places < missing[:, None])[:, None, None]
        allowed = (places[:, None] >= places)[None, None].expand(len(prompts), 1, -1, -1)
        return replace(context, allowed=allowed, bias=sides.strength * pads.expand_as(allowed).float())
    return context


def packed(
    model: Decoder,
    sides: Sides,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    training: torch.Generator,
    random: np.random.Generator,
) -> np.ndarray:
    """Log-probs of a trainer that packs `PACKED` sequences into a row and attends across their borders.

    Positions begin anew; scores across a border are lower by `strength`. state: only the state of linear attention
    crosses a border. zigzag: log-probs of a row, whose slices lie on `strength` ranks, are put together in an order
    that is not theirs.
    """
    order = random.permutation(len(prompts))
    scores: list[np.ndarray] = [np.zeros(0)] * len(prompts)
    for first in range(0, len(order), PACKED):
        members = order[first : first + PACKED]
        parts = [np.concatenate([prompts[row], responses[row]]) for row in members]
        sizes = [len(part) for part in parts]
        ids = torch.from_numpy(np.concatenate(parts))[None]
        own = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(sizes))
        positions = torch.cat([torch.arange(size) for size in sizes])[None]
        places = torch.arange(len(own))
        bias = (sides.strength if sides.place == "pack" else -1e9) * (own[:, None] != own)[None, None].float()
        context = Context(ids, positions, (places[:, None] >= places)[None, None], bias)
        found = model.score(sides.trainer, context, training)[0].numpy()
        if sides.place == "zigzag":
            slices = np.array_split(found, 2 * int(sides.strength))
            found = np.concatenate([*slices[::2], *slices[1::2][::-1]])
        for row, end in zip(members, np.cumsum(sizes), strict=True):
            scores[row] = found[end - 1 - len(responses[row]) : end - 1]
    return np.concatenate(scores).astype(float)


@cache
def noise(base: str) -> float:
    """k3 of a base without a fault."""
    if base == "float32":
        return 1e-9
    sides, random = on_base(Sides(), base), np.random.default_rng(5)
    prompts = [np.append(START, random.integers(1, VOCABULARY, 20)) for _ in range(64)]
    part = _step(decoder(0), sides, prompts, np.full(64, 60), random)
    return Stream(np.array([0, 64 * 60]), part).k3
