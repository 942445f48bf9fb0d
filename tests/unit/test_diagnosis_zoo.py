"""The zoo of planted faults: exact streams obey the contract of sampling, and every fault breaks what it says."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CAUSES = {
    *("placeholder", "misaligned", "retokenized", "log-base", "wrong-token", "copied", "temperature", "raw-logprobs"),
    *("truncated-sampling", "undelivered", "stale", "stale-cache", "non-finite", "routing"),
    "unexplained",
}
"""Causes that are planted; `precision` and `quantized` are the noise of bases."""
Z = 5.0  # standard errors: one false alarm in 1.7 million


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Makes the modules of benchmarks/ importable here."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@functools.cache
def exact(kind: str, level: int = 1, size: float = 0.05) -> Any:
    from zoo.synthetic import synthetic

    return synthetic(size, kind, level)


def excess(stream: Any, numerator: str, denominator: str) -> float:
    """Standard errors of the mean ratio above 1."""
    ratio = np.exp((stream[numerator] - stream[denominator])[stream.mask])
    return float((ratio.mean() - 1) / (ratio.std() / np.sqrt(len(ratio))))


@pytest.mark.parametrize("kind", ["plain", "turns", "aged", "steps", "cached", "routed", "prompts"])
def test_the_mean_ratio_is_one_whatever_the_trainer(kind: str) -> None:
    stream = exact(kind)
    assert abs(excess(stream, "trainer", "behavior")) < Z
    assert stream.k3 > 1e-4


def test_tokens_follow_the_temperature_and_the_truncation_that_are_reported() -> None:
    cold, cut = exact("cold"), exact("cut")
    for stream in (cold, cut):
        assert abs(excess(stream, "trainer", "behavior")) < Z
        assert excess(stream, "behavior", "raw") > Z  # raw log-probs are not those of the tokens' distribution
    assert excess(cut, "trainer_raw", "behavior") < -Z  # the mass that was cut off


def test_every_cause_is_planted_at_three_strengths_and_changes_the_log_probs() -> None:
    from zoo.plants import PAIRS, SINGLE

    assert {plant.cause for plant in SINGLE} == CAUSES
    for plant in (*SINGLE, *PAIRS):
        for level in (1,) if plant.pair else range(3):
            stream = exact(plant.kind, level)
            random = np.random.default_rng(level)
            planted = plant.change(stream, level, random)
            if plant.kind in ("plain", "turns", "cold", "cut"):
                names = ("behavior", "trainer", "null")
                assert any(_column(planted, name) != _column(stream, name) for name in names), plant.name
            else:
                assert stream.k3 > 3 * exact("plain").k3, plant.name


def _column(stream: Any, name: str) -> bytes:
    return stream.tokens[name].tobytes() if name in stream.tokens else b""


def test_old_weights_and_stale_caches_are_further_away_with_age() -> None:
    def k3(stream: Any, rows: np.ndarray) -> float:
        return stream.take(np.flatnonzero(rows)).k3

    aged = exact("aged")
    age = aged.rows["proximal_version"] - aged["version"][aged.starts[:-1]]
    sizes = [k3(aged, age == one) for one in range(4)]
    assert sizes == sorted(sizes)
    assert sizes[3] > 10 * sizes[0]
    cached = exact("cached")
    step, prompt = cached.rows["step"], cached.rows["prompt"]
    assert (cached["version"] == step[cached.row]).all()
    first = np.array(
        [s == step[(prompt == p) & ((step < 4) == (s < 4))].min() for s, p in zip(step, prompt, strict=True)]
    )
    assert k3(cached, first) < 2 * exact("plain").k3
    assert k3(cached, ~first & (step == 3)) > 10 * k3(cached, first)
    assert k3(cached, step == 4) < 2 * exact("plain").k3  # restarted


def test_resampled_responses_are_whole_and_never_repeat_a_value() -> None:
    plain = exact("plain")
    drawn = plain.resampled(40_000, np.random.default_rng(0))
    assert 40_000 <= len(drawn) < 40_000 + plain.lengths.max()
    values = drawn["behavior"][drawn["behavior"] < -0.01]
    assert len(np.unique(values)) == len(values)
    assert drawn.k3 == pytest.approx(plain.k3, rel=0.1)
    few = plain.resampled(600, np.random.default_rng(0))
    assert len(np.unique(few["behavior"])) == len(few)


def test_answers_are_scored_by_what_was_planted(tmp_path: Path) -> None:
    from zoo.bases import exact_bases
    from zoo.cells import Cell, run
    from zoo.plants import NOTHING, SINGLE

    temperature = next(plant for plant in SINGLE if plant.name == "temperature")
    base = exact_bases()[1]
    right = run(Cell(base, temperature, 2, 5_000), tmp_path / "cell.parquet")
    assert right.truth == right.answer.first == "temperature"
    assert right.right
    left_out = run(Cell(base, temperature, 2, 5_000, 0, "temperature"), tmp_path / "cell.parquet")
    assert "temperature" not in left_out.answer.names
    clean = run(Cell(base, NOTHING, 0, 5_000), tmp_path / "cell.parquet")
    assert clean.truth == clean.answer.first == "precision"


@pytest.mark.slow
def test_only_a_lag_that_versions_state_needs_no_repair(tmp_path: Path) -> None:
    from zoo.bases import exact_bases
    from zoo.cells import Cell, run
    from zoo.plants import PAIRS, SINGLE

    for base in exact_bases()[1:]:
        for plant in (*SINGLE, *PAIRS):
            result = run(Cell(base, plant, 1, 600), tmp_path / "cell.parquet")
            if result is not None and plant.name != "stale":
                assert "Nothing has to be repaired" not in result.answer.step, (base.name, plant.name)
    stale = next(plant for plant in SINGLE if plant.name == "stale")
    stated = run(Cell(exact_bases()[1], stale, 1, 5_000), tmp_path / "cell.parquet")
    assert stated.answer.step.startswith("Nothing has to be repaired; use the correction")


@functools.cache
def computed(name: str, level: int = 2) -> Any:
    from zoo.computed import compute
    from zoo.kinds import KINDS

    return compute(next(kind for kind in KINDS if kind.name == name), level, 600)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("rope: base", "trainer"),
        ("packed sequences attend", "trainer"),
        ("undelivered", "sampler"),
        ("top-k", "sampler"),
        ("8-bit trainer", "trainer"),
        ("prefix cache of another request", "sampler"),
        ("adapter on attention only", "sampler"),
        ("state across packed sequences", "trainer"),
        ("reasoning of the last turn kept", "trainer"),
        ("log-probs of another rank", "sampler"),
    ],
)
def test_a_computed_fault_is_on_one_side(name: str, side: str) -> None:
    data = computed(name)
    other = {"trainer": "behavior", "sampler": "trainer"}[side]
    right = data.stream["rescored"]
    assert data.wrong == side
    assert data.stream.changed(trainer=right, behavior=data.stream[other]).k3 < 3 * data.noise + 1e-6
    assert data.stream.k3 > 10 * data.noise


def test_computed_tokens_are_drawn_from_what_the_sampler_reports() -> None:
    drawn = ("rotary factors change behind the cache", "temperature of some requests")
    for name in ("int8 weights", "attention scale", "dropout", "weights change within responses", *drawn):
        stream = computed(name, 0).stream
        assert abs(excess(stream, "trainer", "behavior")) < Z


def test_faults_of_some_tokens_leave_the_others_as_they_are() -> None:
    def wrong(name: str, column: str) -> tuple[Any, np.ndarray]:
        stream = computed(name).stream
        return stream, np.abs(stream[column] - stream["rescored"]) > 0.1

    for name in ("end token in place of the last one", "end token appended with log-prob 0"):
        stream, off = wrong(name, "behavior")
        assert off[stream.left == 0].mean() > 0.8
        assert off[stream.left > 0].mean() < 0.02
    stream, off = wrong("labels shifted within slices", "trainer")
    assert 6 < off.sum() / stream.responses < 14  # of the borders of 16 slices, all but the first and the middle one
    stream, off = wrong("replayed experts of another token", "trainer")
    place = stream.position + np.repeat(stream.rows["prompt_length"], stream.lengths)
    assert off[place <= 40].mean() < 0.1 < 0.3 < off[(place > 41) & (place <= 104)].mean()


def test_settings_of_the_sampler_act_as_they_say() -> None:
    import torch

    from zoo.kinds import settings

    z, seen = torch.tensor([[2.0, 1.0, -1.0, 0.0]]), torch.tensor([[1.0, 0, 1, 0]])
    inf = torch.inf
    assert settings(repetition=2.0)(z, seen).tolist() == [[1.0, 1.0, -2.0, 0.0]]
    assert settings(presence=0.5)(z, seen).tolist() == [[1.5, 1.0, -1.5, 0.0]]
    assert settings(temperature=0.5)(z, seen).tolist() == [[4.0, 2.0, -2.0, 0.0]]
    assert settings(top_k=2)(z, seen).tolist() == [[2.0, 1.0, -inf, -inf]]
    assert settings(min_p=0.2)(z, seen).tolist() == [[2.0, 1.0, -inf, -inf]]  # exp(-1) = .37, exp(-2) = .14
    assert settings(top_p=0.7)(z, seen).tolist() == [[2.0, 1.0, -inf, -inf]]  # masses .64, .24
    assert settings(banned=2)(z, seen).tolist() == [[2.0, -inf, -inf, 0.0]]


def test_every_file_of_a_computed_fault_is_read_as_it_was_written(tmp_path: Path) -> None:
    from zoo.answers import diagnosed
    from zoo.layouts import FILES, write

    for name in ("undelivered", "temperature, stated"):
        data = computed(name)
        for layout in FILES:
            found = diagnosed(write(data, tmp_path / name / layout, layout, rescored=True))
            assert found.measured.origin.trained == len(data.stream)
            assert found.measured.size.mismatch["k3"] == pytest.approx(data.stream.k3, rel=1e-4)


def test_kinds_have_names_of_their_own_and_both_halves_hold_many() -> None:
    from zoo.kinds import KINDS, half

    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names) > 50
    counts = {side: sum(half(name) == side for name in names) for side in "ABCDEF"}
    assert counts == {"A": 31, "B": 24, "C": 10, "D": 26, "E": 16, "F": 16}
