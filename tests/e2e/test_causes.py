"""Every cause planted in log-probs of the laboratory and of the bundled model, and clean runs that must stay clean."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import planted_causes as plant

from trimtab.trainer.models.load import BUNDLED, load
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Prompt, SamplingParams

pytestmark = pytest.mark.slow

ASKED = (
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue.",
    "Give me a recipe with lentils.",
    "Write a Python function that reverses a list.",
    "Translate 'good morning' to Spanish and German.",
)
PLAIN = ("Once upon a time", "1, 2, 3, 4, 5, 6, 7, 8,", "Monday, Tuesday, Wednesday, Thursday,", "def fibonacci(n):\n")
SIZES = (500, 2000, 10**6)
"""Tokens of the parts that are diagnosed; there are fewer than the last."""


class Source:
    """A model and `sample(...)`, cached by its arguments. settings: of every response."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], samples: int, **settings: Any) -> None:
        self.model, self.tokenizer, self.prompts, self.samples = model, tokenizer, prompts, samples
        self.settings = settings
        self._cache: dict[Any, plant.Rollout] = {}

    def sample(self, bits: int = 0, dtype: str = "float32", **sampling: Any) -> plant.Rollout:
        key = (bits, dtype, *sorted(sampling.items()))
        if key not in self._cache:
            model = plant.rounded(self.model, bits) if bits else self.model
            contract = SamplingParams(**self.settings, **sampling)
            self._cache[key] = plant.sample(model, self.tokenizer, self.prompts, self.samples, contract, dtype)
        return self._cache[key]

    def rescore(self, rollout: plant.Rollout, **keywords: Any) -> np.ndarray:
        return plant.rescore(self.model, rollout, **keywords)


@pytest.fixture(scope="module")
def laboratory() -> Source:
    loaded = load(str(laboratory_folder()), dtype=torch.float32)
    digits = np.random.default_rng(0).integers(0, 10, (150, 10))
    prompts = plant.prompts_of(["".join(map(str, row)) + "=" for row in digits], loaded.tokenizer)
    return Source(loaded.model, loaded.tokenizer, prompts, 6, max_tokens=11, stop=(".",))


@pytest.fixture(scope="module")
def bundled() -> Source:
    loaded = load(BUNDLED, dtype=torch.float32)
    asked = ([{"role": "user", "content": text}] for text in ASKED)
    tokenizer = loaded.tokenizer
    chats = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in asked]
    return Source(loaded.model, tokenizer, plant.prompts_of([*chats, *PLAIN], tokenizer), 2, max_tokens=48)


@pytest.fixture(scope="module", params=["laboratory", "bundled"])
def source(request: pytest.FixtureRequest) -> Source:
    return request.getfixturevalue(request.param)


def test_a_float32_run_on_policy_has_no_cause(source) -> None:
    rollout = source.sample()
    clean = plant.table(rollout, source.rescore(rollout), entropy=rollout.entropy, ids=rollout.ids)
    for tokens in SIZES:
        assert plant.names(plant.part(clean, tokens)) == set()


@pytest.mark.parametrize("both", [False, True])
def test_bfloat16_is_precision_at_most(source, both) -> None:
    rollout = source.sample(dtype="bfloat16")
    model = copy.deepcopy(source.model).to(torch.bfloat16) if both else source.model
    for columns in ({}, {"ids": rollout.ids}):
        noisy = plant.table(rollout, plant.rescore(model, rollout), **columns)
        for tokens in SIZES:
            assert plant.names(plant.part(noisy, tokens)) == {"precision"}


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.3])
def test_temperatures_of_trainer_and_sampler(source, temperature) -> None:
    drawn, plain = source.sample(temperature=temperature), source.sample()
    scored, ours = source.rescore(drawn, temperature=temperature), source.rescore(drawn)
    assert plant.names(plant.table(drawn, ours)) == {"temperature"}
    other = plant.table(plain, source.rescore(plain, temperature=temperature))
    for tokens in SIZES:
        assert plant.names(plant.part(other, tokens)) == {"temperature"}
    assert plant.names(plant.table(drawn, scored, entropy=drawn.entropy)) == set()
    # Tokens follow the trainer's temperature, the sampler reports the model's own log-probs.
    assert "raw-logprobs" in plant.names(plant.table(drawn, scored, behavior=ours))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        *(("laboratory", cut) for cut in ({"top_p": 0.9}, {"top_p": 0.99}, {"top_k": 2})),
        *(("bundled", cut) for cut in ({"top_p": 0.95}, {"top_k": 20})),
    ],
)
def test_truncation_on_either_side(name, cut, request) -> None:
    source = request.getfixturevalue(name)
    drawn = source.sample(**cut)
    whole, kept = source.rescore(drawn), source.rescore(drawn, kept=True)
    for tokens in (500, 10**6):
        assert plant.names(plant.part(plant.table(drawn, whole), tokens)) == {"truncated-sampling"}
        assert plant.names(plant.part(plant.table(drawn, kept, entropy=drawn.entropy), tokens)) == set()
        assert plant.names(plant.part(plant.table(drawn, kept, behavior=whole), tokens)) == {"raw-logprobs"}


