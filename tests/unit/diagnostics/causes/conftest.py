"""The laboratory model and what it sampled, once for all tests of causes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.diagnostics.causes import support

from trimtab.models.load import load
from trimtab.training.sft import laboratory_folder
from trimtab.types import Prompt, Sampling


class Laboratory:
    """The warm-started model and `sample(...)`, cached by its arguments."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
        self.model, self.tokenizer, self.prompts = model, tokenizer, prompts
        self._cache: dict[Any, support.Rollout] = {}

    def sample(self, bits: int = 0, dtype: str = "float32", **sampling: Any) -> support.Rollout:
        key = (bits, dtype, *sorted(sampling.items()))
        if key not in self._cache:
            model = support.rounded(self.model, bits) if bits else self.model
            contract = Sampling(max_tokens=11, stop=(".",), **sampling)
            self._cache[key] = support.sample(model, self.tokenizer, self.prompts, 6, contract, dtype)
        return self._cache[key]


@pytest.fixture(scope="session")
def laboratory() -> Laboratory:
    loaded = load(str(laboratory_folder()), dtype=torch.float32)
    digits = np.random.default_rng(0).integers(0, 10, (150, 10))
    prompts = support.prompts_of(["".join(map(str, row)) + "=" for row in digits], loaded.tokenizer)
    return Laboratory(loaded.model, loaded.tokenizer, prompts)
