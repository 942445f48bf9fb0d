"""Real vLLM in this process: the contract of every engine, in float32, where numbers can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import PIECES, processed, tokens
from tests.support.turns import ScriptedTurns
from tests.support.vllm_support import needs_vllm, policy, prompts, start

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.vllm import stepped_runner
from trimtab.types import Completion, SamplingParams

pytestmark = [pytest.mark.slow, needs_vllm]

FORCED = SamplingParams(max_tokens=12, ignore_stop=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = start(tmp_path_factory.mktemp("engine"), "float32")
    with pytest.raises(TrimtabError, match="no weights yet"):
        engine.generate(prompts([3]), 1, FORCED, seed=0)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Any) -> Any:
    shared.update_weights(policy().state_dict().items(), 7)
    return shared


def all_of(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def test_tokens_are_drawn_with_these_probabilities(engine: Any) -> None:
    [prompt] = prompts([9])
    draws = all_of(engine.generate([prompt], 1000, SamplingParams(max_tokens=1, ignore_stop=True), seed=5))
    counts = np.bincount([completion.response_ids[0] for completion in draws], minlength=len(PIECES))
    wanted = processed(policy(), prompt, draws[0], FORCED)[0].exp().numpy() * 1000
    likely = wanted > 5
    chi_square = float(np.sum((counts[likely] - wanted[likely]) ** 2 / wanted[likely]))
    assert chi_square < likely.sum() + 5 * np.sqrt(2 * likely.sum())  # five standard deviations


def test_greedy_takes_the_likeliest_and_its_log_prob_is_zero(engine: Any) -> None:
    asked = prompts([6, 33])
    for prompt, [completion] in zip(
        asked,
        engine.generate(asked, 1, SamplingParams(temperature=0, max_tokens=8, ignore_stop=True), seed=0),
        strict=True,
    ):
        assert completion.response_ids.tolist() == processed(policy(), prompt, completion, FORCED).argmax(-1).tolist()
        assert completion.logp_behavior.tolist() == [0.0] * 8


def test_tokens_depend_on_seed_prompt_and_sample_alone(engine: Any) -> None:
    asked = prompts([5, 40, 21])
    whole = tokens(engine.generate(asked, 3, FORCED, seed=11))
    assert tokens(engine.generate(asked, 3, FORCED, seed=11)) == whole
    assert tokens(engine.generate(asked[:2], 2, FORCED, seed=11)) == [group[:2] for group in whole[:2]]
    assert tokens(engine.generate(asked, 3, FORCED, seed=12)) != whole
    assert len({tuple(row) for group in whole for row in group}) == 9


def test_what_cannot_be_sampled_is_refused(engine: Any) -> None:
    for sampling, message in [
        (SamplingParams(top_p=0.9, max_tokens=4), r"engine\.vllm\.sampling_mask"),
        (SamplingParams(top_k=5, max_tokens=4), r"engine\.vllm\.sampling_mask"),
        (SamplingParams(temperature=0.001, max_tokens=4), r"samples at 0\.01 to 2"),
        (SamplingParams(max_tokens=300), "context holds 256"),
    ]:
        with pytest.raises(TrimtabError, match=message):
            engine.generate(prompts([5]), 1, sampling, seed=0)


@pytest.fixture
def masks(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the engine ask for keep sets; the call puts some into vLLM's answers, which returns them on GPUs only."""
    real = stepped_runner.to_delta
    wanted = engine._config.vllm.model_copy(update={"sampling_mask": True})
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"vllm": wanted}))

    def masked(output: Any) -> stepped_runner.TokenDelta:
        result = real(output)
        return dataclasses.replace(result, kept=[[90, int(token), 2] for token in result.ids])

    return lambda: monkeypatch.setattr(stepped_runner, "to_delta", masked)


def test_keep_sets_travel_with_their_tokens(engine: Any, masks: Callable[[], None]) -> None:
    sampling = SamplingParams(top_k=5, max_tokens=6, ignore_stop=True)
    with pytest.raises(TrimtabError, match="without the set it was drawn from"):
        engine.generate(prompts([5]), 1, sampling, seed=0)
    masks()
    [[completion]] = engine.generate(prompts([5]), 1, sampling, seed=0)
    assert [kept.tolist() for kept in completion.sampling_mask] == [
        sorted([90, int(i), 2]) for i in completion.response_ids
    ]
    with pytest.raises(TrimtabError, match="top_k only"):
        engine.generate(prompts([5]), 1, SamplingParams(top_p=0.9, max_tokens=6), seed=0)