def test_raw_log_probs_on_both_sides_show_in_the_contract(laboratory) -> None:
    drawn = laboratory.sample(top_p=0.9)
    whole = laboratory.rescore(drawn)
    silent = plant.table(drawn, whole, behavior=whole)
    assert plant.names(silent) == {"copied"}  # more these numbers alone do not say
    responses = silent.responses
    reported_raw = plant.table(
        drawn, whole, behavior=whole, temperature=np.full(responses, 0.7), raw=np.ones(responses, bool)
    )
    assert plant.names(reported_raw) == {"copied", "raw-logprobs"}
    processed = plant.table(drawn, laboratory.rescore(drawn, kept=True), top_p=np.full(responses, 0.9))
    assert plant.names(processed) == set()


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_shifts_of_all_of_some_and_of_the_rest(source, by) -> None:
    rollout = source.sample()
    scored = source.rescore(rollout)
    for where in ({}, {"every": 4}, {"since": len(scored) // len(rollout.responses) // 2}):
        moved = plant.table(rollout, plant.shifted(rollout.starts, scored, by, **where))
        causes = plant.causes(moved)
        assert [cause.name for cause in causes] == ["misaligned"]
        assert f"moved by {by:+d}" in causes[0].evidence


def test_log_probs_of_other_responses(laboratory) -> None:
    rollout = laboratory.sample()
    scored = laboratory.rescore(rollout)
    starts, mixed = rollout.starts, scored.copy()
    same = [row for row in range(len(starts) - 1) if starts[row + 1] - starts[row] == 11]
    for row, other in zip(same, same[1:] + same[:1], strict=True):
        mixed[starts[row] : starts[row + 1]] = scored[starts[other] : starts[other + 1]]
    causes = plant.causes(plant.table(rollout, mixed))
    assert [cause.name for cause in causes] == ["misaligned"]
    assert "another response" in causes[0].evidence


@pytest.mark.parametrize(("name", "bits", "least"), [("laboratory", 4, 500), ("laboratory", 3, 500), ("bundled", 8, 0)])
def test_rounded_weights(name, bits, least, request) -> None:
    source = request.getfixturevalue(name)
    rollout = source.sample(bits=bits)
    coarse = plant.table(rollout, source.rescore(rollout), ids=rollout.ids)
    for tokens in (least or 10**6, 10**6):
        assert plant.names(plant.part(coarse, tokens)) == {"quantized"}


def test_jumps_in_data_of_one_turn_are_not_noise_and_not_retokenized(laboratory) -> None:
    rollout, generator = laboratory.sample(dtype="bfloat16"), np.random.default_rng(1)
    scored = laboratory.rescore(rollout)
    hit = generator.random(len(scored)) < 0.005
    scored[hit] = -generator.uniform(6, 14, hit.sum())
    assert plant.names(plant.table(rollout, scored)) == {"unexplained"}


def test_small_jumps_where_turns_meet(laboratory) -> None:
    rollout, generator = laboratory.sample(bits=4), np.random.default_rng(2)
    scored = laboratory.rescore(rollout)
    starts = rollout.starts
    place = np.arange(len(scored)) - starts[np.repeat(np.arange(len(starts) - 1), np.diff(starts))]
    hit = (place == 6) & (generator.random(len(scored)) < 0.5)
    scored[hit] -= 4.0
    turns = plant.table(rollout, scored, mask=(place < 4) | (place > 5))
    assert plant.names(turns) == {"retokenized", "quantized"}


@pytest.mark.parametrize(("updates", "lr"), [(1, 1e-4), (4, 1e-4), (4, 3e-4)])
def test_lag_shows_in_ages_and_in_advantages(laboratory, updates, lr) -> None:
    rollout = laboratory.sample()
    text = [completion.text for _, completion in rollout.responses]
    reward = np.array(
        [
            float(t[:10] == "".join(sorted(rollout.prompts[p].text[:10])))
            for (p, _), t in zip(rollout.responses, text, strict=True)
        ]
    )
    mean = np.bincount(rollout.group, reward) / np.bincount(rollout.group)
    advantage = (reward - mean[rollout.group]) / 0.5
    later = plant.rescore(plant.improved(laboratory.model, rollout, advantage, updates=updates, lr=lr), rollout)
    assert "stale" in plant.names(plant.table(rollout, later, advantage=advantage))
    assert "stale" in plant.names(plant.table(rollout, later, reward=reward, group=rollout.group))
    # Half of the responses are fresh and come from a 4-bit sampler: lag on one half, rounding on the other.
    other = laboratory.sample(bits=4)
    half = len(rollout.responses) // 2
    joined = type(rollout)(rollout.prompts, rollout.responses[:half] + other.responses[half:])
    fresh = laboratory.rescore(other)[other.starts[half] :]
    trainer = np.concatenate([later[: rollout.starts[half]], fresh])
    versions = np.where(np.arange(len(trainer)) < rollout.starts[half], 0, updates)
    aged = plant.table(joined, trainer, version=versions, proximal_version=np.full(len(joined.responses), updates))
    if (lr, updates) != (1e-4, 1):  # one small update moves logits less than four bits do
        assert plant.names(aged) == {"stale", "quantized"}


def test_rounded_weights_are_not_called_stale(laboratory) -> None:
    rollout = laboratory.sample(bits=3)
    reward = np.array([float(list(c.text[:10]) == sorted(c.text[:10])) for _, c in rollout.responses])
    scored = laboratory.rescore(rollout)
    responses = len(rollout.responses)
    assert plant.names(plant.table(rollout, scored, reward=reward, group=rollout.group)) == {"quantized"}
    ages = np.arange(responses) % 2
    mixed = plant.table(rollout, scored, version=np.zeros(len(scored), np.int64), proximal_version=ages)
    assert plant.names(mixed) == {"quantized"}


@pytest.mark.parametrize(
    ("sampling", "bits", "expected"),
    [
        ({"temperature": 0.7, "top_p": 0.9}, 0, {"temperature", "truncated-sampling"}),
        ({"top_p": 0.9}, 4, {"truncated-sampling", "quantized"}),
        ({"temperature": 0.7}, 4, {"temperature", "quantized"}),
    ],
)
def test_two_causes_at_once(laboratory, sampling, bits, expected) -> None:
    rollout = laboratory.sample(bits=bits, **sampling)
    scored = laboratory.rescore(rollout)
    assert plant.names(plant.table(rollout, scored)) == expected
    assert "misaligned" in plant.names(plant.table(rollout, plant.shifted(rollout.starts, scored, 1)))


def test_noise_cut_off_at_probability_one_is_no_truncation(laboratory) -> None:
    rollout, generator = laboratory.sample(), np.random.default_rng(3)
    noise = 0.3 * generator.normal(size=len(rollout.behavior)) * np.minimum(1, -3 * rollout.behavior)
    assert plant.names(plant.table(rollout, np.minimum(rollout.behavior + noise, 0))) == {"quantized"}


def test_values_that_are_not_finite(laboratory) -> None:
    rollout = laboratory.sample()
    scored = laboratory.rescore(rollout)
    scored[[3, 40]] = -np.inf
    causes = plant.causes(plant.table(rollout, scored), nonfinite={"logp_proximal -inf": 2})
    assert [cause.name for cause in causes] == ["non-finite"]
    assert "2 logp_proximal -inf" in causes[0].evidence


def test_rounding_of_the_file_is_no_cause(laboratory) -> None:
    rollout = laboratory.sample()
    scored = np.round(laboratory.rescore(rollout), 3)
    written = plant.table(rollout, scored)
    assert plant.names(written, floor=1e-3**2 / 24) == set()
    assert plant.names(written) <= {"precision"}


def test_greedy_tokens_are_not_noise(laboratory) -> None:
    """Read from a file, their log-probs of 0 at every token are placeholders; here nobody looked for these."""
    rollout = laboratory.sample(temperature=0.0)
    causes = plant.causes(plant.table(rollout, laboratory.rescore(rollout)))
    assert [cause.name for cause in causes] == ["unexplained"]


def test_too_few_tokens_name_nothing_and_every_cause_explains_itself(laboratory) -> None:
    rollout = laboratory.sample(temperature=0.6)
    whole = plant.table(rollout, laboratory.rescore(rollout))
    assert plant.causes(plant.part(whole, 40)) == ()
    (cause,) = plant.causes(whole)
    assert 0.5 < cause.confidence <= 1
    assert "0.5" in cause.evidence
    assert cause.fix


def test_old_weights_of_the_bundled_model(bundled) -> None:
    rollout = bundled.sample()
    letters = np.array([completion.text.count("e") for _, completion in rollout.responses], dtype=np.float64)
    advantage = (letters - letters.mean()) / letters.std()
    later = plant.improved(bundled.model, rollout, advantage, updates=2, lr=1e-5)
    trainer = plant.rescore(later, rollout)
    responses, tokens = len(rollout.responses), len(trainer)
    old = np.full(responses, 2)
    constant = plant.table(rollout, trainer, version=np.zeros(tokens, np.int64), proximal_version=old)
    assert "stale" in plant.names(constant)
    # Every second response comes from the new weights themselves.
    exact = plant.sample(later, bundled.tokenizer, bundled.prompts, 2, SamplingParams(max_tokens=48))
    joined = plant.Rollout(rollout.prompts, [*rollout.responses, *exact.responses])
    both = np.concatenate([trainer, plant.rescore(later, exact)])
    version = np.where(np.arange(len(both)) < tokens, 0, 2)
    aged = plant.table(joined, both, version=version, proximal_version=np.full(len(joined.responses), 2))
    assert plant.names(aged) == {"stale"}
