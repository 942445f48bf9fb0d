"""The pool of historical prefixes of a SOUP run (arXiv 2601.21476, 3.2).

A cycle has `refresh` batches. The first is on-policy. Right after it was sampled the sampler still holds the weights
that wrote it; these are the historical policy, and with them the prefixes of all other batches of the cycle are drawn.
So nothing is kept twice: a prefix in batch j is j - 1 batches of updates old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trimtab.config import PrefixConfig
from trimtab.errors import TrimtabError
from trimtab.rollout.truncation import Rule, build, portion
from trimtab.runs import trajectories
from trimtab.seeds import derive
from trimtab.types import EMPTY, Completion, Engine, Prompt, Sampling, Trajectory, cut


def check(config: PrefixConfig, samples: int) -> Rule:
    """The truncation rule of a recipe. `TrimtabError` where there is none, or `share` does not divide `samples`."""
    if samples % config.share:
        raise TrimtabError(
            f"prefix.share = {config.share} does not divide {samples} samples per prompt: choose a divisor"
        )
    return build(config.rule, ratio=config.ratio, top=config.top, whole=config.whole)


@dataclass
class PrefixPool:
    """Prompts of the batches to come, each with the prefixes of its responses.

    Under the length rule without whole responses all prefixes of a cycle have the same budget, ratio x the mean length
    of the responses seen since the last refill (`observe`), and no more than that is ever sampled. Other rules, and
    `whole`, sample whole historical responses and cut them, as the paper did.
    """

    config: PrefixConfig
    engine: Engine
    sampling: Sampling
    samples: int
    seed: int
    cycle: int = 0
    _rule: Rule = field(init=False, repr=False)
    _waiting: list[tuple[Prompt, list[Completion]]] = field(default_factory=list, repr=False)
    _observed: int = 0
    _observed_tokens: int = 0

    def __post_init__(self) -> None:
        self._rule = check(self.config, self.samples)

    @property
    def batches(self) -> int:
        """How many batches ahead `refill` draws prefixes for; 0 where every batch is on-policy."""
        never = self.config.rule == "length" and self.config.ratio == 0
        return 0 if never else self.config.refresh - 1

    @property
    def due(self) -> bool:
        """Whether the next batch starts a cycle: it is on-policy, and its responses are sampled whole."""
        return not self._waiting

    def observe(self, lengths: Sequence[int]) -> None:
        """Note the lengths, in tokens, of whole responses; their mean decides the budget of the next refill."""
        self._observed += len(lengths)
        self._observed_tokens += sum(lengths)

    def refill(self, prompts: Sequence[Prompt]) -> int:
        """Draw the prefixes of the next `batches` batches from the weights the engine holds now.

        Returns how many tokens were sampled for that.

        Raises:
            TrimtabError: the engine cannot sample these prompts, or the truncation rule fails.
        """
        whole = self._rule.whole
        limit = self.sampling.max_tokens if whole else self._budget()
        seed, count = derive(self.seed, "prefix", self.cycle), self.samples // self.config.share
        drawn = [[EMPTY] * count for _ in prompts]
        if limit:
            drawn = self.engine.generate(prompts, count, replace(self.sampling, max_tokens=limit), seed=seed)
        rng = np.random.default_rng(derive(self.seed, "prefix-cut", self.cycle))
        self._waiting = [
            (prompt, [self._rule.prefix(one, rng.random()) if whole else cut(one, limit) for one in group])
            for prompt, group in zip(prompts, drawn, strict=True)
        ]
        self.cycle += 1
        self._observed = self._observed_tokens = 0
        return sum(len(one.response_ids) for group in drawn for one in group)

    def take(self, count: int) -> tuple[list[Prompt], list[list[Completion]]]:
        """The next `count` prompts, and for each a prefix, possibly empty, for each of its samples."""
        if count > len(self._waiting):
            raise ValueError(f"{count} prompts asked for, {len(self._waiting)} are waiting")
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        share = self.config.share
        return [prompt for prompt, _ in taken], [[one for one in group for _ in range(share)] for _, group in taken]

    def meta(self) -> dict[str, int]:
        """Counters, for a checkpoint; `waiting` is the number of prompts that `restore` needs again."""
        return {
            "cycle": self.cycle,
            "observed": self._observed,
            "observed_tokens": self._observed_tokens,
            "waiting": len(self._waiting),
        }

    def to_bytes(self) -> bytes:
        """The waiting prefixes, for a checkpoint, as trajectories that were never scored."""
        return trajectories.to_bytes(
            [
                Trajectory(
                    prompt=prompt,
                    group=place,
                    completion=prefix,
                    sampling=self.sampling,
                    loss_mask=np.ones(len(prefix.response_ids), dtype=np.bool_),
                    reward=0.0,
                    rewards={},
                )
                for place, (prompt, group) in enumerate(self._waiting)
                for prefix in group
            ]
        )

    def restore(self, data: bytes, meta: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """The inverse of `to_bytes` and `meta`.

        Args:
            prompts: those that were waiting, from the stream, as files hold only part of a problem.

        Raises:
            TrimtabError: these are not the prompts the prefixes were drawn for.
        """
        groups: list[list[Completion]] = [[] for _ in prompts]
        for row in trajectories.from_bytes(data):
            if row.group >= len(prompts) or not np.array_equal(prompts[row.group].ids, row.prompt.ids):
                raise TrimtabError(
                    f"the checkpoint holds a prefix for {row.prompt.problem.id!r}, which the task does not ask now: "
                    "resume with the task the run was started with"
                )
            groups[row.group].append(row.completion)
        self._waiting = list(zip(prompts, groups, strict=True))
        self.cycle, self._observed, self._observed_tokens = meta["cycle"], meta["observed"], meta["observed_tokens"]

    def _budget(self) -> int:
        """Tokens of every prefix of a cycle, where prefixes are not cut from whole responses."""
        if self._observed == 0:
            raise ValueError(
                "no response was observed since the last refill: the budget is a share of their mean length"
            )
        return portion(self.config.ratio, self._observed_tokens / self._observed)
