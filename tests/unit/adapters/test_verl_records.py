"""The log-probs of verl's trainers: what the plugin writes and shows to a monitor, and whether it matches verl.

verl itself needs Ray, CUDA builds and a cluster's worth of packages: its classes are stood in for by ones with the
signatures of 0.9.1, and those are compared with verl's own source where it is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.noisy_batch import ROWS, batch
from tests.support.peer_modules import install_module

import trimtab
from trimtab.adapters import verl_records
from trimtab.adapters.hooks import wrap
from trimtab.adapters.verl_records import NAMES, SYNCHRONOUS, install_dump, versions

ROOT = Path(__file__).parents[3]
V1_ARGUMENTS = ["self", "batch", "timing_raw", "rollout_data_dir"]
V0_ARGUMENTS = ["self", "batch", "reward_extra_infos_dict", "timing_raw", "rollout_data_dir"]


class Strings(list[str]):
    """tensordict's list of non-tensors has `tolist`."""

    def tolist(self) -> list[str]:
        return list(self)


@dataclass
class Meta:
    """verl's KVBatchMeta, as far as it is used."""

    keys: list[str]
    partition_id: str
    tags: list[dict[str, Any]]


def nested(*rows: Sequence[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


STORED = {
    "uid": Strings(["q1", "q1", "q2", "q2"]),
    "responses": nested([5, 6, 7], [8, 9], [5], [1, 1]),
    "response_mask": nested([1, 0, 1], [1, 1], [1], [1, 1]),
    "rollout_log_probs": nested([-1.0, 0.0, -0.5], [-2.0, -0.25], [-1.5], [0.0, 0.0]),
    "old_log_probs": nested([-1.25, 0.0, -0.5], [-2.0, -0.5], [-1.75], [0.0, 0.0]),
    "advantages": nested([0.5, 0.5, 0.5], [-0.5, -0.5], [1.0], [0.0, 0.0]),
    "rm_scores": nested([0.0, 0.0, 1.0], [0.0, 0.0], [0.5], [0.0, 0.0]),
}
META = Meta(
    ["q1_0_0", "q1_1_0", "q2_0_0", "pad"],
    "train",
    [
        {"min_global_steps": 6},
        {"min_global_steps": 4},
        {"min_global_steps": 6},
        {"min_global_steps": 6, "is_padding": True},
    ],
)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """verl's two trainers and the queue of V1, reduced to what is touched."""

    class PPOTrainer:
        def __init__(self) -> None:
            self.global_steps = 7
            self.written: list[tuple[Meta, str]] = []

        def _log_rollout_data(self, batch: Meta, timing_raw: dict[str, float], rollout_data_dir: str) -> None:
            assert timing_raw == {}
            self.written.append((batch, rollout_data_dir))

    class RayPPOTrainer:
        global_steps = 7

        def _log_rollout_data(
            self, batch: Any, reward_extra_infos_dict: dict[str, Any], timing_raw: dict, rollout_data_dir: str
        ) -> None:
            pass

    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        assert (keys, partition_id) == (META.keys, "train")
        # Fields that were not stored (entropy here) are left out, as the queue does.
        return {name: STORED[name] for name in select_fields if name in STORED}

    install_module(monkeypatch, "verl.trainer.ppo.v1.trainer_base", PPOTrainer=PPOTrainer)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.ray_trainer", types.SimpleNamespace(RayPPOTrainer=RayPPOTrainer))
    install_module(monkeypatch, "transfer_queue", kv_batch_get=kv_batch_get)
    return types.SimpleNamespace(v1=PPOTrainer, v0=RayPPOTrainer)


def test_a_batch_of_v1_is_written_as_diagnose_reads_it(tmp_path: Path, verl: Any) -> None:
    install_dump(str(tmp_path / "logps"))
    trainer = verl.v1()
    trainer._log_rollout_data(META, {}, str(tmp_path / "dump"))
    assert trainer.written == [(META, str(tmp_path / "dump"))], "verl's own dump stays"
    (path,) = (tmp_path / "logps").iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["uid"] for row in rows] == ["q1", "q1", "q2"], "padding is no response"

    diagnosis = trimtab.diagnose(tmp_path / "logps")
    origin, sample = diagnosis.measured.origin, diagnosis.measured.sample
    assert (origin.framework, origin.anchor) == ("verl", "proximal")
    assert origin.dropped == {}
    assert (origin.responses, origin.tokens, origin.trained) == (3, 6, 5)
    assert sample.behavior.tolist() == [-1.0, 0.0, -0.5, -2.0, -0.25, -1.5]
    assert sample.trainer.tolist() == [-1.25, 0.0, -0.5, -2.0, -0.5, -1.75]
    assert sample.mask.tolist() == [True, False, True, True, True, True]
    columns = {
        name: getattr(sample, name) for name in ("ids", "version", "proximal_version", "group", "reward", "step")
    }
    assert {name: values.tolist() for name, values in columns.items()} == {
        "ids": [5, 6, 7, 8, 9, 5],
        "version": [6, 6, 6, 4, 4, 6],
        "proximal_version": [6, 6, 6],
        "group": [0, 0, 1],
        "reward": [1.0, 0.0, 0.5],
        "step": [7, 7, 7],
    }
    np.testing.assert_allclose(sample.advantage, [0.5, -0.5, 1.0])  # type: ignore[arg-type]
    # Ages 0, 0, 2, 2, 0: two of five trained tokens are two publications old.
    assert dict(zip(*(getattr(diagnosis.measured.views["version"], n) for n in ("labels", "count")), strict=True)) == {
        "0": 3,
        "2": 2,
    }


def test_unknown_versions_leave_out_a_view_and_no_response(tmp_path: Path, verl: Any) -> None:
    install_dump(str(tmp_path / "logps"))
    unknown = Meta(META.keys, META.partition_id, [{}, {"min_global_steps": None}, {}, {"is_padding": True}])
    verl.v1()._log_rollout_data(unknown, {}, str(tmp_path))
    diagnosis = trimtab.diagnose(tmp_path / "logps")
    assert diagnosis.measured.origin.responses == 3
    assert "policy_version" in diagnosis.measured.origin.missing


def test_a_batch_of_v0_is_cut_to_its_responses(tmp_path: Path, verl: Any) -> None:
    install_dump(str(tmp_path))
    tensors = {name: padded(STORED[name]) for name in NAMES if name in STORED}
    attention = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    tensors |= {"attention_mask": attention, "token_level_scores": padded(STORED["rm_scores"])}
    uid = np.array(["q1", "q1", "q2", "q2"], dtype=object)
    batch = types.SimpleNamespace(batch=tensors, non_tensor_batch={"uid": uid})
    verl.v0()._log_rollout_data(batch, {}, {}, "")
    (path,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["responses"] for row in rows] == [[5, 6, 7], [8, 9], [5], [1, 1]]
    assert [row["rollout_log_probs"] for row in rows] == [[-1.0, 0.0, -0.5], [-2.0, -0.25], [-1.5], [0.0, 0.0]]
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.5, 0.0]
    # v0 sends its weights before every generation; in step 7, six steps are behind them.
    assert {(row["policy_version"], row["proximal_version"]) for row in rows} == {(6, 6)}
    assert trimtab.diagnose(tmp_path).measured.origin.framework == "verl"


