"""The pool of historical prefixes of a SOUP run (arXiv 2601.21476, 3.2).

A cycle has `refresh` batches. The first is on-policy. Right after it was sampled the engine still has the weights that
sampled it. These are the historical policy, from which the prefixes of all other batches of the cycle are sampled. So
no second copy of weights is needed: a prefix in batch j is j - 1 batches of updates old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trimtab.config import PrefixConfig
from trimtab.errors import TrimtabError
from trimtab.rollout.truncation import Rule, build, prefix_tokens
from trimtab.runs import trajectories
from trimtab.seeds import derive
from trimtab.types import Completion, Engine, Prompt, SamplingParams, Trajectory


@dataclass
class PrefixPool:
    """Prompts of the next batches with prefixes for their responses.

    Under the length rule without `whole` all prefixes of a cycle have the same budget in tokens: ratio x the mean
    length of responses since the last refill (`observe`). No more than that is sampled. Other rules, and `whole`,
    sample whole historical responses and truncate them, as in the paper.
    """

    config: PrefixConfig
    engine: Engine
    sampling: SamplingParams
    samples: int
    seed: int
    cycle: int = 0
    _rule: Rule = field(init=False, repr=False)
    _waiting: list[tuple[Prompt, list[Completion]]] = field(default_factory=list, repr=False)
    _observed: int = 0
    _observed_tokens: int = 0

    def __post_init__(self) -> None:
        self._rule = build(self.config)

    @property
    def batches(self) -> int:
        """Number of batches that `refill` draws prefixes for; 0 if every batch is on-policy."""
        no_prefixes = self.config.rule == "length" and self.config.ratio == 0
        return 0 if no_prefixes else self.config.refresh - 1

    @property
    def starts_cycle(self) -> bool:
        """Whether the next batch starts a cycle, so that it is sampled on-policy without prefixes."""
        return not self._waiting

    def observe(self, lengths: Sequence[int]) -> None:
        """Records the lengths, in tokens, of whole responses; their mean sets the budget of the next refill."""
        self._observed += len(lengths)
        self._observed_tokens += sum(lengths)

    def refill(self, prompts: Sequence[Prompt]) -> int:
        """Samples the prefixes of the next `batches` batches from the engine's current weights.

        Returns the number of sampled tokens.

        Raises:
            TrimtabError: the engine cannot sample these prompts, or the truncation rule fails.
        """
        whole = self._rule.whole
        limit = self.sampling.max_tokens if whole else self._budget()
        seed, count = derive(self.seed, "prefix", self.cycle), self.samples // self.config.share
        drawn = [[Completion.empty()] * count for _ in prompts]
        if limit:
            drawn = self.engine.generate(prompts, count, replace(self.sampling, max_tokens=limit), seed=seed)
        rng = np.random.default_rng(derive(self.seed, "prefix-cut", self.cycle))
        self._waiting = [
            (prompt, [self._rule.prefix(one, rng.random()) if whole else one.truncated(limit) for one in group])
            for prompt, group in zip(prompts, drawn, strict=True)
        ]
        self.cycle += 1
        self._observed = self._observed_tokens = 0
        return sum(len(one.response_ids) for group in drawn for one in group)

    def take(self, count: int) -> tuple[list[Prompt], list[list[Completion]]]:
        """Returns the next `count` prompts, and for each prompt a (possibly empty) prefix for each sample."""
        if count > len(self._waiting):
            raise ValueError(f"{count} prompts asked for, {len(self._waiting)} are waiting")
        entries, self._waiting = self._waiting[:count], self._waiting[count:]
        share = self.config.share
        return [prompt for prompt, _ in entries], [[one for one in group for _ in range(share)] for _, group in entries]

    def meta(self) -> dict[str, int]:
        """Counters for a checkpoint; `waiting` is the number of prompts that `restore` needs."""
        return {
            "cycle": self.cycle,
            "observed": self._observed,
            "observed_tokens": self._observed_tokens,
            "waiting": len(self._waiting),
        }

    def to_bytes(self) -> bytes:
        """The waiting prefixes for a checkpoint, as trajectories without rewards."""
        return trajectories.to_bytes(
            [
                Trajectory(
                    prompt=prompt,
                    group=index,
                    completion=prefix,
                    sampling=self.sampling,
                    loss_mask=np.ones(len(prefix.response_ids), dtype=np.bool_),
                    reward=0.0,
                    rewards={},
                )
                for index, (prompt, group) in enumerate(self._waiting)
                for prefix in group
            ]
        )

    def restore(self, data: bytes, meta: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Restores `to_bytes()` and `meta()`.

        Args:
            prompts: the waiting prompts, from the stream, as files have only a part of each problem.

        Raises:
            TrimtabError: the prefixes belong to other prompts.
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
        """Length in tokens of every prefix of a cycle, if whole responses are not sampled."""
        if self._observed == 0:
            raise ValueError(
                "no response was observed since the last refill: the budget is a share of their mean length"
            )
        return prefix_tokens(self.config.ratio, self._observed_tokens / self._observed)
