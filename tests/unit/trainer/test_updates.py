"""Updates of a real model: on external traces, joined to a group and shaped, and on responses of several turns."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.fake_engine import FakeEngine
from tests.support.scripted_engine import SAMPLING, TASK, TOKENIZER
from tests.support.turns import ScriptedTurns
from torch.testing import assert_close

from trimtab.objectives import PolicyLogps, objective
from trimtab.trainer import rewards, tasks
from trimtab.trainer.batch_preparation import Batch, prepare_batch
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.learner import Learner
from trimtab.trainer.models.laboratory import build
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.packing import MicroBatch, micro_batches, to_tensors
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.collector import Collector, Group
from trimtab.trainer.rollout.demonstrations import DemonstratedSampler
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.source import SyncSource
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Problem, SamplingParams, Trajectory

MODEL, _ = build(0)
GAMMA = 0.1
ADVANTAGES = (0.5, -1.0, 2.0)
UPDATES = 9


def recipe(**trainer: object) -> Config:
    return load_config(
        {
            "trainer": {"prompts": 2, "samples": 3, **trainer},
            "objective": {"name": "luffy", "length_max": 4},
            "model": {"path": "laboratory", "autocast": "none"},
            "optim": {"lr": 1.0, "grad_clip": 1e9},
        }
    )


def feed(scorer: rewards.Scorer, config: Config) -> SyncSource:
    """Sampled responses are always "99." (two digits: wrong), traces are gold answers."""
    responses = DemonstratedSampler.load(config, PromptStream(TASK, TOKENIZER, seed=0), SAMPLING, 64)
    script = {item.problem.id: ["99."] for item in PromptStream(TASK, TOKENIZER, seed=0).at(0, 64)}
    engine = FakeEngine(script, tokenizer=TOKENIZER)
    engine.update_weights([], UPDATES)
    collector = Collector(config, responses, scorer)
    return SyncSource(collector, Buffer(config.trainer), engine)


def batch_of(groups: list[Group], budget: int) -> list[MicroBatch]:
    rows = [trajectory for group in groups for trajectory in group]
    places = [[i for i, row in enumerate(rows) if row.group == group[0].group] for group in groups]
    parts = [to_tensors(rows, chosen, 11, torch.device("cpu")) for chosen in micro_batches(rows, places, budget)]
    values = torch.tensor(ADVANTAGES).repeat(len(groups))[:, None]
    return [micro.with_scores(advantage=values[list(micro.rows)]) for micro in parts]


def updated(groups: list[Group], budget: int = 1000, **trainer: object) -> tuple[Learner, StepStatistics]:
    """One plain gradient step of size 1 on these groups."""
    model = copy.deepcopy(MODEL)
    config = recipe(**trainer)
    learner = Learner(
        config=config,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        objective=objective("luffy", **config.objective.keywords),
        total_updates=1,
    )
    batches = learner.score_fixed_policies([batch_of(groups, budget)])
    return learner, learner.update(batches, lambda *_: None)


def test_a_trace_takes_the_place_of_a_sampled_response(scorer):
    groups, stats = feed(scorer, recipe()).take(UPDATES, batches_left=1)
    for group in groups:
        assert [trajectory.off_policy for trajectory in group] == [False, False, True]
        assert [trajectory.reward for trajectory in group] == [0.0, 0.0, 1.0]
        assert group[2].loss_mask.all()
    assert (stats.traces, stats.traces_dropped, stats.traces_missing) == (2, 0, 0)


def test_a_prompt_without_a_trace_is_sampled_once_more(scorer):
    source = feed(scorer, recipe())
    responses = source.collector.responses
    known, gold = [], responses.texts

    def only_the_first(problem: Problem):
        known.append(problem.id)
        return gold(problem) if problem.id == known[0] else ()

    responses.texts = only_the_first
    groups, stats = source.take(UPDATES, batches_left=1)
    assert [[t.off_policy for t in group] for group in groups] == [[False, False, True], [False] * 3]
    assert (stats.traces, stats.traces_missing) == (1, 1)
    responses.texts = lambda _: ("1234567.",)
    groups, stats = source.take(UPDATES, batches_left=1)
    assert [[t.off_policy for t in group] for group in groups] == [[False] * 3] * 2
    assert (stats.traces, stats.traces_dropped, stats.traces_missing) == (0, 2, 0)


def test_a_trace_does_not_age_its_group(scorer):
    """Its policy version is no version: under max_lag the group would be too old for every batch."""
    groups, _ = feed(scorer, recipe(max_lag=0)).take(UPDATES, batches_left=1)
    assert any(trajectory.off_policy for group in groups for trajectory in group)


def test_the_step_is_the_plain_gradient_on_policy_and_the_shaped_one_on_traces(scorer):
    groups, _ = feed(scorer, recipe()).take(UPDATES, batches_left=1)
    (micro,) = batch_of(groups, 1000)
    model = copy.deepcopy(MODEL)
    logp = score(model, micro.tokens).logp
    probability = logp.detach().exp()
    shaped = GAMMA * probability / (probability + GAMMA) ** 2
    slope = torch.zeros_like(logp)
    for index, row in enumerate(micro.rows):
        trajectory = [t for group in groups for t in group][row]
        length = len(trajectory)
        slope[index, :length] = shaped[index, :length] if trajectory.off_policy else 1.0
    (slope * micro.advantage * logp).sum().div(6 * 4).backward()  # six rows, length_max 4
    learner, stats = updated(groups)
    assert stats.skipped == 0
    for (name, before), after in zip(model.named_parameters(), learner.model.parameters(), strict=True):
        assert_close(after.detach(), before.detach() + before.grad, rtol=1e-5, atol=1e-7, msg=name)
    metrics = stats.objective.finalize()
    assert metrics["off_policy/tokens"] == pytest.approx(8 / 20)  # 2 traces of 4 tokens, 4 responses of 3


@pytest.mark.parametrize("budget", [1000, 1])
@pytest.mark.parametrize("trainer", [{}, {"epochs": 2}])
def test_traces_are_left_out_of_the_mismatch(scorer, budget, trainer):
    """NaN behavior log-probs that reached the report or the loss would show here; so would ratio 1 in their place."""
    groups, _ = feed(scorer, recipe()).take(UPDATES, batches_left=1)
    learner, stats = updated(groups, budget, **trainer)
    metrics = stats.mismatch.finalize()
    assert metrics["tokens"] == 12
    assert torch.tensor([metrics["k1"], metrics["ess_token"], metrics["abs_diff_max"]]).isfinite().all()
    assert (stats.skipped, learner.updates) == (0, trainer.get("epochs", 1))


def test_a_trainer_that_forgets_the_mark_makes_no_update(scorer):
    """The NaN in a trace's log-probs is there for that: no other objective can train it by accident."""
    groups, _ = feed(scorer, recipe()).take(UPDATES, batches_left=1)
    (micro,) = batch_of(groups, 1000)
    scores = score(MODEL, micro.tokens).logp.detach()
    logps = PolicyLogps(scores, micro.behavior, micro.mask, scores)
    for name in ("token-bypass", "token-tis", "m2po", "oapl"):
        assert objective(name)(logps, micro.advantage).loss.isnan()
    with pytest.raises(ValueError, match="needs off_policy"):
        objective("luffy")(logps, micro.advantage)


