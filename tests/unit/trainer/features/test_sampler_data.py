"""The sampler's most probable ids, from the engine to the trained forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.trajectories import trajectory

from trimtab.errors import TrimtabError
from trimtab.objectives import objective
from trimtab.runs import trajectories
from trimtab.trainer import tasks
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.features.feature import ForwardPass
from trimtab.trainer.features.sampler_data import TopLogprobs
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.packing import empty_micro_batch, to_tensors
from trimtab.trainer.run import TOP_LOGPROBS, sampling_params
from trimtab.types import Problem, Prompt, SamplingParams, TopTokens, Trajectory

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
@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=6, top_logprobs=4, temperature=0.7)])
def test_the_engine_returns_the_head_that_the_trainer_scores(sampling: SamplingParams) -> None:
    model, tokenizer = laboratory.build(0)
    engine = EmbeddedEngine(model, tokenizer, torch.float32)
    prompt = Prompt(Problem("p", "q", "a"), "q", np.array([5, 6, 7]))
    [group] = engine.generate([prompt], 2, sampling, seed=1)
    batch = TokenBatch.pack([prompt.ids], [one.response_ids for one in group], [0, 0], pad_id=0)
    time = batch.response_ids.shape[1]
    head = torch.full((2, time, 4), -1)
    for row, one in enumerate(group):
        assert one.top is not None
        assert one.top.ids.shape == one.top.logps.shape == (len(one.response_ids), 4)
        head[row, : len(one.top)] = torch.from_numpy(one.top.ids)
    scores = score(model, batch, temperature=0.7, head=head)
    assert scores.head is not None
    for row, one in enumerate(group):
        assert one.top is not None
        np.testing.assert_allclose(scores.head[row, : len(one.top)].numpy(), one.top.logps, atol=2e-5)
        sampled = one.top.ids == one.response_ids[:, None]
        expected = np.broadcast_to(one.logp_behavior[:, None], sampled.shape)[sampled]
        np.testing.assert_allclose(one.top.logps[sampled], expected, atol=1e-6)
        assert (np.diff(one.top.logps, axis=1) <= 0).all()
    # A response that is continued keeps what its first tokens were drawn from.
    prefix = group[0].truncated(3)
    [[whole]] = engine.generate([prompt], 1, sampling, seed=1, prefixes=[[prefix]])
    assert whole.top is not None
    np.testing.assert_array_equal(whole.top.ids[:3], group[0].top.ids[:3])
    with pytest.raises(TrimtabError, match="must have most probable ids where top_logprobs"):
        engine.generate([prompt], 1, sampling, seed=1, prefixes=[[replace(prefix, top=None)]])


def test_top_k_leaves_the_rest_out() -> None:
    model, tokenizer = laboratory.build(0)
    engine = EmbeddedEngine(model, tokenizer, torch.float32)
    sampling = SamplingParams(max_tokens=4, top_logprobs=5, top_k=2)
    [[one]] = engine.generate([Prompt(Problem("p", "q", "a"), "q", np.array([5, 6]))], 1, sampling, seed=1)
    assert one.top is not None
    assert (np.isfinite(one.top.logps).sum(1) == 2).all()
    np.testing.assert_allclose(np.exp(one.top.logps).sum(1), 1.0, rtol=1e-5)
    assert ((one.top.ids == -1) == np.isneginf(one.top.logps)).all()


def test_pending_responses_keep_their_ids() -> None:
    rows = [with_top(trajectory(0, [1, 2, 3]), [[5, 6], [7, 8], [9, 1]]), with_top(trajectory(1, [4]), [[2, 3]])]
    restored = trajectories.from_bytes(trajectories.to_bytes(rows))
    for before, after in zip(rows, restored, strict=True):
        assert before.completion.top is not None
        assert after.completion.top is not None
        np.testing.assert_array_equal(after.completion.top.ids, before.completion.top.ids)
        np.testing.assert_array_equal(after.completion.top.logps, before.completion.top.logps)
    plain = trajectories.from_bytes(trajectories.to_bytes([trajectory(0, [1])]))
    assert plain[0].completion.top is None
