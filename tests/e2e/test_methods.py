"""ALP, SOUP, OAPL, LUFFY and M2PO in the real loop on the laboratory model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.run_results import undocumented, untimed, weights

from trimtab.errors import TrimtabError
from trimtab.runs import trajectories
from trimtab.trainer import evaluation, rewards, tasks
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.export import export
from trimtab.trainer.models.load import load
from trimtab.trainer.run import train
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import SamplingParams

pytestmark = pytest.mark.e2e

SMALL = (
    "base=laboratory",
    "trainer.steps=6",
    "trainer.prompts=4",
    "trainer.samples=4",
    "eval.every=0",
    "eval.problems=8",
    "checkpoint.every=3",
    "log.trajectories_every=1",
    "diagnose.every=2",
)
ROUNDED = ("laboratory", "engine.noise=0.1", "optim.lr=1e-3")
PRESET = ("laboratory", "trainer.minibatches=2", "optim.lr=1e-3", "optim.warmup=0")
# Recipe and changes: every method, feature and engine whose state a checkpoint holds.
RESUMED: dict[str, tuple[str, ...]] = {
    "token-alp": ("token-alp", "perturbation.std=0.01"),
    "seq-alp": ("seq-alp", "perturbation.layers=1"),
    "alp, noise per response": ("token-alp", "perturbation.per_response=true", "perturbation.std=0.01"),
    "soup": ("soup", "prefix.refresh=3", "sampling.top_p=0.9"),
    "soup, experts": ("soup", "prefix.refresh=5", "model.path=laboratory-moe", "routing.replay=rollout"),
    "oapl": ("oapl", "trainer.sync_every=2", "trainer.dynamic_sampling=true"),
    "m2po": ("m2po", "trainer.sync_every=2", "trainer.minibatches=2"),
    "luffy": ("luffy", "demonstrations.per_group=1"),
    "calibrated": (*PRESET, "objective.name=geo-mask", "objective.calibrate=true", "trainer.samples=8"),
    "centered": (*PRESET, "objective.name=score-centering", "sampling.top_logprobs=8", "trainer.sync_every=4"),
    "a3po": (*PRESET, "objective.name=a3po", "trainer.sync_every=4"),
    "token baseline": (*PRESET, "advantage.kind=optimal-token", "trainer.micro_batch_tokens=128"),
    "a stale sampler in three bits": (*ROUNDED, "engine.quantize=int3", "trainer.sync_every=2"),
    "a mixture in bfloat16": (*ROUNDED, "engine.dtype=bfloat16", "model.path=laboratory-moe"),
    "episodes": ("laboratory-tools", "base=laboratory-tools"),
}


def run(out: Path, recipe: str, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    train(load_config(recipe, [*SMALL, *overrides]), out=out, resume=resume)
    return untimed(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_run_continues_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *RESUMED[name])
    assert undocumented(key for row in whole for key in row) == []
    run(tmp_path / "parts", *RESUMED[name], "trainer.steps=3")
    parts = run(tmp_path / "parts", *RESUMED[name], resume=True)
    ends = ("eval/", "perturbation/", "mismatch/")  # measured at a run's last step, which 3 was in the shorter one
    for row, expected in zip(parts, whole, strict=True):
        for key, value in expected.items():
            if not key.startswith(ends):
                assert row[key] == value, (row["step"], key)
    for section in ("model", "optimizer"):
        left, right = weights(tmp_path / "parts", section), weights(tmp_path / "whole", section)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def noiseless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("noiseless") / "run"
    run(out, "token-alp", "perturbation.std=0")
    return out


def test_noise_of_zero_is_bypass_bit_for_bit(noiseless: Path, tmp_path: Path) -> None:
    clip = ("objective.clip_low=0.2", "objective.clip_high=0.28", "objective.clip_dual=10.0")
    noisy = untimed(noiseless)
    clean = run(tmp_path / "bypass", "token-alp", "objective.name=token-bypass", *clip)
    for left, right in zip(noisy, clean, strict=True):
        for key in right.keys() & left.keys():
            assert left[key] == right[key] or key.startswith("mismatch/"), key
    left, right = weights(noiseless), weights(tmp_path / "bypass")
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_noise_changes_training_but_never_leaves_the_trainer(noiseless: Path, tmp_path: Path) -> None:
    run(tmp_path / "noisy", "token-alp", "perturbation.std=0.1")
    noisy, clean = weights(tmp_path / "noisy"), weights(noiseless)
    assert any(not torch.equal(noisy[name], clean[name]) for name in noisy)
    # The engine, the model files and the exported weights know nothing of sigma; the checkpoint does.
    assert noisy.keys() == clean.keys()
    assert weights(tmp_path / "noisy", "perturbation").keys()
    # Sampled before the first update: the same responses and log-probs with and without noise.
    files = [folder / "trajectories" / "step-000001.parquet" for folder in (tmp_path / "noisy", noiseless)]
    for left, right in zip(*map(trajectories.read, files), strict=True):
        sampled = left.trajectory.completion.logp_behavior
        np.testing.assert_array_equal(sampled, right.trajectory.completion.logp_behavior)
        assert left.logp_current is not None
        # The probe is clean: the sampler's own policy.
        np.testing.assert_allclose(left.logp_current, sampled, atol=1e-4)


def test_perturbed_runs_measure_the_clean_policy_on_probe_steps_only(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", "token-alp", "diagnose.every=4")
    probed = [row["step"] for row in rows if "mismatch/k3" in row]
    assert probed == [1, 4, 6]
    assert [row["step"] for row in rows if "perturbation/dlogp" in row] == probed
    assert all("perturbation/sigma/0" in row for row in rows)
    read = trajectories.read(tmp_path / "run" / "trajectories" / "step-000002.parquet")
    assert all(row.logp_current is None for row in read)


def test_the_drift_of_each_response_is_split_into_mismatch_and_staleness(tmp_path: Path) -> None:
    """The first of two updates starts from the proximal policy, the second from what the first made of it."""
    *_, last = run(tmp_path / "run", "laboratory", "trainer.minibatches=2", "trainer.steps=2")
    assert undocumented(last) == []
    read = trajectories.read(tmp_path / "run" / "trajectories" / "step-000002.parquet")
    stale = []
    for row in read:
        assert row.logp_proximal is not None
        assert row.drift is not None
        ratio = (row.logp_proximal - row.trajectory.completion.logp_behavior)[row.trajectory.loss_mask]
        assert row.drift[0] == pytest.approx(ratio.mean(), abs=1e-6)
        stale.append(bool(row.drift[1]))
    assert stale == [False] * 8 + [True] * 8
    assert last["drift/staleness_q05"] <= last["drift/staleness_q50"] <= last["drift/staleness_q95"]


def test_soup_without_history_is_exactly_on_policy(tmp_path: Path) -> None:
    clip = ("objective.clip_low=0.2", "objective.clip_high=0.28")
    plain = run(tmp_path / "plain", "soup", "objective.name=token-bypass", *clip)
    expected = weights(tmp_path / "plain")
    for override in ("prefix.refresh=1", "prefix.ratio=0.0"):
        mixed = run(tmp_path / override, "soup", override)
        for left, right in zip(mixed, plain, strict=True):
            assert {key: left[key] for key in right} == right, override
            assert left["prefix/tokens"] == 0
        found = weights(tmp_path / override)
        assert all(torch.equal(found[name], weight) for name, weight in expected.items()), override


def test_the_tokens_a_cycle_sampled_are_counted_once(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", "soup", "prefix.refresh=3", "prefix.share=1", "trainer.steps=3")
    responses = sum(row["length/mean"] * row["trajectories/consumed"] for row in rows)
    kept = sum(row["prefix/length"] * row["trajectories/consumed"] for row in rows)
    sampled = sum(row["tokens/rollout"] for row in rows)
    # What was sampled is what was trained on, and the endings that prefixes lost.
    assert responses <= sampled <= responses + 2 * 16
    assert rows[0]["tokens/rollout"] > rows[1]["tokens/rollout"] + kept / 2


def test_soup_records_the_policy_of_every_token(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", "soup", "prefix.refresh=3", "prefix.ratio=0.5")
    assert [row["prefix/age"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert all((row["prefix/tokens"] > 0.2) == (row["prefix/age"] > 0) for row in rows)
    for row in trajectories.read(tmp_path / "run" / "trajectories" / "step-000003.parquet"):
        versions = row.trajectory.completion.policy_version
        assert set(versions.tolist()) <= {0, 2}
        assert versions[-1] == 2
        assert (np.diff(versions) >= 0).all()


def forwards(recipe: str, overrides: Sequence[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Passes of the trained model in a run."""
    from trimtab.trainer import learner

    count = 0
    real: Callable[..., Any] = learner.score

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(learner, "score", counted)
    run(out, recipe, *overrides)
    return count


