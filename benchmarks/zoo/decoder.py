"""A small decoder, of which one thing can be changed: two layers, rotary positions, gated layers, a tied output matrix.

Weights are random, logits are peaked as those of language models are. Sampling and scoring share one forward pass, in
float32 on one core; a response of 80 tokens takes about a millisecond in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

VOCABULARY, WIDTH, HEADS, LAYERS, RANK, EXPERTS = 384, 64, 4, 2, 8, 4
HEAD, BATCH = WIDTH // HEADS, 32
SLOW = 0.05
"""Rotary frequencies below it are low."""
FLOOR = 40
"""Tokens after which attention scores grow."""
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}
START = 0
"""The id with which every prompt begins."""
END = 2
"""The id that ends a response."""
MATRICES = ("q", "k", "v", "o", "up", "gate", "down")

Process = Callable[[Tensor, Tensor], Tensor]
"""Changes logits (batch, vocabulary); the second argument counts each id in the context (batch, vocabulary)."""


@dataclass(frozen=True)
class How:
    """How one side computes; the defaults are those of the right model without rounding.

    theta, stretch: base of the rotary angles; positions are divided by `stretch`. attention: factor on the attention
    scores of each layer. window: number of last tokens that are attended to, 0 for all. cap, formula: soft cap of the
    logits, 0 for none; tanh, `wrong`, z * tanh(z / cap) where z > 0, or `within`, tanh of logits that have their gain.
    gain: factor on logits. epsilon: of the norms. offset: added to the gain of the last norm. adapter: size of a
    low-rank update; adapter_scale: factor on it; adapter_rank: of its columns, those that are used. ages: updates
    applied to the output matrix and each layer, of size `drift`. untied: noise of an output matrix of its own. padded:
    ids beyond the vocabulary that take part in the softmax. dropout: of attention. sink: score of a position without
    content that attention sees as well, 0 for none. bits: of weights, int8, fp8, int4 or empty. cache_bits_from:
    position from which keys and values are of 8 bits, -1 for none; cache_top: the largest that fit, 0 for all. inputs:
    bits of what layers read. rounding: relative error of activations; 2**-9 for bfloat16, 2**-12 for float16. spread:
    how much the sharpness of the logits varies with the context. experts: whether the last layer is a mixture;
    router_noise: of its scores. coarse: what is in bfloat16 of `weights frequencies angles logits log-probs`.
    score_cap: soft cap of attention scores, 0 for none. turned: pairs of each head that are rotated. long_from,
    long_stretch: number of tokens from which positions are divided by `long_stretch`, 0 for none. two_way: first tokens
    that attend to one another in both directions. decay: of the state of the first layer, which is linear attention
    where this is above 0; skip: factor on its values beside the state. expert_scale: factor on the answer of experts;
    expert_bias: size of a bias of each, in proportion to its probability where `weighted`. repeated: first position
    whose experts are taken and the one after the last that has them. one_shard: matrices whose second half of heads is
    the first half again. unadapted: those without the adapter. one_scale: groups of quantized matrices that have the
    largest scale among them. ranks: over which sums of matrices are split, rounded to bfloat16, 1 for none. tiles:
    relative error of weights that each batch has for itself. slices: of the vocabulary, each with a softmax of its own
    in what the sampler reports. ahead: number of tokens by which logits are behind the ids whose log-probs are taken.
    windowed: layers that have the window. slow: divides low rotary frequencies. adapter_dropout: of what the adapter
    reads; beside: whether it is added to quantized weights. experts_as: the experts that answer in place of each.
    choice_bias: size of a bias that takes part in the choice of experts only. top: whether the sampler reports the
    log-prob of its most probable token. ending: added to the logit of `END`. coarse may also have `router` (scores of
    experts), `squares` (means in norms), `norms` (their results) and `residual` (sums of layers). output_age: updates
    of the output matrix, -1 for those of the embedding. swapped: share of columns that gate and up have exchanged.
    crossed: whether up has the adapter of gate. growth: of attention scores with the logarithm of each `FLOOR` tokens.
    activations: of layers, silu, gelu or quick. skew: size of a bias of the output matrix. bare: matrices that are
    not quantized. hidden_dropout: of what layers add. router_offset: in all scores of experts. forced: first place of
    a response at which ids from 3 on are forced, and the one after the last.
    """

    theta: float = 10_000.0
    stretch: float = 1.0
    attention: tuple[float, float] = (1.0, 1.0)
    window: int = 0
    cap: float = 0.0
    formula: str = "tanh"
    gain: float = 1.0
    epsilon: float = 1e-6
    offset: float = 0.0
    adapter: float = 0.0
    adapter_scale: float = 1.0
    adapter_rank: int = RANK
    ages: tuple[int, ...] = (0, 0, 0)
    drift: float = 0.01
    untied: float = 0.0
    padded: int = 0
    dropout: float = 0.0
    sink: float = 0.0
    bits: str = ""
    cache_bits_from: int = -1
    cache_top: float = 0.0
    inputs: str = ""
    rounding: float = 0.0
    spread: float = 0.3
    experts: bool = False
    router_noise: float = 0.0
    coarse: str = ""
    score_cap: float = 0.0
    turned: int = HEAD // 2
    long_from: int = 0
    long_stretch: float = 1.0
    two_way: int = 0
    decay: float = 0.0
    skip: float = 0.0
    expert_scale: float = 0.8
    expert_bias: float = 0.0
    weighted: bool = True
    repeated: tuple[int, int] = (0, 0)
    one_shard: str = ""
    unadapted: str = ""
    one_scale: tuple[str, ...] = ()
    ranks: int = 1
    tiles: float = 0.0
    slices: int = 1
    ahead: int = 0
    windowed: tuple[int, ...] = tuple(range(LAYERS))
    slow: float = 1.0
    adapter_dropout: float = 0.0
    beside: bool = False
    experts_as: tuple[int, ...] = tuple(range(EXPERTS))
    choice_bias: float = 0.0
    top: bool = False
    ending: float = 0.0
    output_age: int = -1
    swapped: float = 0.0
    crossed: bool = False
    growth: float = 0.0
    activations: tuple[str, ...] = ("silu",) * LAYERS
    skew: float = 0.0
    bare: str = ""
    hidden_dropout: float = 0.0
    router_offset: float = 0.0
    forced: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Context:
    """Left-padded sequences and what they attend to.

    ids, positions: (batch, length). allowed: (batch, 1, length, length). bias: added to attention scores, or None.
    labels: the ids (batch, length) whose log-probs are taken in place of `ids`, or None. order: when the first layer
    reads each place (batch, length), if it is linear attention; None for left to right.
    """

    ids: Tensor
    positions: Tensor
    allowed: Tensor
    bias: Tensor | None = None
    labels: Tensor | None = None
    order: Tensor | None = None

    def batches(self) -> Iterator[Context]:
        """Batches that fit a processor's cache."""
        for first in range(0, len(self.ids), BATCH):
            rows = slice(first, first + BATCH)
            more = (None if part is None else part[rows] for part in (self.bias, self.labels, self.order))
            yield Context(self.ids[rows], self.positions[rows], self.allowed[rows], *more)