def test_versions_are_those_of_the_servers_and_assumed_where_weights_are_sent_before_every_generation() -> None:
    trainers = {name: type(name, (), {"global_steps": 7})() for name in ("RayPPOTrainer", "PPOTrainerSync", "Other")}
    for trainer in trainers.values():
        assert versions(trainer, [4, 6]) == [4, 6]
    unknown = {name: versions(trainer, [4, None]) for name, trainer in trainers.items()}
    assert unknown == {"RayPPOTrainer": [6, 6], "PPOTrainerSync": [6, 6], "Other": None}
    # verl's experimental trainer counts publications, and several steps are between two of them.
    publications = type("FullyAsyncTrainer", (), {"global_steps": 7, "current_param_version": 2})()
    assert versions(publications, [1, 2]) is None


def padded(values: torch.Tensor) -> torch.Tensor:
    return values.to_padded_tensor(0.0)


def test_a_batch_without_the_sampler_s_log_probs_is_refused(
    tmp_path: Path, verl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_dump(str(tmp_path / "logps"))
    monkeypatch.delitem(STORED, "rollout_log_probs")
    with pytest.raises(trimtab.TrimtabError, match=r"rollout\.calculate_log_probs=True"):
        verl.v1()._log_rollout_data(META, {}, "")
    assert not (tmp_path / "logps").exists()


def test_the_stand_ins_take_what_verl_passes(verl: Any) -> None:
    for trainer, names in ((verl.v1, V1_ARGUMENTS), (verl.v0, V0_ARGUMENTS)):
        code = trainer._log_rollout_data.__code__
        assert list(code.co_varnames[: code.co_argcount]) == names


def source() -> Path:
    """verl's package: installed, in the environment of the benchmarks, or where TRIMTAB_VERL says."""
    spec = importlib.util.find_spec("verl")
    places = [Path(path) for path in (spec.submodule_search_locations or ())] if spec else []
    places += [Path(named) / "verl"] if (named := os.environ.get("TRIMTAB_VERL")) else []
    places += ROOT.glob(".venv-bench/lib/python*/site-packages/verl")
    if not places:
        pytest.skip("verl is not installed: make bench-install, or name its folder in TRIMTAB_VERL")
    return places[0]


def arguments(tree: ast.AST, function: str) -> list[str]:
    (result,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    return [argument.arg for argument in result.args.args]


@pytest.mark.slow  # it reads an environment that continuous integration makes beside `make test`
def test_verls_own_source_still_matches() -> None:
    root = source()
    v1 = (root / "trainer/ppo/v1/trainer_base.py").read_text()
    assert arguments(ast.parse(v1), "_log_rollout_data") == V1_ARGUMENTS
    v0 = (root / "trainer/ppo/ray_trainer.py").read_text()
    assert arguments(ast.parse(v0), "_log_rollout_data") == V0_ARGUMENTS
    # The names in the queue, what a row is tagged with, and that the dump comes before the queue is cleared.
    texts = {node.value for node in ast.walk(ast.parse(v1)) if isinstance(node, ast.Constant)}
    assert {*NAMES, "uid", "rm_scores", "is_padding", "min_global_steps"} <= texts
    assert v1.index("self._log_rollout_data(batch") < v1.index("tq.kv_clear(keys=batch.keys")
    for path in ("trainer/ppo/v1/agent_loop_tq.py", "experimental/agent_loop/agent_loop.py"):
        assert '"min_global_steps"' in (root / path).read_text()
    # What the monitor follows, and that the synchronous trainers send their weights at every step.
    assert arguments(ast.parse(v1), "fit") == ["self", "agent_loop_manager"]
    assert arguments(ast.parse(v1), "_compute_advantage") == ["self", "batch", "metrics"]
    assert arguments(ast.parse(v0), "fit") == ["self"]
    sync = (root / "trainer/ppo/v1/trainer_sync.py").read_text()
    for name, text in zip(SYNCHRONOUS, (v0, sync), strict=True):
        assert f"class {name}" in text
        assert "update_weights(self.global_steps)" in text
    assert "self.current_param_version" in (root / "experimental/fully_async_policy/fully_async_trainer.py").read_text()
    assert "  use_v1: true" in (root / "trainer/config/ppo_trainer.yaml").read_text()
    assert "calculate_log_probs" in (root / "trainer/config/rollout/rollout.yaml").read_text()


LAST = 4
Add = Callable[[Any, Any], Any]


def shown(step: int) -> Any:
    """A batch of verl's driver; the first response is one step old in step 3."""
    one = batch(step)
    fields = {"old_log_probs": one["logp_train"], "rollout_log_probs": one["logp_rollout"]}
    versions = [step - 1 - (step == 3), *[step - 1] * (ROWS - 1)]
    return types.SimpleNamespace(
        batch=fields | {"response_mask": one["mask"].long()},
        non_tensor_batch={"min_global_steps": np.array(versions, dtype=object)},
        tags=[{"min_global_steps": version} for version in versions],
    )


def fit_v0(add: Add) -> Any:
    class RayPPOTrainer:
        def fit(self) -> str:
            for self.global_steps in range(1, LAST + 1):
                add(shown(self.global_steps), {})
            return "trained"

    return RayPPOTrainer


def fit_v1(add: Add) -> Any:
    """Its tensors leave the queue without their tags."""

    class PPOTrainer:
        def fit(self) -> str:
            for self.global_steps in range(1, LAST + 1):
                self._compute_advantage(shown(self.global_steps), {})
            return "trained"

        def _compute_advantage(self, batch: Any, metrics: dict[str, float]) -> None:
            metrics.update(add(types.SimpleNamespace(batch=batch.batch, non_tensor_batch={}), {})[1])

    return PPOTrainer


@pytest.mark.parametrize("trainer", [fit_v0, fit_v1])
def test_updates_versions_and_the_end_are_those_of_the_trainer(
    trainer: Callable[[Add], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = verl_records.Watch(str(tmp_path))
    kind = trainer(wrap(lambda batch, _: (batch, {}), watch.observe))
    monkeypatch.setattr(verl_records, "trainers", lambda: [(kind, None)])
    watch.follow()
    assert kind().fit() == "trained"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]  # The last one is there once the monitor is closed.
    assert [row["age"] for row in rows] == pytest.approx([0, 0, 1 / ROWS, 0])
    sample = [json.loads(line) for line in (tmp_path / "sample.jsonl").open()]
    assert sum(row["policy_version"] != row["step"] for row in sample) == 1