def test_oapl_runs_no_proximal_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several updates per batch: a method over the proximal policy must run it, OAPL must not.
    # `update/policy_kl` is not measured in these two steps: its forwards would be counted.
    several = ("trainer.minibatches=2", "trainer.steps=2", "trainer.micro_batch_tokens=100000", "diagnose.every=3")
    assert forwards("oapl", several, tmp_path / "oapl", monkeypatch) == 2 * 2
    monkeypatch.undo()
    other = ("objective.name=token-tis", *several)
    assert forwards("oapl", other, tmp_path / "tis", monkeypatch) == 2 * 2 * 2


def versions_of_steps(out: Path) -> list[set[int]]:
    """The policy versions that wrote the tokens of each step."""
    steps = [trajectories.read(path) for path in sorted((out / "trajectories").glob("step-*.parquet"))]
    return [{int(v) for row in rows for v in row.trajectory.completion.policy_version} for rows in steps]


@pytest.mark.slow
def test_oapl_empties_its_buffer_at_the_refresh_of_an_asynchronous_sampler(tmp_path: Path) -> None:
    """`max_lag` alone would let responses of version 0 into the third batch."""
    lagged = ("trainer.sync_every=2", "trainer.max_lag=2", "engine.workers=1")
    run(tmp_path / "run", "oapl", *lagged)
    assert versions_of_steps(tmp_path / "run") == [{0}, {0}, {2}, {2}, {4}, {4}]


