"""Runs that sample from a part of the vocabulary: the trainer renormalises over the same part, or nothing is trained.

Sampler and trainer are both float32 here, so that what the sets do not explain is float error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import forked

from trimtab.errors import TrimtabError
from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.run import EngineFactory, train
from trimtab.types import Completion, Engine

pytestmark = pytest.mark.e2e

CUT = ("sampling.top_p=0.8", "sampling.top_k=5", "sampling.temperature=0.9")
SMALL = ("trainer.steps=2", "trainer.prompts=4", "trainer.samples=4", "eval.problems=4", "checkpoint.every=1")
# Of a log-prob in float32: two kernels round logits of about 10 (steps of 1e-6), a temperature and a sum over the set.
# Measured 7e-6; one id missing in one set makes 1.6e-2.
FLOAT_ERROR = 5e-5

Change = Callable[[Completion], Completion]


def metrics(out: Path, *sets: str, engines: EngineFactory | None = None) -> list[dict[str, Any]]:
    train(load_config("laboratory", [*SMALL, *sets]), out=out, engines=engines)
    return read_metrics(out / "metrics.jsonl")


@pytest.mark.parametrize("cut", [CUT[:1], CUT[1:2], pytest.param(CUT, marks=pytest.mark.slow)])
def test_ratios_are_one_in_this_process_and_from_another(tmp_path: Path, cut: Sequence[str]) -> None:
    rows = metrics(tmp_path / "here", *cut)
    for row in rows:
        assert row["mismatch/abs_diff_max"] < FLOAT_ERROR
        assert row["mismatch/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    if cut == CUT:
        apart = metrics(tmp_path / "apart", *cut, "engine.workers=1")
        same = ("mismatch/abs_diff_max", "mismatch/ratio_mean", "reward/mean", "optim/grad_norm")
        assert [[row[key] for key in same] for row in apart] == [[row[key] for key in same] for row in rows]


def test_invariant_numerics_are_exact_over_the_sets_too(tmp_path: Path) -> None:
    for row in metrics(tmp_path / "run", *CUT, "numerics=invariant"):
        assert row["mismatch/abs_diff_max"] == 0.0
        assert row["mismatch/tokens"] > 100


def test_ratios_are_one_where_an_older_policy_began(tmp_path: Path) -> None:
    """Weights hardly move, so that the older policy is the current one: what is left are the sets of the prefixes."""
    soup = ("objective.name=soup", "prefix.refresh=3", "prefix.ratio=0.5", "prefix.share=2", "optim.lr=1e-20")
    rows = metrics(tmp_path / "run", *CUT, *soup, "trainer.steps=3")
    assert all(row["mismatch/abs_diff_max"] < FLOAT_ERROR for row in rows)
    assert rows[1]["prefix/tokens"] > 0.2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ratios_are_one_on_two_ranks(python: forked.Run, tmp_path: Path) -> None:
    sets = [f"--set={entry}" for entry in (*SMALL, *CUT, "trainer.steps=1", "trainer.micro_batch_tokens=200")]
    done = python("-m", "trimtab", "train", "laboratory", "--out", tmp_path / "run", *sets, ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    [row] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["mismatch/abs_diff_max"] < FLOAT_ERROR
    assert row["mismatch/tokens"] > 100


class Tampered:
    """An engine whose first completion is changed on its way out."""

    def __init__(self, engine: Engine, change: Change) -> None:
        self._engine, self._change = engine, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, **keywords: Any) -> list[list[Completion]]:
        groups = self._engine.generate(*args, **keywords)
        if groups[0][0].sampling_mask is not None:
            groups[0][0] = self._change(groups[0][0])
        return groups


def tampered(change: Change) -> EngineFactory:
    def engines(config: Any, loaded: LoadedModel, folder: Path) -> list[Any]:
        return [Tampered(engine, change) for engine in build_engines(config, loaded, folder)]

    return engines


def without_one(completion: Completion) -> Completion:
    """One id less in the largest set, the first that was not sampled."""
    assert completion.sampling_mask is not None
    sets = list(completion.sampling_mask)
    token = int(np.argmax([len(ids) for ids in sets]))
    others = sets[token] != completion.response_ids[token]
    sets[token] = np.delete(sets[token], np.flatnonzero(others)[0])
    return replace(completion, sampling_mask=tuple(sets))


def test_sets_that_are_lost_on_the_way_end_the_run(tmp_path: Path) -> None:
    lost = tampered(lambda one: replace(one, sampling_mask=None))
    with pytest.raises(TrimtabError, match="carry no sampling masks: ratios over the whole vocabulary"):
        metrics(tmp_path / "run", "sampling.top_k=3", "trainer.steps=1", engines=lost)


def test_one_id_less_in_one_set_is_seen_in_the_ratios(tmp_path: Path) -> None:
    """Nothing says which ids a set must hold, but the ratio of its token is no longer 1: the tests above can fail."""
    sets = ("sampling.top_k=14", "sampling.temperature=2.0", "trainer.steps=1")
    [row] = metrics(tmp_path / "run", *sets, engines=tampered(without_one))
    assert row["mismatch/abs_diff_max"] > 100 * FLOAT_ERROR


def test_without_renormalisation_the_mean_ratio_is_the_kept_mass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are drawn from mu = pi / Z on a set of mass Z under pi. Without the sets each ratio pi / mu is Z."""
    monkeypatch.setattr("trimtab.trainer.features.sampler_data.pack_kept", lambda *_: _Nothing())
    [row] = metrics(tmp_path / "run", "sampling.top_p=0.7", "sampling.temperature=1.5", "trainer.steps=1")
    assert 0.7 < row["mismatch/ratio_mean"] < 0.99
    assert row["mismatch/abs_diff_max"] <= -np.log(0.7) + FLOAT_ERROR


class _Nothing:
    """What a trainer without mask replay has in the place of sets."""

    def to(self, _device: Any) -> None:
        return None