class Decoder:
    """A model of one seed. `random` of each call makes its rounding errors and dropout."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(1000 + seed)
        shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {
            "up": (WIDTH, 2 * WIDTH), "gate": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)
        }  # fmt: skip
        scale = {"o": 0.6, "down": 0.7}
        self.plain = {"head": self._normal(VOCABULARY, WIDTH) / WIDTH**0.5}
        for layer in range(LAYERS):
            for name, shape in shapes.items():
                self.plain[f"{name}{layer}"] = scale.get(name, 1.0) * self._normal(*shape) / shape[0] ** 0.5
        self.updates = {
            name: torch.stack([self._low_rank(w.shape, w.std()) for _ in range(32)]) for name, w in self.plain.items()
        }
        self.lora = {
            name: (self._normal(w.shape[0], RANK), self._normal(RANK, w.shape[1]) * float(w.std()) / RANK**0.5)
            for name, w in self.plain.items()
            if name != "head"
        }
        self.untied = self._normal(VOCABULARY, WIDTH) / WIDTH**0.5
        self.router = self._normal(WIDTH, EXPERTS)
        self.mixture = [self._normal(2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5 for _ in range(EXPERTS)]
        self.pads = self._normal(512, WIDTH) * 0.8 / WIDTH**0.5
        self.sharp = self._normal(WIDTH) / WIDTH**0.5
        self.bias = -0.55 * torch.log(1.0 + torch.arange(VOCABULARY))
        self.expert_bias = self._normal(WIDTH, EXPERTS)
        self.skew = self._normal(VOCABULARY)
        self.loaded = cache(self._loaded)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def _low_rank(self, shape: Sequence[int], size: Tensor) -> Tensor:
        """One update of an optimizer: of rank 4, with entries as large as those of the matrix."""
        return self._normal(shape[0], 4) @ self._normal(4, shape[1]) * (float(size) / 2)

    def _loaded(self, how: How) -> dict[str, Tensor]:
        """The weights as a side holds them: after its updates, with its adapter, quantized."""
        weights = {}
        for name, plain in self.plain.items():
            part = 0 if name == "head" else 1 + int(name[-1])
            weight = plain + how.drift * self.updates[name][: how.ages[part]].sum(0)
            if how.adapter and name in self.lora and name[:-1] not in how.unadapted.split():
                weight = weight + self._adapter(name.replace("up", "gate") if how.crossed else name, how)
            if name in how.one_shard.split():
                weight = weight[:, : WIDTH // 2].repeat(1, 2)
            weights[name] = weight
        for layer in range(LAYERS if how.swapped else 0):
            up, gate, count = weights[f"up{layer}"], weights[f"gate{layer}"], round(how.swapped * 2 * WIDTH)
            weights[f"up{layer}"] = torch.cat([gate[:, :count], up[:, count:]], 1)
            weights[f"gate{layer}"] = torch.cat([up[:, :count], gate[:, count:]], 1)
        weights["output"] = weights["head"] + how.untied * self.untied
        if how.output_age >= 0:
            weights["output"] = self.plain["head"] + how.drift * self.updates["head"][: how.output_age].sum(0)
        if how.bits:
            tops = {name: weight.abs().max() for name, weight in weights.items()}
            apart = {name: self._adapter(name, how) for name in self.lora} if how.beside else {}
            bare = {name: weight - apart.get(name, 0.0) for name, weight in weights.items()}
            for name in bare.keys() - {f"{name}{layer}" for name in how.bare.split() for layer in range(LAYERS)}:
                bare[name] = quantized(bare[name], how.bits)
            weights = {name: weight + apart.get(name, 0.0) for name, weight in bare.items()}
            for layer in range(LAYERS):
                for group in how.one_scale:
                    names = [f"{name}{layer}" for name in group.split()]
                    for name in names:
                        weights[name] = weights[name] * max(tops[other] for other in names) / tops[name]
        return {name: as_stored(weight, "weights", how) for name, weight in weights.items()}

    def _adapter(self, name: str, how: How) -> Tensor:
        a, b = self.lora[name]
        return how.adapter * how.adapter_scale * (a[:, : how.adapter_rank] @ b[: how.adapter_rank])

    def forward(
        self,
        how: How,
        context: Context,
        random: torch.Generator,
        cache: list[tuple[Tensor, Tensor]] | None = None,
        start: int = 0,
        end: int = 0,
    ) -> Tensor:
        """Returns the logits of positions `start` to `end` (0: the last); writes keys and values into `cache`."""
        w = self.loaded(how)
        if how.tiles:
            w = {name: x * (1 + how.tiles * (2 * torch.rand(x.shape, generator=random) - 1)) for name, x in w.items()}
        end = end or context.ids.shape[1]
        positions = context.positions[:, start:end]
        allowed, bias = context.allowed[:, :, start:end, :end], context.bias
        near = context.positions[:, None, None, :end] > positions[:, None, :, None] - how.window
        if how.two_way:
            first = (context.positions[:, :end] > 0) & (context.positions[:, :end] <= how.two_way)
            allowed = allowed | (first[:, None, start:end, None] & first[:, None, None])
        stretch = how.stretch
        if how.long_from and int(context.positions[:, :end].max()) >= how.long_from:
            stretch = how.long_stretch
        size = 2 * how.turned
        frequencies = as_stored(how.theta ** (-torch.arange(0, size, 2) / size), "frequencies", how)
        frequencies = torch.where(frequencies < SLOW, frequencies / how.slow, frequencies)
        frequencies = torch.nn.functional.pad(frequencies, (0, HEAD // 2 - how.turned))
        angles = as_stored(positions[..., None] / stretch * frequencies, "angles", how)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def rounded(x: Tensor) -> Tensor:
            if not how.rounding:
                return x
            return x * (1 + how.rounding * (2 * torch.rand(x.shape, generator=random) - 1))

        def normed(x: Tensor) -> Tensor:
            mean = as_stored((x * x).mean(-1, keepdim=True), "squares", how)
            return as_stored(x * torch.rsqrt(mean + how.epsilon), "norms", how)

        def read(x: Tensor) -> Tensor:
            y = normed(x)
            return quantized(y, how.inputs) if how.inputs else y

        def projected(x: Tensor, name: str) -> Tensor:
            weight, more = w[name], torch.zeros(())
            if how.adapter_dropout:
                kept = torch.rand(x.shape, generator=random) >= how.adapter_dropout
                more = (x * kept / (1 - how.adapter_dropout) - x) @ self._adapter(name, how)
            if how.ranks == 1 or name[:-1] not in ("o", "down"):
                return x @ weight + more
            parts = [a @ b for a, b in zip(x.chunk(how.ranks, -1), weight.chunk(how.ranks), strict=True)]
            total = parts[0].bfloat16()
            for part in parts[1:]:
                total = total + part.bfloat16()
            return total.float() + more

        def dropped(x: Tensor, share: float) -> Tensor:
            return x * (torch.rand(x.shape, generator=random) >= share) / (1 - share) if share else x

        x = w["head"][context.ids[:, start:end]]
        for layer in range(LAYERS):
            y = read(x)
            q, k, v = (projected(y, f"{name}{layer}").unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for name in "qkv")
            q, k = rotated(q, turn), rotated(k, turn)
            if how.cache_bits_from >= 0:
                late = (torch.arange(start, end) >= how.cache_bits_from)[:, None]
                top = how.cache_top or torch.inf
                k, v = (torch.where(late, quantized(part.clamp(-top, top), "fp8"), part) for part in (k, v))
            if cache is not None:
                cache[layer][0][:, :, start:end], cache[layer][1][:, :, start:end] = k, v
                k, v = cache[layer][0][:, :, :end], cache[layer][1][:, :, :end]
            scores = (q * (how.attention[layer] / HEAD**0.5)) @ k.transpose(-1, -2)
            if how.growth:
                scores = scores * (1 + how.growth * torch.log1p(positions // FLOOR))[:, None, :, None]
            seen = allowed & near if how.window and layer in how.windowed else allowed
            if how.score_cap:
                scores = how.score_cap * torch.tanh(scores / how.score_cap)
            if how.decay and layer == 0:
                distance = torch.arange(start, end)[:, None] - torch.arange(end)
                if context.order is not None:
                    distance = (context.order[:, :, None] - context.order[:, None])[:, None]
                    seen = (distance >= 0) & seen.any(2, keepdim=True)
                share = (scores * (1 - how.decay) * how.decay ** distance.clamp_min(0)).masked_fill(~seen, 0.0)
                share = share + how.skip * (distance == 0)
            else:
                if bias is not None:
                    scores = scores + bias[:, :, start:end, :end]
                scores = scores.masked_fill(~seen, -1e9)
                share = dropped(torch.softmax(scores, -1), how.dropout)
            if how.sink:
                share = share * torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - how.sink)
            mixed = (share @ v).transpose(1, 2).flatten(2)
            mixed = dropped(projected(mixed, f"o{layer}"), how.hidden_dropout)
            x = as_stored(rounded(x + mixed), "residual", how)
            y = read(x)
            inner = ACTIVATIONS[how.activations[layer]](projected(y, f"gate{layer}")) * projected(y, f"up{layer}")
            out = projected(inner, f"down{layer}")
            if how.experts and layer == LAYERS - 1:
                route = as_stored(y @ self.router + how.router_offset, "router", how)
                route = route + how.router_noise * torch.randn(route.shape, generator=random)
                chosen = (route + how.choice_bias * torch.linspace(-1, 1, EXPERTS)).argmax(-1)
                begin, stop = how.repeated
                if stop:
                    same = chosen.gather(1, (positions == begin).int().argmax(1, keepdim=True))
                    chosen = torch.where((positions >= begin) & (positions < stop), same, chosen)
                one = torch.nn.functional.one_hot(chosen, EXPERTS).to(x)
                every = torch.stack([inner @ self.mixture[number] for number in how.experts_as], -1)
                if how.expert_bias:
                    share = torch.softmax(route, -1)[:, :, None] if how.weighted else 1.0
                    every = every + how.expert_bias * share * self.expert_bias
                out = out + how.expert_scale * (every * one[:, :, None]).sum(-1)
            x = as_stored(rounded(x + dropped(out, how.hidden_dropout)), "residual", how)
        h = rounded(normed(x) * (1 + how.offset * torch.tanh(self.sharp * WIDTH**0.5)))
        sharpness = torch.exp(how.spread * torch.tanh(0.9 * h @ self.sharp) + 2.0)[..., None]
        z = sharpness * (h @ w["output"].T) + self.bias + how.skew * self.skew
        z[..., END] += how.ending
        if how.padded:
            pads = sharpness * (h @ self.pads[: how.padded].T) + self.bias[-1]
            z = torch.cat([z, pads], -1)
        gain = how.gain
        if how.formula == "within":
            z, gain = gain * z, 1.0
        if how.cap:
            soft = torch.tanh(z / how.cap)
            z = torch.where(z > 0, z, how.cap) * soft if how.formula == "wrong" else how.cap * soft
        return as_stored(gain * z, "logits", how)

    @torch.inference_mode()
    def score(self, how: How, context: Context, random: torch.Generator) -> Tensor:
        """Log-probs (batch, length - 1) of all ids but the first, given all before."""
        found = []
        for part in context.batches():
            z = self.forward(how, part, random)[:, :-1]
            labels = part.ids if part.labels is None else part.labels
            logps = torch.log_softmax(z.roll(how.ahead, 1) if how.ahead else z, -1)
            logps = logps.gather(-1, labels[:, 1:, None])[..., 0]
            found.append(as_stored(logps, "log-probs", how))
        return torch.cat(found)

    @torch.inference_mode()
    def sample(
        self,
        how: How,
        prompts: Sequence[np.ndarray],
        longest: int,
        random: torch.Generator,
        *,
        process: Process | None = None,
        prompt_how: How | None = None,
        later: How | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws `longest` tokens after each prompt: ids, log-probs they were drawn from, those before `process`.

        prompt_how: how the keys and values of the prompts were computed, but for their last token.
        later: how the second half is drawn.
        """
        context = padded(prompts, [np.zeros(longest, np.int64)] * len(prompts))
        count, total = context.ids.shape
        start = total - longest
        room = (count, HEADS, total, HEAD)
        kv = [(torch.zeros(room), torch.zeros(room)) for _ in range(LAYERS)]
        seen = torch.zeros(count, VOCABULARY)
        real = context.allowed[:, 0, start - 1, :start].float()
        seen.scatter_add_(1, context.ids[:, :start], real)
        self.forward(prompt_how or how, context, random, kv, 0, start - 1)
        logps, raw = torch.zeros(count, longest), torch.zeros(count, longest)
        for step in range(longest):
            part = later if later is not None and 2 * step >= longest else how
            z = self.forward(part, context, random, kv, start + step - 1, start + step)[:, 0]
            plain = torch.log_softmax(z, -1)
            drawn = plain if process is None else torch.log_softmax(process(z[:, :VOCABULARY], seen), -1)
            if part.forced[0] <= step < part.forced[1]:
                drawn = torch.full_like(plain, -torch.inf)
                drawn[:, 3 + step - part.forced[0]] = 0.0
            noise = -torch.log(-torch.log(torch.rand(drawn[:, :VOCABULARY].shape, generator=random)))
            chosen = (drawn[:, :VOCABULARY] + noise).argmax(-1, keepdim=True)
            logps[:, step], raw[:, step] = drawn.gather(1, chosen)[:, 0], plain.gather(1, chosen)[:, 0]
            if part.top:
                logps[:, step] = drawn.amax(-1)
            if part.slices > 1:
                masses = torch.logsumexp(drawn.unflatten(1, (part.slices, -1)), -1)
                logps[:, step] -= masses.gather(1, chosen * part.slices // VOCABULARY)[:, 0]
            context.ids[:, start + step] = chosen[:, 0]
            seen.scatter_add_(1, chosen, torch.ones(count, 1))
        return context.ids[:, start:].clone(), logps, raw


@cache
def decoder(seed: int) -> Decoder:
    return Decoder(seed)


def as_stored(x: Tensor, name: str, how: How) -> Tensor:
    """Returns a value as its side computes it."""
    return x.bfloat16().float() if name in how.coarse else x


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (HEAD // 2, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def quantized(x: Tensor, bits: str) -> Tensor:
    """Rounds to 8 or 4 bits with one scale for each row of the last dimension."""
    top = x.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    if bits == "fp8":
        return (x / top * 448).to(torch.float8_e4m3fn).float() * top / 448
    steps = {"int8": 127, "int4": 7}[bits]
    return (x / top * steps).round() * top / steps


def padded(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Context:
    """Prompts padded on the left and responses on the right, as one batch."""
    before, after = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(prompts), before + after, dtype=torch.int64)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, before - len(prompt) : before] = torch.from_numpy(prompt)
        ids[row, before : before + len(response)] = torch.from_numpy(response)
    places = torch.arange(before + after)
    positions = (places - (before - lengths)[:, None]).clamp_min(0)
    allowed = places[None, :, None] >= places[None, None, :]
    allowed = allowed & (places >= (before - lengths)[:, None])[:, None]
    return Context(ids, positions, allowed[:, None])
