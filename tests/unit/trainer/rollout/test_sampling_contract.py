"""Data whose ratios would be biased is refused, with the reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.engines import prompt
from tests.support.trajectories import multi_turn

from trimtab.errors import TrimtabError
from trimtab.trainer.rollout.collector import check_trajectory
from trimtab.types import Completion, SamplingParams, Trajectory

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