def test_a_token_without_its_log_prob_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stepped_runner.to_delta

    def forgetful(output: Any) -> stepped_runner.TokenDelta:
        [new] = output.outputs
        new.logprobs = [{token + 1: entry[token]} for token, entry in zip(new.token_ids, new.logprobs, strict=True)]
        return real(output)

    monkeypatch.setattr(stepped_runner, "to_delta", forgetful)
    with pytest.raises(TrimtabError, match="without its log-prob"):
        engine.generate(prompts([5]), 2, FORCED, seed=0)
    monkeypatch.setattr(stepped_runner, "to_delta", real)
    engine.update_weights(policy().state_dict().items(), 7)  # nothing was left running: the prefix cache can be emptied
    assert len(engine.generate(prompts([5]), 2, FORCED, seed=0)[0]) == 2


def test_more_prompts_than_one_batch_holds(engine: Any) -> None:
    asked = prompts([200] * 24)  # 4800 tokens; vLLM runs 2048 at a time
    for prompt, [completion] in zip(asked, engine.generate(asked, 1, FORCED, seed=0), strict=True):
        exact = processed(policy(), prompt, completion, FORCED)
        chosen = exact[torch.arange(12), torch.from_numpy(completion.response_ids)]
        np.testing.assert_allclose(completion.logp_behavior, chosen.numpy(), atol=2e-4)


def test_tokens_run_through_the_model_are_counted(engine: Any) -> None:
    decoded, prefilled = engine.decoded_tokens, engine.prefilled_tokens
    engine.generate(prompts([70]), 4, FORCED, seed=0)
    assert engine.decoded_tokens - decoded == 4 * 11
    # Two full blocks of 32 are run once for all four samples, what follows them for each.
    assert engine.prefilled_tokens - prefilled == 64 + 4 * 6


TURNS = SamplingParams(max_tokens=70, stop=("a", "b", "c"), stop_ids=(7, 8, 20, 21, 22, 23))


def test_a_turn_runs_only_what_the_prefix_cache_lacks(engine: Any) -> None:
    block, length = stepped_runner.CPU_BLOCK, 70
    prefilled = engine.prefilled_tokens
    got = all_of(engine.generate(prompts([length]), 4, TURNS, seed=3, turns=ScriptedTurns(70)))
    first, later, whole = 64 + 4 * 6, 0, 4 * length  # whole blocks of the prompt are run once, the rest for each sample
    for one in got:
        for turn in range(1, int(one.turn[-1]) + 1):
            [begin] = length + np.flatnonzero(one.sampled & (one.turn == turn))[:1]
            # The token that ended the turn before was not run yet.
            known = length + np.flatnonzero(one.sampled & (one.turn == turn - 1))[-1]
            later += begin - known // block * block
            whole += begin
    assert engine.prefilled_tokens - prefilled == first + later
    assert first + later < whole / 2


def test_keep_sets_over_turns(engine: Any, masks: Callable[[], None]) -> None:
    sampling = dataclasses.replace(TURNS, top_k=20, top_p=0.8)
    [prompt] = prompts([40])
    masks()
    got = all_of(engine.generate([prompt], 4, sampling, seed=3, turns=ScriptedTurns(70)))
    assert max(int(one.turn[-1]) for one in got) == 2
    for one in got:
        whole = processed(policy(), prompt, dataclasses.replace(one, sampling_mask=None), sampling).exp()
        exact = [truncated_logp(row, int(token)) for row, token in zip(whole, one.response_ids, strict=True)]
        np.testing.assert_allclose(one.logp_behavior[one.sampled], np.array(exact)[one.sampled], atol=1e-3)
        assert np.isnan(one.logp_behavior[~one.sampled]).all()
        assert one.sampling_mask is not None
        for token, kept, sampled in zip(one.response_ids, one.sampling_mask, one.sampled, strict=True):
            assert kept.tolist() == (sorted([90, token, 2]) if sampled else [token])


def truncated_logp(probabilities: torch.Tensor, token: int) -> float:
    """The log-prob of a token under top_k = 20, then top_p = 0.8."""
    top = probabilities.sort(descending=True)
    values = top.values[:20] / top.values[:20].sum()
    kept = values[values.cumsum(0) - values < 0.8]
    place = top.indices.tolist().index(token)
    return float((kept / kept.sum())[place].log()) if place < len(kept) else float("-inf")


def test_the_most_probable_ids_come_with_their_log_probs(engine: Any) -> None:
    sampling = SamplingParams(temperature=0.6, max_tokens=12, ignore_stop=True, top_logprobs=5)
    [prompt] = prompts([9])
    [group] = engine.generate([prompt], 2, sampling, seed=1)
    for completion in group:
        assert completion.top is not None
        exact = processed(policy(), prompt, completion, sampling)
        values, ids = exact.topk(5, -1)
        np.testing.assert_allclose(completion.top.logps, values.numpy(), atol=1e-4)
        # Equal but for ids of equal probability.
        same = completion.top.ids == ids.numpy()
        assert same.mean() > 0.9
