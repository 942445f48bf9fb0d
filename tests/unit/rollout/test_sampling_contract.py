"""Data whose ratios would be biased is refused, with the reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.engines import prompt
from tests.support.trajectories import multi_turn

from trimtab.errors import TrimtabError
from trimtab.rollout.sampling_contract import check, check_trajectory
from trimtab.types import Completion, SamplingParams, Trajectory


@pytest.mark.parametrize(
    ("sampling", "kept", "words"),
    [
        (SamplingParams(temperature=0.8, logprobs="raw"), False, ['"raw"', "temperature 0.8", "processed"]),
        (SamplingParams(top_p=0.9, logprobs="raw"), True, ['"raw"', "top_p 0.9"]),
        (SamplingParams(top_k=20, logprobs="raw"), True, ['"raw"', "top_k 20"]),
        (SamplingParams(top_p=0.9), False, ["sampling masks", "top_p 0.9", "biased"]),
        (SamplingParams(top_k=5, temperature=0.5), False, ["sampling masks", "top_k 5"]),
        (SamplingParams(temperature=0.0), False, ["greedily"]),
    ],
)
def test_refused(sampling: SamplingParams, kept: bool, words: list[str]) -> None:
    with pytest.raises(TrimtabError) as caught:
        check(sampling, kept=kept)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), False),
        (SamplingParams(logprobs="raw"), False),  # both distributions are one at temperature 1 without truncation
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(top_p=0.9, top_k=5), True),
    ],
)
def test_accepted(sampling: SamplingParams, kept: bool) -> None:
    check(sampling, kept=kept)


TRUNCATED = SamplingParams(top_p=0.9, top_k=3)


def truncated(kept: list[list[int]] | None, sampling: SamplingParams = TRUNCATED) -> Trajectory:
    ids = np.array([7, 2])
    sets = None if kept is None else tuple(np.array(among) for among in kept)
    completion = Completion(ids, np.float32([-1.0, -0.5]), np.array([0, 0]), "stop", "", sampling_mask=sets)
    return Trajectory(prompt([1], "sum"), 0, completion, sampling, np.array([True, True]), 0.0, {})


def test_a_trajectory_with_its_own_keep_sets_is_accepted() -> None:
    check_trajectory(truncated([[2, 7], [2]]))
    check_trajectory(truncated([[2, 5, 7, 9], [0, 2]], SamplingParams(top_p=0.9)))
    check_trajectory(truncated(None, SamplingParams()))


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (None, "carry no sampling masks"),
        ([[2, 7]], "response to 'sum': 1 sampling masks for 2 tokens"),
        ([[2, 7], [3, 5]], "response to 'sum', token 1: id 2 is not in its own sampling mask"),
        ([[], [2]], "token 0: id 7 is not in its own sampling mask"),
        ([[2, 5, 7, 9], [2]], "token 0: 4 ids in its sampling mask under top_k 3"),
    ],
)
def test_sets_that_cannot_be_those_of_the_tokens_are_refused(kept: list[list[int]] | None, words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        check_trajectory(truncated(kept))


def test_the_sampling_mask_of_an_observation_is_its_token() -> None:
    one = multi_turn(0, "a..b")
    ids = one.completion.response_ids
    kept = tuple(np.array([id_] if not sampled else [id_, 5]) for id_, sampled in zip(ids, one.loss_mask, strict=True))
    sampled = replace(one, sampling=SamplingParams(top_k=2), completion=replace(one.completion, sampling_mask=kept))
    check_trajectory(sampled)
    missing = replace(sampled, completion=replace(sampled.completion, sampling_mask=kept[:1] + kept[3:]))
    with pytest.raises(TrimtabError, match="2 sampling masks for 4 tokens"):
        check_trajectory(missing)
