"""Demonstrations (external traces) that join sampled groups (LUFFY, arXiv 2504.14945): gold answers or rows of a file.

A demonstration is encoded as the tokens that an engine would have returned for its text, including the ending. It
differs from the sampled members of its group only in having no behavior policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.config import GOLD, Config
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.responses import Generate, GeneratedGroups, ResponseSampler
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.schedule import GroupRequest
from trimtab.trainer.tasks.data_sets import read_rows
from trimtab.types import EXTERNAL_VERSION, Completion, Problem, Prompt, SamplingParams


@dataclass
class DemonstratedSampler(ResponseSampler):
    """Replaces some of the sampled responses to a prompt by demonstrations."""

    texts: Callable[[Problem], Sequence[str]]  # returns the demonstrations of a problem
    context: int | None  # number of positions of the model; None for no limit

    @classmethod
    def load(
        cls, config: Config, stream: PromptStream, sampling: SamplingParams, context: int | None
    ) -> DemonstratedSampler:
        """Loads `demonstrations.path`: the task's gold answers, or the rows (prompt, response) of a file.

        A row's prompt is the id of a problem or its question; several rows may have the same prompt.
        """
        assert config.demonstrations is not None
        path, task, tokenizer = config.demonstrations.path, stream.task, stream.tokenizer
        if not sampling.stop and tokenizer.eos_token_id is None:
            raise TrimtabError(
                f"[demonstrations]: task {task.name!r} has no stop string and the tokenizer no end token: give the "
                "task a stop"
            )
        if path == GOLD:

            def gold(problem: Problem) -> Sequence[str]:
                return (task.gold(problem),) if problem.answer else ()

            return cls(config, stream, sampling, gold, context)
        rows = _read(Path(path), _endings(tokenizer, sampling))

        def texts(problem: Problem) -> Sequence[str]:
            return rows.get(problem.id) or rows.get(problem.question.strip()) or ()

        if not any(texts(problem) for problem in task.train):
            raise TrimtabError(
                f"{path}: no prompt is the id or the question of a training problem of task {task.name!r}, "
                f"such as {task.train[0].question[:60]!r}"
            )
        return cls(config, stream, sampling, texts, context)

    def respond(self, request: GroupRequest, generate: Generate) -> GeneratedGroups:
        """Groups have `trainer.samples` members: prompts without demonstrations get more samples."""
        assert self.config.demonstrations is not None
        samples, per_group = self.config.trainer.samples, self.config.demonstrations.per_group
        prompts, problems = self.prompts(request), len(self.stream.task.train)
        stats = RolloutStats()
        traces = [
            self.take(prompt, per_group, number // problems, stats)
            for number, prompt in zip(request.numbers, prompts, strict=True)
        ]
        stats.traces = sum(map(len, traces))
        if not stats.traces:
            stats.errors.append(
                f"no external trace joined: {stats.traces_dropped} were too long, "
                f"{stats.traces_missing} of {len(prompts)} prompts have none"
            )
        max_sampled = samples - min(map(len, traces))
        sampled = generate(prompts, max_sampled, self.sampling, seed=self.seed(request))
        completions = [one[: samples - len(joined)] + joined for one, joined in zip(sampled, traces, strict=True)]
        return GeneratedGroups(request, prompts, completions, stats)

    def take(self, prompt: Prompt, count: int, epoch: int, stats: RolloutStats) -> list[Completion]:
        """Returns up to `count` demonstrations of a prompt that are short enough.

        Counts demonstrations that are too long, and prompts without any, in `stats`. `epoch` selects the demonstration
        that comes first. Equal arguments give equal results.
        """
        texts = self.texts(prompt.problem)
        stats.traces_missing += not texts
        room = self.sampling.max_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt.ids))
        traces: list[Completion] = []
        for offset in range(len(texts)):
            if len(traces) == count:
                break
            text = texts[(epoch * count + offset) % len(texts)]
            trace = encode_demonstration(text, self.stream.tokenizer, self.sampling)
            if len(trace.response_ids) <= room:
                traces.append(trace)
            else:
                stats.traces_dropped += 1
        return traces


def encode_demonstration(text: str, tokenizer: Any, sampling: SamplingParams) -> Completion:
    """Encodes a text as the response an engine would have returned: up to and including its first ending.

    A text without an ending gets the task's first stop string, or else the end token. There is no behavior policy:
    `logp_behavior` is NaN and `policy_version` is `EXTERNAL_VERSION`.
    """
    rule = StopChecker(tokenizer, () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,), sampling)
    text = text[: _end(text, _endings(tokenizer, sampling))]
    ids = _encode(text, tokenizer)
    if not ids or not rule.ended([ids])[0]:
        ids = _encode(text + sampling.stop[0], tokenizer) if sampling.stop else [*ids, tokenizer.eos_token_id]
    return Completion(
        response_ids=np.asarray(ids, dtype=np.int64),
        logp_behavior=np.full(len(ids), np.nan, dtype=np.float32),
        policy_version=np.full(len(ids), EXTERNAL_VERSION, dtype=np.int64),
        finish_reason="stop",
        text=rule.text(ids),
    )


def _encode(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _endings(tokenizer: Any, sampling: SamplingParams) -> tuple[str, ...]:
    """Returns the strings that end a response: the stop strings and the text of the end token."""
    return (*sampling.stop, *(() if tokenizer.eos_token is None else (tokenizer.eos_token,)))


def _end(text: str, endings: Sequence[str]) -> int:
    """Returns the position after the first ending of a text; its length if it has none."""
    return min((text.find(ending) + len(ending) for ending in endings if ending in text), default=len(text))


def _read(path: Path, endings: Sequence[str]) -> dict[str, list[str]]:
    """Returns the responses to each prompt, in the order of the file."""
    responses: dict[str, list[str]] = {}
    for number, row in read_rows(path):
        location = f"{path}, row {number}"
        prompt, response = _text(row, "prompt", location), _text(row, "response", location)
        rest = response[_end(response, endings) :].strip()
        if rest:
            raise TrimtabError(
                f"{location}: {rest[:30]!r} follows what ends a sampled response ({' or '.join(map(repr, endings))}): "
                "remove it, or give the task another stop"
            )
        responses.setdefault(prompt.strip(), []).append(response)
    if not responses:
        raise TrimtabError(f"{path}: no rows; give a file with at least one prompt and response")
    return responses


def _text(row: Mapping[str, Any], column: str, location: str) -> str:
    if column not in row:
        raise TrimtabError(f"{location}: no column {column!r}{did_you_mean(column, row)}")
    if not isinstance(row[column], str) or not row[column].strip():
        raise TrimtabError(f"{location}: column {column!r} has no text; fill it in or remove the row")
    return row[column]