STOPS = SamplingParams(max_tokens=40, stop_ids=tuple(range(0, len(TOKENIZER), 3)))


@pytest.fixture(scope="module")
def episodes() -> list[Group]:
    """Two groups of four responses of up to three turns, with rewards 0 and 1."""
    engine = EmbeddedEngine(copy.deepcopy(MODEL), TOKENIZER, torch.float32)
    prompts = [tasks.encode(TASK, problem, TOKENIZER) for problem in TASK.train[:2]]
    handler = ScriptedTurns(STOPS.max_tokens, vocabulary=len(TOKENIZER))
    sampled = engine.generate(prompts, 4, STOPS, seed=1, turns=handler)
    assert all(one.turn[-1] > 0 for group in sampled for one in group)
    return [
        [
            Trajectory(prompt, number, one, STOPS, one.sampled, float(index % 2), {"exact": float(index % 2)})
            for index, one in enumerate(completions)
        ]
        for number, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
    ]


def trained(episodes: list[Group], name: str) -> tuple[torch.Tensor, StepStatistics, Batch]:
    """The weights after two mini-batches of plain gradient steps."""
    config = load_config(
        {
            "trainer": {"prompts": 2, "samples": 4, "minibatches": 2},
            "objective": {"name": name},
            "model": {"path": "laboratory", "autocast": "none"},
        }
    )
    model = copy.deepcopy(MODEL)
    learner = Learner(config, model, torch.optim.SGD(model.parameters()), objective(name), total_updates=2)
    batch = prepare_batch(episodes, learner, pad_id=0)
    stats = learner.update(batch.minibatches, lambda *_: None)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), stats, batch


def test_every_turn_has_its_weight(episodes: list[Group]) -> None:
    _, stats, _ = trained(episodes, "turn-tis")
    turns = sum(int(one.completion.turn[one.loss_mask].max()) + 1 for group in episodes for one in group)
    assert int(stats.objective.parts["weight"].count) == turns


def test_a_void_response_has_no_loss_and_its_reward_counts(episodes: list[Group]) -> None:
    """The first response of each group is right, the others are not, and the last one is masked for a void turn."""

    def with_void(group: Group, offset: float) -> Group:
        rows = [replace(one, reward=float(index == 0)) for index, one in enumerate(group)]
        void = rows[-1].completion
        moved = replace(void, logp_behavior=void.logp_behavior + np.float32(offset))
        return [*rows[:-1], replace(rows[-1], completion=moved, loss_mask=np.zeros(len(rows[-1]), dtype=np.bool_))]

    weights, _, batch = trained([with_void(group, 0.0) for group in episodes], "token-tis")
    # Of the rewards 1, 0, 0, 0 the mean is 1/4 and the deviation 1/2; of 1, 0, 0 they would be 1/3 and .577.
    assert batch.advantages.flatten().tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5] * 2, rel=1e-3)
    other, _, _ = trained([with_void(group, -3.0) for group in episodes], "token-tis")
    assert torch.equal(weights, other), "nothing of the void response is read"
    dropped, _, _ = trained([with_void(group, 0.0)[:-1] for group in episodes], "token-tis")
    assert not torch.equal(weights, dropped)
