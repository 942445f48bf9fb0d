"""Responses with prefixes from an older policy (SOUP, arXiv 2601.21476, 3.2), and the rules that cut the prefixes.

A cycle has `refresh` batches. The first batch is on-policy. Its policy is the historical policy of the cycle: right
after the first batch, while the engine still has these weights, the prefixes of all other batches are sampled. So no
second copy of weights is needed, and a prefix in batch j is j - 1 batches of updates old.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.runs import trajectories
from trimtab.trainer.config import PrefixConfig
from trimtab.trainer.rollout.responses import Generate, GeneratedGroups, ResponseSampler
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.schedule import GroupRequest
from trimtab.trainer.seeds import derive
from trimtab.types import Completion, FloatArray, Prompt, Trajectory

PREFIXES = "prefixes.parquet"


@dataclass
class PrefixedSampler(ResponseSampler):
    """Samples continuations of prefixes of the historical policy, in all batches of a cycle except the first.

    Under the length rule without `whole`, all prefixes of a cycle have the same budget in tokens: ratio x the mean
    length of responses since the last refill (`observe`). Only that many tokens are sampled. Other rules, and `whole`,
    sample whole historical responses and cut them, as in the paper.
    """

    cycle: int = 0
    _waiting: list[tuple[Prompt, list[Completion]]] = field(default_factory=list, repr=False)
    _observed: int = 0
    _observed_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.config.prefix is not None
        self._section = self.config.prefix

    @property
    def batches(self) -> int:
        """Number of batches that `refill` draws prefixes for; 0 if every batch is on-policy."""
        no_prefixes = self._section.rule == "length" and self._section.ratio == 0
        return 0 if no_prefixes else self._section.refresh - 1

    @property
    def starts_cycle(self) -> bool:
        """Whether the next batch starts a cycle, so that it is sampled on-policy without prefixes."""
        return not self._waiting

    def respond(self, request: GroupRequest, generate: Generate) -> GeneratedGroups:
        starts_cycle, prefixes, stats = self.starts_cycle, None, RolloutStats()
        if starts_cycle:
            prompts = self.prompts(request)
        else:
            prompts, prefixes = self.take(request.count)
            stats.response_tokens -= sum(len(prefix.response_ids) for group in prefixes for prefix in group)
        samples = self.config.trainer.samples
        completions = generate(prompts, samples, self.sampling, seed=self.seed(request), prefixes=prefixes)
        self.observe([len(completion.response_ids) for responses in completions for completion in responses])
        # The current weights are the historical policy of the next batches: no second copy of weights is needed.
        if starts_cycle and self.batches:
            later = self.stream.at(request.first + request.count, request.count * self.batches)
            stats.response_tokens += self.refill(later, generate)
        return GeneratedGroups(request, prompts, completions, stats)

    def observe(self, lengths: Sequence[int]) -> None:
        """Records the lengths, in tokens, of whole responses; their mean sets the budget of the next refill."""
        self._observed += len(lengths)
        self._observed_tokens += sum(lengths)

    def refill(self, prompts: Sequence[Prompt], generate: Generate) -> int:
        """Samples the prefixes of the next `batches` batches; returns the number of sampled tokens."""
        whole = self._section.whole or self._section.rule == "entropy"
        limit = self.sampling.max_tokens if whole else self._budget()
        seed, count = self.config.seed, self.config.trainer.samples // self._section.share
        drawn = [[Completion.empty()] * count for _ in prompts]
        if limit:
            shortened = replace(self.sampling, max_tokens=limit)
            drawn = generate(prompts, count, shortened, seed=derive(seed, "prefix", self.cycle))
        rng = np.random.default_rng(derive(seed, "prefix-cut", self.cycle))
        self._waiting = [
            (prompt, [cut(self._section, item, rng.random()) if whole else item.truncated(limit) for item in group])
            for prompt, group in zip(prompts, drawn, strict=True)
        ]
        self.cycle += 1
        self._observed = self._observed_tokens = 0
        return sum(len(response.response_ids) for group in drawn for response in group)

    def take(self, count: int) -> tuple[list[Prompt], list[list[Completion]]]:
        """Returns the next `count` prompts, and for each prompt a (possibly empty) prefix for each sample."""
        if count > len(self._waiting):
            raise ValueError(f"{count} prompts asked for, {len(self._waiting)} are waiting")
        entries, self._waiting = self._waiting[:count], self._waiting[count:]
        share = self._section.share
        return [prompt for prompt, _ in entries], [[one for one in group for _ in range(share)] for _, group in entries]

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Returns the state for a checkpoint. Waiting prefixes are stored as trajectories without rewards."""
        rows = [
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
        meta = {
            "cycle": self.cycle,
            "observed": self._observed,
            "observed_tokens": self._observed_tokens,
            "waiting": len(self._waiting),
        }
        return {"prefixes": meta}, {PREFIXES: trajectories.to_bytes(rows)}

    def restore(self, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Restores `state()`. Raises `TrimtabError` if the prefixes belong to other prompts than the stream has."""
        saved = meta["prefixes"]
        # From the stream, after the groups that were drawn: the files have only a part of each problem.
        prompts = self.stream.at(meta["drawn"], saved["waiting"])
        groups: list[list[Completion]] = [[] for _ in prompts]
        for row in trajectories.from_bytes(files[PREFIXES]):
            if row.group >= len(prompts) or not np.array_equal(prompts[row.group].ids, row.prompt.ids):
                raise TrimtabError(
                    f"the checkpoint holds a prefix for {row.prompt.problem.id!r}, which the task does not ask now: "
                    "resume with the task the run was started with"
                )
            groups[row.group].append(row.completion)
        self._waiting = list(zip(prompts, groups, strict=True))
        self.cycle, self._observed, self._observed_tokens = saved["cycle"], saved["observed"], saved["observed_tokens"]

    def _budget(self) -> int:
        """Returns the length in tokens of every prefix of a cycle, if whole responses are not sampled."""
        if self._observed == 0:
            raise ValueError(
                "no response was observed since the last refill: the budget is a share of their mean length"
            )
        return prefix_tokens(self._section.ratio, self._observed_tokens / self._observed)


def cut(config: PrefixConfig, response: Completion, uniform: float) -> Completion:
    """Returns the prefix that the recipe's rule cuts from a whole response; `uniform` is random, in [0, 1)."""
    if config.rule == "length":
        return response.truncated(prefix_tokens(config.ratio, len(response.response_ids)))
    return response.truncated(before_high_entropy(response.entropy, uniform, config.top))


def prefix_tokens(ratio: float, length: float) -> int:
    """Returns floor(ratio * length), tolerant of products that are whole except for rounding (0.29 * 100)."""
    return math.floor(ratio * length + 1e-9)


def before_high_entropy(entropy: FloatArray | None, uniform: float, top: int) -> int:
    """Returns a random position among the `top` positions of highest entropy: the number of tokens before it.

    The token at that position is sampled again. Uses all positions if the response has fewer than `top`. Ties go to
    earlier positions.
    """
    if entropy is None:
        raise TrimtabError('prefix rule "entropy" needs entropies, which this engine does not report; use "length"')
    highest = np.argsort(-entropy, kind="stable")[:top]
    return int(highest[int(uniform * len(highest))]) if len(highest) else 0
