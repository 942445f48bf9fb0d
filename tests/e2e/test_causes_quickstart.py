"""The quickstart's numerics on its own task: bfloat16 is not called quantized, and eight bits are.

SmolLM2 answers few-shot additions, sampled in bfloat16 and scored in float32 under bfloat16 autocast, before training
and after each of a few updates. One bit of a weight moves logits here twice as far as in prose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import planted_causes as plant

from trimtab.diagnosis.causes.detector import LogprobPairs
from trimtab.diagnosis.causes.noise_kinds import measure_noise
from trimtab.diagnosis.tokens import TokenTable
from trimtab.trainer.models.load import BUNDLED, load
from trimtab.types import SamplingParams

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES, STEPS = 12, 8, 5


@dataclass(frozen=True, eq=False)
class Step:
    """One batch, sampled as the quickstart samples and scored as its trainer scores."""

    rollout: plant.Rollout
    trainer: np.ndarray

    @property
    def table(self) -> TokenTable:
        return plant.table(self.rollout, self.trainer, ids=self.rollout.ids, group=self.rollout.group)


class Quickstart:
    def __init__(self) -> None:
        self.model, self.tokenizer, _ = load(BUNDLED, dtype=torch.float32)

    def prompts(self, seed: int) -> tuple[list[Any], list[str]]:
        rng = np.random.default_rng(seed)
        pairs = rng.integers(10, 100, (PROMPTS, 2)).tolist()
        shots = "Question: 61 + 43 =\nAnswer: 104\n\nQuestion: 93 + 21 =\nAnswer: 114\n\n"
        texts = [f"{shots}Question: {a} + {b} =\nAnswer:" for a, b in pairs]
        return plant.prompts_of(texts, self.tokenizer), [str(a + b) for a, b in pairs]

    def step(self, model: Any, sampler: Any, seed: int) -> Step:
        prompts, _ = self.prompts(seed)
        sampling = SamplingParams(max_tokens=8, stop=("\n",))
        rollout = plant.sample(sampler, self.tokenizer, prompts, SAMPLES, sampling, "bfloat16")
        own = [completion.response_ids for _, completion in rollout.responses]
        with torch.autocast("cpu", torch.bfloat16):
            return Step(rollout, plant.rescore(model, rollout, ids=own))

    def updated(self, model: Any, rollout: plant.Rollout, seed: int) -> Any:
        """The model after an update on what it got right."""
        _, answers = self.prompts(seed)
        right = np.array([answers[i] in completion.text for i, completion in rollout.responses], dtype=np.float64)
        return plant.improved(model, rollout, right - right.mean(), updates=1, lr=1e-5)


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Step]]:
    """Steps of training, each sampled twice: as the quickstart does, and from weights rounded to eight bits."""
    quickstart = Quickstart()
    model = quickstart.model
    result: dict[str, list[Step]] = {"bfloat16": [], "int8": []}
    for seed in range(STEPS):
        result["bfloat16"].append(quickstart.step(model, model, seed))
        result["int8"].append(quickstart.step(model, plant.rounded(model, 8), seed))
        model = quickstart.updated(model, result["bfloat16"][-1].rollout, seed)
    return result


def distance(whole: TokenTable) -> float:
    """Log-distance from the border, positive on the side of quantized weights."""
    return measure_noise(LogprobPairs.of(whole)).coarseness


def test_bfloat16_is_precision_and_eight_bits_are_quantized(steps: dict[str, list[Step]]) -> None:
    """All steps together, as a run has them; single ones come nearer to the border, on both sides of it."""
    whole = {name: TokenTable.concat([step.table for step in result]) for name, result in steps.items()}
    print({name: [distance(table), *(distance(step.table) for step in steps[name])] for name, table in whole.items()})
    assert plant.names(whole["bfloat16"]) == {"precision"}
    assert plant.names(whole["int8"]) == {"quantized"}
