"""Requests that an engine refuses before anything is sampled."""

from __future__ import annotations

import pytest
from tests.support.engines import prompt

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.request import validate_request, validate_vllm_temperature
from trimtab.types import SamplingParams


def test_requests_that_cannot_be_sampled_are_refused() -> None:
    validate_request([prompt([1, 2])], 1, SamplingParams(max_tokens=8), 0, vocabulary=3, context=10)
    for asked, samples, sampling, seed, message in [
        ([1], 0, SamplingParams(), 0, "samples = 0"),
        ([1], 1, SamplingParams(max_tokens=0), 0, "max_tokens = 0"),
        ([1], 1, SamplingParams(), -1, "seed = -1"),
        ([1], 1, SamplingParams(top_p=0.0), 0, "need temperature >= 0, 0 < top_p <= 1"),
        ([1], 1, SamplingParams(logprobs="raw"), 0, '"processed" log-probs only'),
        ([], 1, SamplingParams(), 0, "has no tokens"),
        ([3], 1, SamplingParams(max_tokens=1), 0, "outside the model's vocabulary of 3"),
        ([1, 2, 0], 1, SamplingParams(max_tokens=8), 0, "context holds 10"),
    ]:
        with pytest.raises(TrimtabError, match=message):
            validate_request([prompt(asked)], samples, sampling, seed, vocabulary=3, context=10)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_vllm_would_not_sample_at_are_refused(temperature: float) -> None:
    with pytest.raises(TrimtabError, match="vLLM samples at"):
        validate_vllm_temperature(SamplingParams(temperature=temperature))
    for fine in (0.0, 0.01, 2.0):
        validate_vllm_temperature(SamplingParams(temperature=fine))
