"""Temperatures, truncation and raw log-probs, alone and beside noise, in tokens drawn from known distributions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.planted_causes import names
from tests.support.token_tables import table

from trimtab.diagnosis.tokens import TokenTable

RESPONSES, LENGTH, IDS = 240, 25, 30


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def drawn(*, temperature: float = 1.0, top_p: float = 1.0, noise: float = 0.0) -> TokenTable:
    """The sampler's temperature and truncation are not the trainer's, whose logits have noise of a size."""
    random, count = np.random.default_rng(0), RESPONSES * LENGTH
    logits = random.normal(size=(count, IDS)) * random.lognormal(1.0, 0.5, (count, 1))
    sampler = log_softmax(logits / temperature)
    order = np.argsort(-sampler, axis=1)
    share = np.exp(np.take_along_axis(sampler, order, 1))
    kept = np.zeros(sampler.shape, bool)
    np.put_along_axis(kept, order, share.cumsum(1) - share < top_p, 1)
    sampler = log_softmax(np.where(kept, sampler, -np.inf))
    trainer = log_softmax(logits + noise * random.normal(size=logits.shape))
    ids = (np.exp(sampler).cumsum(1) > random.random((count, 1))).argmax(1)
    at = np.arange(count), ids
    columns = {"behavior": sampler[at].astype(np.float32), "proximal": trainer[at].astype(np.float32)}
    return TokenTable(starts=np.arange(RESPONSES + 1) * LENGTH, mask=np.ones(count, bool), **columns)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"noise": 0.05}, {"precision"}),
        ({"noise": 0.5}, {"quantized"}),
        ({"temperature": 0.7}, {"temperature"}),
        ({"temperature": 1.3}, {"temperature"}),
        ({"top_p": 0.9}, {"truncated-sampling"}),
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature", "truncated-sampling"}),
        ({"temperature": 0.7, "noise": 0.5}, {"temperature", "quantized"}),
        ({"top_p": 0.9, "noise": 0.5}, {"truncated-sampling", "quantized"}),
    ],
)
def test_each_cause_is_named_and_no_other(sampling: dict[str, float], expected: set[str]) -> None:
    assert names(drawn(**sampling)) == expected


def test_noise_cut_off_at_probability_one_is_no_truncation() -> None:
    exact, random = drawn(), np.random.default_rng(3)
    noise = 0.3 * random.normal(size=exact.tokens) * np.minimum(1, -3 * exact.behavior)
    cut = np.minimum(exact.behavior + noise, 0).astype(np.float32)
    assert not {"truncated-sampling", "temperature", "raw-logprobs"} & names(replace(exact, proximal=cut))


def test_raw_log_probs_on_both_sides_show_in_what_the_sampler_states() -> None:
    behavior = np.split(-np.random.default_rng(0).exponential(size=800), 40)
    equal = [[0.0] * 20] * 40
    assert names(table(equal, behavior=behavior)) == {"copied"}
    stated = {"temperature": np.full(40, 0.7), "raw": np.ones(40, bool)}
    assert names(table(equal, behavior=behavior, **stated)) == {"copied", "raw-logprobs"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan])
def test_a_stated_temperature_that_is_not_positive_explains_no_line(temperature: float) -> None:
    columns = {"temperature": np.full(RESPONSES, temperature), "top_p": np.full(RESPONSES, np.nan)}
    assert names(replace(drawn(temperature=0.7), **columns)) == {"temperature"}