def test_luffy_joins_one_gold_answer_to_every_group(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", "luffy")
    assert all(row["expert/traces"] == 4 and row["expert/missing"] == row["expert/dropped"] == 0 for row in rows)
    read = trajectories.read(tmp_path / "run" / "trajectories" / "step-000001.parquet")
    external = [row for row in read if row.trajectory.off_policy]
    assert len(external) == 4
    assert len(read) == 16
    for row in external:
        assert row.trajectory.reward == 1.0
        assert row.trajectory.completion.text.rstrip(".") == row.trajectory.prompt.problem.answer.rstrip(".")
        assert np.isnan(row.trajectory.completion.logp_behavior).all()
    own = [row.trajectory.reward for row in read if not row.trajectory.off_policy]
    assert rows[0]["reward/mean"] == pytest.approx(np.mean(own))
    assert rows[0]["mismatch/k3"] < 1e-6  # float32 on both sides; one external token in it would show


@pytest.mark.parametrize(
    ("recipe", "override", "named"),
    [("token-alp", "perturbation.layers=7-9", "layers"), ("soup", "prefix.rule=nonsense", "nonsense")],
)
def test_what_does_not_fit_is_refused(recipe: str, override: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=named):
        train(load_config(recipe, [*SMALL, override]), out=tmp_path / "run")
    early = "layers" not in override  # how many layers there are is known from the model only
    assert (tmp_path / "run").exists() != early


def test_a_run_with_more_digits_starts_from_a_model_that_sorts_as_many(tmp_path: Path) -> None:
    config = load_config("laboratory", ["task.digits=6", "sft.steps=60"])
    six = laboratory_folder("laboratory", config)
    assert six != laboratory_folder()
    assert six == laboratory_folder(
        "laboratory", load_config("laboratory", ["task.digits=6", "sft.steps=60", "seed=3"])
    )
    assert laboratory_folder("laboratory", load_config("laboratory")) == laboratory_folder()
    sets = ["task.digits=6", "sft.steps=60", "trainer.steps=1", "eval.problems=64"]
    rows = run(tmp_path / "run", "laboratory", *sets)
    assert rows[0]["eval/sort/before"] > 0.2  # about .5 of 64, standard error .06; an untrained model sorts none


def test_training_reports_the_accuracy_of_the_clean_policy(tmp_path: Path) -> None:
    """The accuracy a rounded run reports is that of its exported weights in an engine that rounds nothing."""
    config = load_config(
        "laboratory", [*SMALL, "engine.quantize=int3", "optim.lr=1e-3", "trainer.steps=2", "eval.problems=128"]
    )
    reported = train(config, out=tmp_path / "run").metrics["eval/sort/greedy"]
    loaded = load(str(export(tmp_path / "run", tmp_path / "model", "last")), dtype=torch.float32)
    task = tasks.build("sort")
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.float32)
    with rewards.build([], task) as scorer:
        result = evaluation.evaluate(
            engine,
            loaded.tokenizer,
            task,
            scorer,
            problems=list(task.test[:128]),
            sampling=SamplingParams(temperature=0.0, max_tokens=task.max_tokens, stop=task.stop),
            seed=0,
        )
    assert reported == result.accuracy
