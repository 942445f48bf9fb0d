"""Features of a step: observations, noise on a shared prompt, and the most probable ids of the sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trajectories import multi_turn, trajectory

from trimtab.errors import TrimtabError
from trimtab.objectives import objective
from trimtab.runs import trajectories
from trimtab.trainer import tasks
from trimtab.trainer.batch_preparation import Batch
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.features.checks import BitwiseCheck
from trimtab.trainer.features.feature import ForwardPass, StepRecord
from trimtab.trainer.features.measurements import LagMetrics
from trimtab.trainer.features.perturbation_feature import PerturbationFeature
from trimtab.trainer.features.sampler_data import TopLogprobs
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.packing import empty_micro_batch, to_tensors
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.run import TOP_LOGPROBS, sampling_params
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Problem, Prompt, SamplingParams, TopTokens, Trajectory


def logps(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def record(rows: list[Trajectory], **statistics: Any) -> StepRecord:
    return StepRecord(1, 5, rows, RolloutStats(), StepStatistics(**statistics))


def test_equal_bits_are_asked_of_sampled_tokens_only() -> None:
    check = BitwiseCheck(print)
    rows = [multi_turn(0, "ab..c", version=3)]
    equal = record(rows, mismatch_logps={0: logps(-1, -1, -7, -8, -1)}, versions={0: 3})
    assert check.end_step(equal) == {"mismatch/confirmed": 3}
    unequal = record(rows, mismatch_logps={0: logps(-1, -1, -7, -8, -1.5)}, versions={0: 3})
    with pytest.raises(TrimtabError, match=r"1 of 3 log-probs .* \(largest difference 0.5\)"):
        check.end_step(unequal)


def test_the_age_of_an_observation_is_not_that_of_a_token() -> None:
    rows = [multi_turn(0, "ab..c", version=3), multi_turn(0, "d.e", version=5)]
    result = LagMetrics().end_step(record(rows))
    shares = {key: value for key, value in result.items() if key.startswith("lag/share/")}
    assert shares == {"lag/share/0": pytest.approx(2 / 5), "lag/share/2": pytest.approx(3 / 5)}


@pytest.mark.parametrize("policy", ["proximal", "current"])
def test_rows_of_the_trajectory_file_have_no_log_probs_at_observations(policy: str) -> None:
    batch = Batch([multi_turn(0, "a..b"), trajectory(0, [1, 2])], [], torch.zeros(2, 1), 0, 0.0)
    stats = StepStatistics(mismatch_logps={0: logps(-1, -2, -3, -4), 1: logps(-5, -6)}, versions={0: 1, 1: 1})
    written, plain = (getattr(row, f"logp_{policy}") for row in batch.rows(stats, policy))
    np.testing.assert_array_equal(written, [-1, np.nan, np.nan, -4])
    assert plain.tolist() == [-5, -6]


@torch.no_grad()
@pytest.mark.parametrize("per_response", [False, True])
def test_two_responses_see_one_noisy_prompt_or_two(per_response: bool) -> None:
    """The first token of a response follows from the prompt alone: its log-prob shows the noise there."""
    model, _ = laboratory.build(0)
    rows = [trajectory(0, [9, 10, 11], prompt=[5, 6, 7, 8])] * 2
    micro = to_tensors(rows, [0, 1], 0, torch.device("cpu"), share_prompts=not per_response)
    feature = PerturbationFeature(load_config("token-alp", ["perturbation.std=0.1"]), model)
    with feature.forward(ForwardPass(micro, "train")) as options:
        noisy = score(model, micro.tokens, **options).logp
    plain = score(model, micro.tokens).logp
    assert (noisy - plain).abs().min() > 1e-4
    first, second = noisy[:, 0].tolist()
    assert (first != second) == per_response
    assert noisy[0, 1] != noisy[1, 1]


@pytest.mark.parametrize(("std", "mean"), [("0.1", 0.11), ("[0.1, 0.3]", 0.18)])
def test_the_drift_of_sigma_and_the_gradient_of_its_logarithm_are_reported(std: str, mean: float) -> None:
    """Two layers: gradients (3, 4) and (0, 2) in two updates, sigmas times 1.5 and 0.7 ((.15 + .21) / .4 is .9)."""
    model, _ = laboratory.build(0)
    feature = PerturbationFeature(load_config("token-alp", [f"perturbation.std={std}"]), model)
    (log_sigma,) = feature.perturbation.parameters()
    assert log_sigma.shape == (2,)
    one = StepRecord(3, 0, [], RolloutStats(), StepStatistics())
    before = feature.end_step(one)
    assert before["perturbation/sigma_drift"] == pytest.approx(0.0, abs=1e-6)
    assert "perturbation/grad_norm" not in before  # no update was made
    for gradient in ([3.0, 4.0], [0.0, 2.0]):
        log_sigma.grad = torch.tensor(gradient)
        feature.end_update()
    with torch.no_grad():
        log_sigma += torch.tensor([1.5, 0.7]).log()
    after = feature.end_step(one)
    assert after["perturbation/grad_norm"] == pytest.approx(3.5)
    assert after["perturbation/sigma_mean"] == pytest.approx(mean)
    assert after["perturbation/sigma_drift"] == pytest.approx(0.1 if std == "0.1" else -0.1, abs=1e-6)


CPU = torch.device("cpu")


def with_top(row: Trajectory, ids: list[list[int]], mass: float = 0.4) -> Trajectory:
    top = TopTokens(np.array(ids), np.full(np.shape(ids), np.log(mass), dtype=np.float32))
    return replace(row, completion=replace(row.completion, top=top))


def test_rows_are_padded_with_ids_that_are_none() -> None:
    rows = [with_top(trajectory(0, [1, 2, 3]), [[5, 6]] * 3), with_top(trajectory(0, [4]), [[7, 8]])]
    micro = TopLogprobs().pack(to_tensors(rows, [0, 1], 0, CPU), rows)
    assert micro.extras["head"].tolist() == [[[5, 6]] * 3, [[7, 8], [-1, -1], [-1, -1]]]
    assert micro.extras["head_behavior"][1, 1:].isneginf().all()
    with TopLogprobs().forward(ForwardPass(micro, "train")) as options:
        assert options["head"] is micro.extras["head"]
    with TopLogprobs().forward(ForwardPass(micro, "reference")) as options:
        assert options == {}
    with TopLogprobs().forward(ForwardPass(empty_micro_batch(micro), "train")) as options:
        assert options["head"].tolist() == [[[-1]]]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (trajectory(0, [1]), "its sampler returned no most probable ids"),
        (with_top(trajectory(0, [1]), [[5, 6]], mass=0.6), "have a mass of 1.2"),
    ],
)
def test_what_is_no_distribution_is_refused(row: Trajectory, line: str) -> None:
    with pytest.raises(TrimtabError, match=line):
        TopLogprobs().pack(to_tensors([row], [0], 0, CPU), [row])


def test_a_run_asks_for_as_many_ids_as_its_objective_reads() -> None:
    task = tasks.build("sort")
    for recipe, centered, expected in (
        ([], True, TOP_LOGPROBS),
        ([], False, 0),
        (["sampling.top_logprobs=5"], True, 5),
    ):
        config = load_config("laboratory", recipe)
        assert sampling_params(config, task, centered=centered).top_logprobs == expected
    assert objective("score-centering").centering is not None


@torch.no_grad()
def test_the_engine_returns_the_head_that_the_trainer_scores() -> None:
    sampling = SamplingParams(max_tokens=6, top_logprobs=4, temperature=0.7)
    model, tokenizer = laboratory.build(0)
    engine = EmbeddedEngine(model, tokenizer, torch.float32)
    prompt = Prompt(Problem("p", "q", "a"), "q", np.array([5, 6, 7]))
    [group] = engine.generate([prompt], 2, sampling, seed=1)
    batch = TokenBatch.pack([prompt.ids], [one.response_ids for one in group], [0, 0], pad_id=0)
    time = batch.response_ids.shape[1]
    head = torch.full((2, time, 4), -1)
    for row, one in enumerate(group):
        assert one.top.ids.shape == one.top.logps.shape == (len(one.response_ids), 4)
        head[row, : len(one.top)] = torch.from_numpy(one.top.ids)
    scores = score(model, batch, temperature=0.7, head=head)
    for row, one in enumerate(group):
        np.testing.assert_allclose(scores.head[row, : len(one.top)].numpy(), one.top.logps, atol=2e-5)
        sampled = one.top.ids == one.response_ids[:, None]
        expected = np.broadcast_to(one.logp_behavior[:, None], sampled.shape)[sampled]
        np.testing.assert_allclose(one.top.logps[sampled], expected, atol=1e-6)
        assert (np.diff(one.top.logps, axis=1) <= 0).all()
    # A response that is continued keeps what its first tokens were drawn from.
    prefix = group[0].truncated(3)
    [[whole]] = engine.generate([prompt], 1, sampling, seed=1, prefixes=[[prefix]])
    np.testing.assert_array_equal(whole.top.ids[:3], group[0].top.ids[:3])
    with pytest.raises(TrimtabError, match="must have most probable ids where top_logprobs"):
        engine.generate([prompt], 1, sampling, seed=1, prefixes=[[replace(prefix, top=None)]])


def test_top_k_leaves_the_rest_out() -> None:
    model, tokenizer = laboratory.build(0)
    engine = EmbeddedEngine(model, tokenizer, torch.float32)
    sampling = SamplingParams(max_tokens=4, top_logprobs=5, top_k=2)
    [[one]] = engine.generate([Prompt(Problem("p", "q", "a"), "q", np.array([5, 6]))], 1, sampling, seed=1)
    assert (np.isfinite(one.top.logps).sum(1) == 2).all()
    np.testing.assert_allclose(np.exp(one.top.logps).sum(1), 1.0, rtol=1e-5)
    assert ((one.top.ids == -1) == np.isneginf(one.top.logps)).all()


def test_pending_responses_keep_their_ids() -> None:
    rows = [with_top(trajectory(0, [1, 2, 3]), [[5, 6], [7, 8], [9, 1]]), with_top(trajectory(1, [4]), [[2, 3]])]
    restored = trajectories.from_bytes(trajectories.to_bytes(rows))
    for before, after in zip(rows, restored, strict=True):
        np.testing.assert_array_equal(after.completion.top.ids, before.completion.top.ids)
        np.testing.assert_array_equal(after.completion.top.logps, before.completion.top.logps)
    plain = trajectories.from_bytes(trajectories.to_bytes([trajectory(0, [1])]))
    assert plain[0].completion.top is None
