"""Dynamic sampling, pending groups and what cannot be used, with scripted completions and real rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.engines import prompt
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_engine import SAMPLING, TASK, TOKENIZER
from tests.support.trajectories import multi_turn

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards
from trimtab.trainer.config import load_config
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.collector import Collector, Group, check_trajectory, oldest
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.responses import GeneratedGroups, ResponseSampler
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.source import SyncSource
from trimtab.types import Completion, EpisodeOutcome, SamplingParams, Trajectory

UPDATES = 5


def right(index: int) -> str:
    return TASK.train[index].answer


def feed(scorer: rewards.Scorer, script: dict[str, list[str | Completion]], **trainer: object) -> SyncSource:
    config = load_config({"trainer": {"prompts": 2, "samples": 2, **trainer}})
    stream = PromptStream(TASK, TOKENIZER, seed=0)
    engine = FakeEngine(script, tokenizer=TOKENIZER)
    engine.update_weights([], UPDATES)
    responses = ResponseSampler(config, stream, SAMPLING)
    collector = Collector(config, responses, scorer)
    return SyncSource(collector, Buffer(config.trainer), engine)


def order(count: int) -> list[int]:
    """Indices of the first problems of the stream."""
    ids = [prompt.problem.id for prompt in PromptStream(TASK, TOKENIZER, seed=0).at(0, count)]
    return [int(name.rpartition("-")[2]) for name in ids]


def script_for(signal: list[bool]) -> dict[str, list[str | Completion]]:
    """Per prompt of the stream: one right and one wrong answer, or two right ones (no signal)."""
    lines: dict[str, list[str | Completion]] = {}
    for index, informative in zip(order(len(signal)), signal, strict=True):
        lines[TASK.train[index].id] = [right(index), "999." if informative else right(index)]
    return lines


def test_groups_come_in_order_and_are_numbered(scorer: rewards.Scorer) -> None:
    source = feed(scorer, script_for([True, False, True, True]))
    first, stats = source.take(UPDATES, batches_left=1)
    second, _ = source.take(UPDATES, batches_left=1)
    assert [trajectory.group for group in first + second for trajectory in group] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [trajectory.reward for trajectory in first[0]] == [1.0, 0.0]
    assert (stats.no_signal, stats.groups) == (1, 2)


def test_groups_without_signal_are_replaced_and_counted(scorer: rewards.Scorer) -> None:
    source = feed(scorer, script_for([False, True, False, True]), dynamic_sampling=True)
    groups, stats = source.take(UPDATES, batches_left=1)
    assert [group[0].group for group in groups] == [1, 3]
    assert (stats.no_signal, stats.groups) == (2, 4)
    assert source.buffer.schedule.drawn == 4


def test_refilling_is_bounded(scorer: rewards.Scorer) -> None:
    source = feed(scorer, script_for([False] * 6 + [True]), dynamic_sampling=True, refill_rounds=3)
    groups, stats = source.take(UPDATES, batches_left=1)
    assert source.buffer.schedule.drawn == 6
    # Nothing but equal rewards: the batch still carries KL and entropy, it is not empty.
    assert [group[0].group for group in groups] == [0, 1]
    assert stats.no_signal == 6


@pytest.mark.parametrize("value", [np.nan, -np.inf, -9999.0])
def test_log_probs_of_no_sampled_token_cost_their_sample_only(scorer: rewards.Scorer, value: float) -> None:
    (index, other) = order(2)
    ids = np.array(TOKENIZER(right(index))["input_ids"], dtype=np.int64)
    broken = Completion(ids, np.array([-1, value, -1, -1], dtype=np.float32), np.zeros(4, np.int64), "stop", "")
    source = feed(scorer, {TASK.train[index].id: [broken, right(index)], TASK.train[other].id: [right(other)]})
    groups, stats = source.take(UPDATES, batches_left=1)
    assert [len(group) for group in groups] == [1, 2]
    assert stats.dropped == 1
    assert "non-finite log-prob" in stats.errors[0]


def conversation(index: int, logp: list[float], version: int) -> Completion:
    """Two sampled tokens, an observation of one token, one sampled token."""
    sampled = np.array([True, True, False, True])
    return Completion(
        np.array(TOKENIZER(right(index))["input_ids"], dtype=np.int64),
        np.array(logp, dtype=np.float32),
        np.where(sampled, version, -1),
        "stop",
        right(index),
        loss_mask=sampled,
    )


def scored(
    scorer: rewards.Scorer, completions: list[list[Completion]], void: str | None = None, **trainer: object
) -> tuple[list[Group], RolloutStats]:
    """The groups of completions of the first prompts of the stream; with `void`, of episodes."""
    source = feed(scorer, {}, **trainer)
    if void is not None:
        sections = {"sampling": {"max_tokens": 4}, "environment": {"name": "swap", "void": void}}
        source.collector.config = load_config({"trainer": trainer, **sections})
    request = source.buffer.schedule.reserve(len(completions), UPDATES)
    prompts = source.collector.stream.at(0, len(completions))
    generated = GeneratedGroups(request, prompts, completions)
    return source.collector.score_groups(generated), generated.stats


def test_observations_are_neither_trained_nor_read(scorer: rewards.Scorer) -> None:
    (index,) = order(1)
    good = conversation(index, [-1, -2, np.nan, -3], 4)
    broken = conversation(index, [-1, -2, -3, np.nan], 4)
    groups, stats = scored(scorer, [[good, broken]])
    (kept,) = groups[0]
    assert kept.loss_mask.tolist() == [True, True, False, True]
    assert not kept.off_policy
    assert oldest(groups[0]) == 4, "the version of an observation is -1"
    assert (stats.dropped, stats.response_tokens) == (1, 6)


def test_truncated_responses_can_be_left_out_of_the_loss(scorer: rewards.Scorer) -> None:
    whole = conversation(order(1)[0], [-1, -2, np.nan, -3], 4)
    (group,), _ = scored(scorer, [[replace(whole, finish_reason="length"), whole]], mask_truncated=True)
    assert [int(one.loss_mask.sum()) for one in group] == [0, 3]
    assert oldest(group) == 4


@pytest.mark.parametrize(("void", "trained"), [("mask", 2), ("keep", 3)])
def test_void_episodes_are_masked_and_failed_ones_dropped(scorer: rewards.Scorer, void: str, trained: int) -> None:
    """Both are counted, and the reward of a void one stays."""
    (prompt,) = PromptStream(TASK, TOKENIZER, seed=0).at(0, 1)
    response = conversation(order(1)[0], [-1, -2, np.nan, -3], UPDATES)
    outcomes = [
        EpisodeOutcome(prompt, calls=2, reward=1.0),
        EpisodeOutcome(prompt, calls=1, tool_errors=1, reward=0.0),
        EpisodeOutcome(prompt, void=True, reward=0.5),
        EpisodeOutcome(prompt, failure="reset raised"),
    ]
    completions = [[replace(response, outcome=outcome) for outcome in outcomes]]
    (group,), stats = scored(scorer, completions, void, samples=4)
    assert [one.reward for one in group] == [1.0, 0.0, 0.5]
    sampled = [True, True, False, True]
    assert [one.loss_mask.tolist() for one in group] == [sampled] * trained + [[False] * 4] * (3 - trained)
    assert stats.episodes == EpisodeCounts(episodes=4, calls=3, tool_errors=1, void=1, failed=1)
    assert (stats.failed_rewards, "reset raised" in stats.errors[0]) == (1, True)


def test_a_batch_whose_calls_all_failed_says_why() -> None:
    (prompt,) = PromptStream(TASK, TOKENIZER, seed=0).at(0, 1)
    failing = EpisodeOutcome(prompt, calls=2, tool_errors=2, reward=0.0, tool_error="AttributeError: no attribute x")
    stats = RolloutStats()
    stats.episodes += EpisodeCounts.of([failing])
    stats.episodes += EpisodeCounts.of([EpisodeOutcome(prompt, reward=0.0)])
    assert stats.messages() == ["all 2 calls of tools failed, the first: AttributeError: no attribute x"]
    stats.episodes += EpisodeCounts.of([EpisodeOutcome(prompt, calls=1, reward=0.0)])
    assert stats.messages() == []


TRUNCATED = SamplingParams(top_p=0.9, top_k=3)
SETS = [[2, 7], [2]]


def trajectory(sampling: SamplingParams, kept: list[list[int]] | None) -> Trajectory:
    ids = np.array([7, 2])
    sets = None if kept is None else tuple(np.array(among) for among in kept)
    completion = Completion(ids, np.float32([-1.0, -0.5]), np.array([0, 0]), "stop", "", sampling_mask=sets)
    return Trajectory(prompt([1], "sum"), 0, completion, sampling, np.array([True, True]), 0.0, {})


@pytest.mark.parametrize(
    ("sampling", "kept", "words"),
    [
        (SamplingParams(temperature=0.8, logprobs="raw"), None, '"raw".*temperature 0.8.*processed'),
        (SamplingParams(top_p=0.9, logprobs="raw"), SETS, '"raw".*top_p 0.9'),
        (SamplingParams(top_k=20, logprobs="raw"), SETS, '"raw".*top_k 20'),
        (SamplingParams(top_p=0.9), None, "top_p 0.9.*no sampling masks.*biased"),
        (SamplingParams(top_k=5, temperature=0.5), None, "top_k 5.*no sampling masks"),
        (SamplingParams(temperature=0.0), None, "greedily"),
        (TRUNCATED, [[2, 7]], "response to 'sum': 1 sampling masks for 2 tokens"),
        (TRUNCATED, [[2, 7], [3, 5]], "response to 'sum', token 1: id 2 is not in its own sampling mask"),
        (TRUNCATED, [[], [2]], "token 0: id 7 is not in its own sampling mask"),
        (TRUNCATED, [[2, 5, 7, 9], [2]], "token 0: 4 ids in its sampling mask under top_k 3"),
    ],
)
def test_refused(sampling: SamplingParams, kept: list[list[int]] | None, words: str) -> None:
    with pytest.raises(TrimtabError, match=words) as caught:
        check_trajectory(trajectory(sampling, kept))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), None),
        (SamplingParams(logprobs="raw"), None),  # both distributions are one at temperature 1 without truncation
        (SamplingParams(temperature=0.7), None),
        (TRUNCATED, SETS),
        (SamplingParams(top_p=0.9), [[2, 5, 7, 9], [0, 2]]),
    ],
)
def test_accepted(sampling: SamplingParams, kept: list[list[int]] | None) -> None:
    check_trajectory(trajectory(sampling, kept))


def test_the_sampling_mask_of_an_observation_is_its_token() -> None:
    one = multi_turn(0, "a..b")
    ids = one.completion.response_ids
    kept = tuple(np.array([id_] if not sampled else [id_, 5]) for id_, sampled in zip(ids, one.loss_mask, strict=True))
    sampled = replace(one, sampling=SamplingParams(top_k=2), completion=replace(one.completion, sampling_mask=kept))
    check_trajectory(sampled)
    missing = replace(sampled, completion=replace(sampled.completion, sampling_mask=kept[:1] + kept[3:]))
    with pytest.raises(TrimtabError, match="2 sampling masks for 4 tokens"):
        check_trajectory(missing)
