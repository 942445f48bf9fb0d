"""Routing replay between the engine and the model: what is stored, checked, laid out and refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.support.trajectories import trajectory

from trimtab.cli import main
from trimtab.errors import TrimtabError
from trimtab.objectives import objective
from trimtab.objectives.lookup import from_section
from trimtab.runs import trajectories
from trimtab.trainer.config import load_config
from trimtab.trainer.features import build_features
from trimtab.trainer.features.feature import Feature, ForwardPass, StepRecord
from trimtab.trainer.features.perturbation_feature import PerturbationFeature
from trimtab.trainer.features.routing_replay import RoutingReplay, require_mixture
from trimtab.trainer.learner import Learner
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.routing import RouterInfo
from trimtab.trainer.optim import build_optimizer
from trimtab.trainer.packing import MicroBatch, to_tensors
from trimtab.trainer.ranks import current_ranks
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.step_statistics import StepStatistics
from trimtab.types import Trajectory

CPU = torch.device("cpu")
# One mixture layer, 4 experts, one of which sees a token: a record is a list of numbers.
ONE = RouterInfo(1, 4, 1)


def routed(one: Trajectory, routes: Any) -> Trajectory:
    """`routes`: a list of one number for each token that is run, an array, or None."""
    if isinstance(routes, list):
        routes = np.array(routes, dtype=np.int16)[:, None, None]
    return replace(one, completion=replace(one.completion, routed_experts=routes))


REPLAY = RoutingReplay("rollout", ONE)


def packed(rows: list[Trajectory], chosen: Sequence[int], replay: Feature = REPLAY) -> MicroBatch:
    return replay.pack(to_tensors(rows, chosen, 12, CPU), [rows[row] for row in chosen])


def test_prompts_come_first_and_a_prompt_is_its_first_sample_s() -> None:
    rows = [
        routed(trajectory(7, [5, 6], prompt=[1, 2, 3]), [0, 1, 2, 3]),
        routed(trajectory(7, [5], prompt=[1, 2, 3]), [3, 3, 3]),
        routed(trajectory(9, [8, 8, 8], prompt=[4]), [1, 2, 0]),
    ]
    result = packed(rows, (0, 1, 2)).extras["routes"]
    assert result.flatten().tolist() == [*(0, 1, 2), 1, 3, *(2, 0)]
    turned = packed(rows, (2, 1, 0)).extras["routes"]
    assert turned.flatten().tolist() == [1, *(3, 3, 3), *(2, 0), 3]
    assert "routes" not in packed(rows, (0, 1, 2), RoutingReplay("proximal", ONE)).extras


@pytest.mark.parametrize(
    ("routes", "line"),
    [
        (None, "comes without the experts of its tokens"),
        ([0, 1], "records experts of 2 tokens, 3 were run"),
        ([0, 1, 2, 3], "records experts of 4 tokens, 3 were run"),
        (np.zeros((3, 2, 1), dtype=np.int16), "it has 1 mixture layers of 4 experts, 1 for a token"),
        (np.zeros((3, 1, 2), dtype=np.int16), "records experts that this model does not have"),
        ([0, 4, 1], "records experts that this model does not have"),
        ([0, -1, 1], "records experts that this model does not have"),
    ],
)
def test_a_wrong_record_is_an_error_that_names_its_response(routes: Any, line: str) -> None:
    good = routed(trajectory(0, [5, 6]), [0, 1, 2])
    bad = routed(trajectory(1, [5, 6]), routes)
    with pytest.raises(TrimtabError, match=f"a response to problem 'p1'.*{line}"):
        packed([good, bad], (0, 1))


def test_step_files_leave_the_record_out_and_so_do_runs_that_have_none(tmp_path: Path) -> None:
    row = routed(trajectory(0, [5, 6]), [0, 1, 2])
    trajectories.write(tmp_path / "a.parquet", [trajectories.Row(row)], 1)
    assert "routes" not in pq.read_schema(tmp_path / "a.parquet").names
    assert trajectories.read(tmp_path / "a.parquet")[0].trajectory.completion.routed_experts is None
    assert "routes" not in pq.read_schema(pa.BufferReader(trajectories.to_bytes([trajectory(0, [5])]))).names


def test_a_damaged_record_is_an_error() -> None:
    data = trajectories.to_bytes([routed(trajectory(0, [5, 6, 7]), np.zeros((4, 2, 3), dtype=np.int16))])
    table = pq.read_table(pa.BufferReader(data))
    broken = pa.array([[0] * 5], table["routes"].type)
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(table.schema.get_field_index("routes"), "routes", broken), sink)
    with pytest.raises(TrimtabError, match="not a trajectory file"):
        trajectories.from_bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("replay", ["proximal", "rollout"])
def test_a_dense_model_is_refused(replay: str) -> None:
    config = load_config("laboratory", [f"routing.replay={replay}", "trainer.epochs=2"])
    dense, _ = laboratory.build(0)
    with pytest.raises(TrimtabError, match="'laboratory' is a dense model"):
        list(build_features(config, dense, objective(config.objective.name), None, current_ranks(), print))
    assert not any(
        isinstance(one, RoutingReplay)
        for one in build_features(load_config("laboratory"), dense, objective("grpo"), None, current_ranks(), print)
    )
    mixture, _ = laboratory.build(0, laboratory.MIXTURE)
    assert require_mixture(config, mixture) == RouterInfo(2, 8, 2)


def learner(replay: str, *sets: str) -> Learner:
    config = load_config("laboratory", [f"routing.replay={replay}", "optim.lr=1e-2", "optim.warmup=0", *sets])
    model, _ = laboratory.build(0, laboratory.MIXTURE)
    return Learner(
        config=config,
        model=model.train(),
        optimizer=build_optimizer(model.parameters(), config.optim),
        objective=from_section(config.objective.model_dump()),
        total_updates=10,
        features=list(build_features(config, model, objective(config.objective.name), None, current_ranks(), print)),
    )


def record(model: Any, rows: list[Trajectory], shift: int) -> list[Trajectory]:
    """The rows with the experts the model itself chooses (`shift` = 0), or with their `shift`-th neighbors."""
    result = score(model, to_tensors(rows, range(len(rows)), 12, CPU).tokens, record=True).routes
    parts = result.split([*(len(row.prompt.ids) for row in rows), *(len(row) - 1 for row in rows)])
    whole = [torch.cat(pair) for pair in zip(parts[: len(rows)], parts[len(rows) :], strict=True)]
    return [routed(row, ((routes + shift) % 8).numpy()) for row, routes in zip(rows, whole, strict=True)]


def batches(rows: list[Trajectory], of: Learner) -> list[list[MicroBatch]]:
    replay = next((one for one in of.features if isinstance(one, RoutingReplay)), Feature())
    made = [packed(rows, (place,), replay) for place in range(len(rows))]
    return [[one.with_scores(advantage=torch.tensor([[1.0 - 2 * (place % 2)]]))] for place, one in enumerate(made)]


ROWS = [trajectory(place, [3, 1, 4, 1, 5][: 3 + place % 2], prompt=[9, 2, 6, place]) for place in range(4)]


def share(stats: StepStatistics, of: Learner) -> float:
    record = StepRecord(1, 0, [], RolloutStats(), stats)
    return {name: value for one in of.features for name, value in one.end_step(record).items()}["routing/agreement"]


@torch.no_grad()
def test_every_pass_of_the_trained_policy_is_replayed_and_none_of_the_reference() -> None:
    of = learner("rollout", "trainer.epochs=2", "objective.kl_coef=0.1")
    of.reference = copy.deepcopy(of.model)
    rows = record(of.model, ROWS, 1)
    [[free]] = batches(rows, learner("none"))[:1]
    plain = of.logp(free)
    for [micro] in of.score_fixed_policies(batches(rows, of))[:1]:
        kept = of.logp(micro)
        assert not torch.allclose(kept, plain, atol=1e-3)
        assert torch.equal(micro.proximal, kept)
        assert torch.equal(micro.reference, plain)
        call = ForwardPass(micro, "train")
        assert torch.equal(of._score(of.model, call)[0].logp, kept)
        of.features = [*of.features, PerturbationFeature(load_config("token-alp", ["perturbation.std=1e-9"]), of.model)]
        torch.testing.assert_close(of._score(of.model, call)[0].logp, kept, atol=1e-5, rtol=0)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("shift", "agreement"), [(0, 1.0), (4, 0.0)])
def test_agreement_is_measured_in_the_first_pass(epochs: int, shift: int, agreement: float) -> None:
    """With a proximal pass it is measured there, without one at the first update of the batch. The share of the first
    layer is known: after it, tokens went elsewhere."""
    of = learner("rollout", f"trainer.epochs={epochs}")
    rows = record(of.model, ROWS[:1], shift)
    stats = of.update(of.score_fixed_policies(batches(rows, of)), lambda *_: None)
    assert stats.counts["routing/compared"] == 2 * (4 + 2)
    assert share(stats, of) == agreement if shift == 0 else share(stats, of) <= 0.75


def test_the_update_replays_what_the_proximal_pass_chose() -> None:
    """Between two updates the routers move: in the second epoch the trained policy would choose others."""
    of = learner("proximal", "trainer.epochs=2")
    chosen = score(of.model, batches(ROWS, of)[0][0].tokens, record=True).routes
    scored = of.score_fixed_policies(batches(ROWS, of))
    settled = scored[0][0].extras["routes"]
    assert torch.equal(settled, chosen)
    choices: list[Any] = []
    experts: Any = of.model.get_submodule("model.layers.1.mlp.experts")
    handle = experts.register_forward_pre_hook(lambda _experts, given: choices.append(given[1]))
    stats = of.update(scored, lambda *_: None)
    handle.remove()
    assert len(choices) == 8
    for place in range(4):
        assert torch.equal(choices[place], choices[place + 4])
    assert 0 < share(stats, of) < 1
    assert stats.counts["routing/compared"] == 2 * sum(2 * (4 + len(row) - 1) for row in ROWS)


def test_an_update_without_the_experts_it_should_replay_is_an_error() -> None:
    of = learner("proximal", "trainer.epochs=2")
    with pytest.raises(ValueError, match=r"no experts to replay for the micro-batch of rows \(0,\)"):
        of.update(batches(ROWS, of), lambda *_: None)


def test_explain_says_that_experts_are_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", "laboratory"]) == 0
    assert "[routing]" not in capsys.readouterr().out
    assert main.run(["explain", "laboratory", "--set", "routing.replay=rollout"]) == 0
    assert "[routing] replay = rollout" in capsys.readouterr().out
