"""Causes planted in log-probs of the bundled model, and clean runs of it that must stay clean."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.support import planted_causes as plant

from trimtab.trainer.models.load import BUNDLED, load
from trimtab.types import SamplingParams

pytestmark = pytest.mark.slow

ASKED = (
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue.",
    "Give me a recipe with lentils.",
    "Write a Python function that reverses a list.",
    "Translate 'good morning' to Spanish and German.",
)
PLAIN = ("Once upon a time", "1, 2, 3, 4, 5, 6, 7, 8,", "Monday, Tuesday, Wednesday, Thursday,", "def fibonacci(n):\n")


class Bundled:
    def __init__(self) -> None:
        self.model, self.tokenizer, _ = load(BUNDLED, dtype=torch.float32)
        chats = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in ASKED
        ]
        self.prompts = plant.prompts_of([*chats, *PLAIN], self.tokenizer)

    def sample(self, model=None, dtype: str = "float32", tokens: int = 48, **sampling) -> plant.Rollout:
        contract = SamplingParams(max_tokens=tokens, **sampling)
        return plant.sample(model or self.model, self.tokenizer, self.prompts, 2, contract, dtype)

    def rescore(self, rollout: plant.Rollout, **keywords) -> np.ndarray:
        return plant.rescore(self.model, rollout, **keywords)


@pytest.fixture(scope="module")
def bundled() -> Bundled:
    return Bundled()


@pytest.fixture(scope="module")
def plain(bundled) -> tuple[plant.Rollout, np.ndarray]:
    """Sampled and scored in float32 at temperature 1."""
    rollout = bundled.sample()
    return rollout, bundled.rescore(rollout)


def test_float32_on_policy_is_clean(plain) -> None:
    rollout, scored = plain
    clean = plant.table(rollout, scored, entropy=rollout.entropy, ids=rollout.ids)
    assert plant.names(clean) == set()
    assert plant.names(plant.part(clean, 500)) == set()


def test_bfloat16_is_precision_and_eight_bits_are_not(bundled) -> None:
    noisy = bundled.sample(dtype="bfloat16")
    half = copy.deepcopy(bundled.model).to(torch.bfloat16)
    for trainer in (bundled.rescore(noisy), plant.rescore(half, noisy)):
        for columns in ({}, {"ids": noisy.ids}):
            whole = plant.table(noisy, trainer, **columns)
            assert plant.names(whole) == {"precision"}
            assert plant.names(plant.part(whole, 500)) == {"precision"}
    coarse = bundled.sample(plant.rounded(bundled.model, 8))
    assert plant.names(plant.table(coarse, bundled.rescore(coarse), ids=coarse.ids)) == {"quantized"}


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.3])
def test_the_trainer_at_another_temperature(bundled, plain, temperature) -> None:
    rollout, _ = plain
    other = plant.table(rollout, bundled.rescore(rollout, temperature=temperature))
    assert plant.names(other) == {"temperature"}
    assert plant.names(plant.part(other, 500)) == {"temperature"}


def test_the_sampler_at_another_temperature_reported_raw_or_not(bundled) -> None:
    rollout = bundled.sample(temperature=0.7)
    raw, processed = bundled.rescore(rollout), bundled.rescore(rollout, temperature=0.7)
    assert plant.names(plant.table(rollout, raw)) == {"temperature"}
    assert plant.names(plant.table(rollout, processed, behavior=raw)) == {"raw-logprobs"}
    assert plant.names(plant.table(rollout, processed, entropy=rollout.entropy)) == set()


@pytest.mark.parametrize("cut", [{"top_p": 0.95}, {"top_k": 20}])
def test_truncated_sampling_and_its_replay(bundled, cut) -> None:
    rollout = bundled.sample(**cut)
    whole, kept = bundled.rescore(rollout), bundled.rescore(rollout, kept=True)
    assert plant.names(plant.table(rollout, whole)) == {"truncated-sampling"}
    assert plant.names(plant.part(plant.table(rollout, whole), 500)) == {"truncated-sampling"}
    assert plant.names(plant.table(rollout, kept, entropy=rollout.entropy)) == set()
    assert plant.names(plant.table(rollout, kept, behavior=whole)) == {"raw-logprobs"}


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_shifted_lists(plain, by) -> None:
    rollout, scored = plain
    for where in ({}, {"every": 3}, {"since": 20}):
        moved = plant.table(rollout, plant.shifted(rollout.starts, scored, by, **where))
        assert plant.names(moved) == {"misaligned"}
    quarter = plant.part(plant.table(rollout, plant.shifted(rollout.starts, scored, by)), 500)
    assert plant.names(quarter) == {"misaligned"}


def test_text_that_was_encoded_again_where_a_turn_begins(bundled, plain) -> None:
    """A word whose pieces meet at a boundary comes back from text as other tokens of the same text."""
    rollout, scored = plain
    tokenizer, ids, mask = bundled.tokenizer, [], []
    for _, completion in rollout.responses:
        own = completion.response_ids
        changed, trained = own.copy(), np.ones(len(own), dtype=bool)
        for turn in range(12, len(own) - 6, 16):
            trained[turn - 2 : turn] = False
            text = tokenizer.decode(own[turn : turn + 1])
            pieces = [piece for letter in text for piece in tokenizer(letter)["input_ids"]]
            room = min(len(pieces), 2)
            if len(text) > 2:
                changed[turn : turn + room] = pieces[:room]
        ids.append(changed)
        mask.append(trained)
    trainer = bundled.rescore(rollout, ids=ids)
    again = plant.table(rollout, trainer, mask=np.concatenate(mask))
    assert "retokenized" in plant.names(again)
    assert "misaligned" not in plant.names(again)
    untouched = plant.table(rollout, scored, mask=np.concatenate(mask))
    assert plant.names(untouched) == set()


def test_old_weights(bundled, plain) -> None:
    rollout, _ = plain
    letters = np.array([completion.text.count("e") for _, completion in rollout.responses], dtype=np.float64)
    advantage = (letters - letters.mean()) / letters.std()
    later = plant.improved(bundled.model, rollout, advantage, updates=2, lr=1e-5)
    trainer = plant.rescore(later, rollout)
    responses, tokens = len(rollout.responses), len(trainer)
    old = np.full(responses, 2)
    constant = plant.table(rollout, trainer, version=np.zeros(tokens, np.int64), proximal_version=old)
    assert "stale" in plant.names(constant)
    # Every second response comes from the new weights themselves.
    exact = bundled.sample(later)
    joined = plant.Rollout(rollout.prompts, [*rollout.responses, *exact.responses])
    both = np.concatenate([trainer, plant.rescore(later, exact)])
    version = np.where(np.arange(len(both)) < tokens, 0, 2)
    aged = plant.table(joined, both, version=version, proximal_version=np.full(len(joined.responses), 2))
    assert plant.names(aged) == {"stale"}
