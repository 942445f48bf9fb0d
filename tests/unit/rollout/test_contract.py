"""Data whose ratios would be biased is refused, with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.rollout.support import prompt

from trimtab.errors import TrimtabError
from trimtab.rollout.contract import check, check_trajectory
from trimtab.types import Completion, Sampling, Trajectory


@pytest.mark.parametrize(
    ("sampling", "kept", "words"),
    [
        (Sampling(temperature=0.8, logprobs="raw"), False, ['"raw"', "temperature 0.8", "processed"]),
        (Sampling(top_p=0.9, logprobs="raw"), True, ['"raw"', "top_p 0.9"]),
        (Sampling(top_k=20, logprobs="raw"), True, ['"raw"', "top_k 20"]),
        (Sampling(top_p=0.9), False, ["keep sets", "top_p 0.9", "biased"]),
        (Sampling(top_k=5, temperature=0.5), False, ["keep sets", "top_k 5"]),
        (Sampling(temperature=0.0), False, ["greedily"]),
    ],
)
def test_refused(sampling: Sampling, kept: bool, words: list[str]) -> None:
    with pytest.raises(TrimtabError) as caught:
        check(sampling, kept=kept)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), False),
        (Sampling(logprobs="raw"), False),  # both distributions are one at temperature 1 without truncation
        (Sampling(temperature=0.7), False),
        (Sampling(top_p=0.9, top_k=5), True),
    ],
)
def test_accepted(sampling: Sampling, kept: bool) -> None:
    check(sampling, kept=kept)


def test_a_trajectory_shows_its_own_keep_sets() -> None:
    def trajectory(kept: tuple[np.ndarray, ...] | None) -> Trajectory:
        one = np.array([1])
        completion = Completion(one, np.float32([-1.0]), one, "stop", "", kept=kept)
        return Trajectory(prompt([1]), 0, completion, Sampling(top_k=2), np.array([True]), 0.0, {})

    check_trajectory(trajectory((np.array([1, 2]),)))
    with pytest.raises(TrimtabError, match="keep sets"):
        check_trajectory(trajectory(None))
