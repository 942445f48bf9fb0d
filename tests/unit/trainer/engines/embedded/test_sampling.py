"""One uniform number in, one token out: exact frequencies, exact log-probs, exact sampling masks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.embedded import sampling as module
from trimtab.trainer.engines.embedded.sampling import sample_tokens, uniform_draws
from trimtab.types import SamplingParams


def stratified(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def reference(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Processed probabilities of one row in float64, by a plain sort."""
    scores = logits.double() / sampling.temperature
    order = scores.argsort(descending=True)
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass = scores[order].softmax(-1)
    keep = mass.cumsum(-1) - mass < sampling.top_p
    keep[0] = True
    out = torch.zeros_like(scores)
    out[order[keep]] = mass[keep] / mass[keep].sum()
    return out


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=0.999),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-9),
]


@pytest.mark.parametrize("size", [3, 128, 211, 700])
@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_evenly_spread_uniforms_give_each_token_its_share(size: int, how: SamplingParams) -> None:
    logits = 2 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    exact = reference(logits, how)
    count = 1500
    sampled = sample_tokens(logits.expand(count, -1).clone(), stratified(count), how)
    shares = torch.bincount(sampled.ids, minlength=size)
    # An interval of the inverse CDF of length p holds count * p evenly spread points, but for its two ends.
    assert (shares - count * exact).abs().max() < 1.01
    torch.testing.assert_close(sampled.logp.double(), exact[sampled.ids].log(), atol=2e-6, rtol=0)
    entropy = -(exact * exact.clamp(min=1e-300).log()).sum()
    torch.testing.assert_close(sampled.entropy.double(), entropy.expand(count), atol=1e-5, rtol=0)
    if how.truncated:
        assert all(np.array_equal(ids, np.flatnonzero(exact)) for ids in sampled.kept)
    else:
        assert sampled.kept is None


def test_top_p_wider_than_the_candidates_sorts_the_vocabulary() -> None:
    flat = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0)) * 0.1
    flat[1] *= 100  # one row is content with few candidates, in the same batch
    how = SamplingParams(top_p=0.9)
    sampled = sample_tokens(flat, stratified(3), how)
    for row, ids in zip(flat, sampled.kept, strict=True):
        assert np.array_equal(ids, np.flatnonzero(reference(row, how)))
    assert len(sampled.kept[0]) > module.TOP_P_CANDIDATES > len(sampled.kept[1])


def test_more_log_probs_than_candidates_have_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 4)  # each row is a block, as each step of a response is
    logits = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [10.0]])
    sampled = sample_tokens(logits, stratified(2), SamplingParams(top_p=0.9, top_logprobs=300))
    ids, logps = sampled.top
    assert ids.shape == logps.shape == (2, 300)
    assert len(sampled.kept[0]) > 300 > len(sampled.kept[1]) == (ids[1] >= 0).sum() == logps[1].isfinite().sum()


def test_tied_scores_keep_exactly_k_tokens() -> None:
    sampled = sample_tokens(torch.zeros(200, 50), stratified(200), SamplingParams(top_k=4))
    assert {len(ids) for ids in sampled.kept} == {4}
    assert set(sampled.ids.tolist()) == set(sampled.kept[0].tolist())
    torch.testing.assert_close(sampled.logp, torch.full((200,), float(np.log(0.25))))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**20), st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]))
def test_a_token_without_mass_is_never_drawn(size: int, seed: int, uniform: float) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    impossible = torch.rand(size, generator=torch.Generator().manual_seed(seed + 1)) < 0.7
    impossible[seed % size] = False
    logits[impossible] -= 1e4
    for how in (SamplingParams(), SamplingParams(top_p=0.95)):
        sampled = sample_tokens(logits[None], torch.tensor([uniform], dtype=torch.float64), how)
        assert not impossible[sampled.ids.item()]
        assert sampled.logp.item() <= 1e-6


def test_peaked_distribution_keeps_its_small_log_probs() -> None:
    sampled = sample_tokens(
        torch.tensor([[12.0, 0.0, 0.0]]), torch.tensor([1 - 2**-53], dtype=torch.float64), SamplingParams()
    )
    assert sampled.ids.item() == 2
    assert sampled.logp.item() == pytest.approx(-12.0000123, abs=2e-6)


def test_greedy_takes_the_top_token_with_certainty() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    sampled = sample_tokens(logits, stratified(2), SamplingParams(temperature=0.0))
    assert sampled.ids.tolist() == [1, 0]
    assert sampled.logp.tolist() == [0.0, 0.0]
    assert sampled.entropy.tolist() == [0.0, 0.0]
    truncated = sample_tokens(logits, stratified(2), SamplingParams(temperature=0.0, top_k=2))
    assert [ids.tolist() for ids in truncated.kept] == [[1], [0]]
    best = sample_tokens(logits, stratified(2), SamplingParams(temperature=0.0, top_logprobs=2)).top
    assert best[0].tolist() == [[1, -1], [0, -1]]
    assert best[1].tolist() == [[0.0, -math.inf]] * 2


@pytest.mark.parametrize(
    "how", [SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(temperature=0.0)]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_logits_are_an_error(how: SamplingParams, bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(TrimtabError, match="not finite"):
        sample_tokens(logits, stratified(3), how).to_lists()


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 211, generator=torch.Generator().manual_seed(0))
    whole = sample_tokens(logits, stratified(9), SamplingParams())
    monkeypatch.setattr(module, "BLOCK_BYTES", 2 * 211 * 4)
    split = sample_tokens(logits, stratified(9), SamplingParams())
    assert torch.equal(whole.ids, split.ids)
    assert torch.equal(whole.logp, split.logp)


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(4, 30)
    before = logits.clone()
    for how in (SamplingParams(temperature=0.5), SamplingParams(temperature=2.0, top_p=0.5)):
        sample_tokens(logits, stratified(4), how)
    assert torch.equal(logits, before)


def test_uniforms_belong_to_seed_prompt_and_sample() -> None:
    first = uniform_draws(7, 0, 0, 16)
    assert np.array_equal(first, uniform_draws(7, 0, 0, 64)[:16])  # a longer limit changes no earlier draw
    others = [uniform_draws(*key, 16) for key in [(8, 0, 0), (7, 1, 0), (7, 0, 1), (7, 10, 0), (0, 7, 0)]]
    assert all(not np.isclose(first, other).any() for other in others)
    assert not np.isclose(uniform_draws(7, 1, 0, 16), uniform_draws(7, 0, 1, 16)).any()
    many = np.concatenate([uniform_draws(3, p, s, 50) for p in range(10) for s in range(10)])
    assert abs(many.mean() - 0.5) < 4 / np.sqrt(12 * len(many))
    assert abs(np.corrcoef(many[:-50], many[50:])[0, 1]) < 4 / np.sqrt(len(many))  # neighboring samples
