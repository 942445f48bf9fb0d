"""A kind of computed fault: what sampler and trainer do at a strength, and what a diagnosis may say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from zoo.decoder import How, Process

CONFIG, LAYOUT, LAST, PROMPT, RANDOM = "model-config", "batch-layout", "last-layer", "prompt", "randomness"
SAMPLING, WEIGHTS, PRECISION, QUANTIZED, ROUTING = "settings", "weights", "rounding", "quantized", "routing"
VALUES, NONE, PAIRS, ENDS = "values", "none", "pairs", "ends"
SAMPLER, TRAINER, NEITHER = "sampler", "trainer", "neither"
VERSIONED = ("jsonl", "trimtab", "miles")

RIGHT = How()
Prompts = Callable[[np.ndarray], np.ndarray]
Change = Callable[[np.ndarray, np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]
Lists = Sequence[np.ndarray]
Reported = Callable[[Lists, np.random.Generator], Lists]


@dataclass(frozen=True)
class Sides:
    """How sampler and trainer compute in one step, and how both should.

    process: settings of the sampler; settings: those that a file can state. raw: whether the log-probs before them
    are reported. cached: how the sampler's keys and values of the prompt were computed. place: how the trainer lays
    out sequences (`gap`, `pads`, `pack`, `state`, `grid`, `slices`, `zigzag`, `holes`, `order`, `future`, or empty), by
    `strength`. prompts: what the trainer makes of a prompt. later: the sampler in the second half of responses.
    foreign: number of first ids of a prompt whose keys and values the sampler has from another one. some: share of
    the prompts, and what holds for them instead. change: of the two columns (tokens,), after all. lag: updates by
    which the sampler is behind, None where no versions are written. reported: of the sampler's lists of log-probs,
    one for each response. ended: share of responses whose last token the data hold as `END`; end_logp: its log-prob,
    None for that of the token it replaced. encoded: share of rare tokens that the trainer has as others. forgotten:
    share of the first half of a response that the sampler no longer sees in the second one; rewritten: share of its
    rare tokens that it sees as others; between: ids that it sees between the halves.
    """

    sampler: How = RIGHT
    trainer: How = RIGHT
    right: How = RIGHT
    process: Process | None = None
    settings: dict[str, float] = field(default_factory=dict)
    raw: bool = False
    cached: How | None = None
    later: How | None = None
    foreign: int = 0
    some: tuple[float, Sides] | None = None
    place: str = ""
    strength: float = 0.0
    prompts: Prompts | None = None
    change: Change | None = None
    reported: Reported | None = None
    ended: float = 0.0
    end_logp: float | None = None
    encoded: float = 0.0
    forgotten: float = 0.0
    rewritten: float = 0.0
    between: int = 0
    lag: int | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    sides: what differs at a strength (0 to 2) in a step. families: candidates of the diagnosis of which one should
    be among the first (`values`: what it can prove only). accepted: first causes that count as right; possible:
    those that do with a confidence below 0.7. wrong: the side at fault, empty where it changes with the strength.
    detector: whether the diagnosis can prove it. intended: whether it may be said that nothing has to be repaired.
    steps: of data sets with 5,000 tokens and more. layouts: file formats; empty for all. base: of the noise, empty
    for several. recipe: states the quantization of the sampler.
    """

    name: str
    sides: Callable[[int, int], Sides]
    families: frozenset[str]
    accepted: frozenset[str]
    possible: frozenset[str]
    wrong: str
    detector: bool = False
    intended: bool = False
    steps: int = 1
    layouts: tuple[str, ...] = ()
    base: str = ""
    recipe: str = ""

    @property
    def healthy(self) -> bool:
        return NONE in self.families


def kind_of(name: str, sides: Callable[..., Sides], families: str, accepted: str, wrong: str, **more: object) -> Kind:
    takes_step = sides.__code__.co_argcount == 2
    both = sides if takes_step else (lambda level, _step: sides(level))
    first = {cause.rstrip("?"): cause.endswith("?") for cause in accepted.split()}
    sure, possible = (frozenset(cause for cause, doubt in first.items() if doubt == one) for one in (False, True))
    return Kind(name, both, frozenset(families.split()), sure, possible, wrong, **more)  # type: ignore[arg-type]


def model_kind(
    name: str, changed: Sequence[dict[str, object]], accepted: str = "", families: str = CONFIG, *, wrong: str = ""
) -> Kind:
    """Another function on one side, given as fields of `How` by strength; the sampler's at the second one."""

    def sides(level: int) -> Sides:
        other = How(**changed[level])  # type: ignore[arg-type]
        return Sides(sampler=other) if level == 1 and not wrong else Sides(trainer=other)

    return kind_of(name, sides, families, "unexplained " + accepted, wrong)


def aging_kind(
    name: str, sides: Callable[..., Sides], families: str, accepted: str, steps: int, **more: object
) -> Kind:
    """A fault of the sampler that changes from step to step."""
    return kind_of(name, sides, families, accepted, SAMPLER, steps=steps, **more)


# Settings of the sampler, in vLLM's order.


def settings(
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    banned: int = 0,
    grammar: int = 0,
) -> Process:
    """Returns what a sampler does to logits. grammar: divides the ids that are allowed at every fourth place."""

    def process(z: Tensor, seen: Tensor) -> Tensor:
        z, there = z.clone(), seen > 0
        z = torch.where(there, torch.where(z > 0, z / repetition, z * repetition), z) - presence * there
        if banned:
            z[:, 1 : 1 + banned] = -torch.inf
        if grammar:
            other = torch.arange(z.shape[1]) % grammar > 0
            z = z.masked_fill((seen.sum(1, keepdim=True) % 4 == 0) & other, -torch.inf)
        z = z / temperature
        if top_k:
            z = z.masked_fill(z < z.topk(top_k).values[:, -1:], -torch.inf)
        if min_p:
            z = z.masked_fill(z < z.amax(-1, keepdim=True) + np.log(min_p), -torch.inf)
        if top_p < 1:
            ordered, order = z.sort(-1, descending=True)
            mass = torch.softmax(ordered, -1).cumsum(-1)
            cut = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1) >= top_p
            z = z.masked_fill(cut.gather(1, order.argsort(-1)), -torch.inf)
        return z

    return process
