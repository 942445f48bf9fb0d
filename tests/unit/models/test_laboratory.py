"""The laboratory model: its size, its alphabet, its determinism, and that what is saved comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.models import laboratory
from trimtab.models.load import LABORATORY, load
from trimtab.models.logprobs import TokenBatch, score


def test_size_and_alphabet() -> None:
    model, tokenizer = laboratory.build(seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 393_344
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == 14
    ids = tokenizer("3141592653=").input_ids
    assert ids == [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 10]
    assert tokenizer.decode(ids) == "3141592653="
    assert tokenizer("1123345569.").input_ids[-1] == tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id < 14
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id]


def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, other = (laboratory.build(seed)[0].state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_folder_loads_and_scores_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    built = load(LABORATORY, dtype=dtype)
    built.model.save_pretrained(tmp_path)
    built.tokenizer.save_pretrained(tmp_path)
    assert "trimtab" not in (tmp_path / "config.json").read_text()  # loads where Trimtab is not installed
    loaded = load(str(tmp_path), dtype=dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    rows = [np.array(built.tokenizer(text).input_ids) for text in ("3141592653=", "1123345569.")]
    batch = TokenBatch.pack(rows[:1], rows[1:], [0], pad_id=12)
    assert torch.equal(score(built.model, batch).logp, score(loaded.model, batch).logp)
    assert loaded.tokenizer("12=").input_ids == [1, 2, 10]


def test_it_learns_to_sort() -> None:
    """A few supervised steps through `score` raise the log-prob of sorted digits far above chance (-2.6 a token)."""
    model, tokenizer = laboratory.build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    random = np.random.default_rng(0)
    logp = torch.zeros(())
    for _ in range(25):
        digits = random.integers(0, 10, (32, 10))
        texts = ["".join(map(str, row)) for row in digits]
        prompts = [np.array(tokenizer(text + "=").input_ids) for text in texts]
        responses = [np.array(tokenizer("".join(sorted(text)) + ".").input_ids) for text in texts]
        batch = TokenBatch.pack(prompts, responses, range(32), pad_id=12)
        logp = score(model, batch).logp.mean()
        optimizer.zero_grad()
        (-logp).backward()
        optimizer.step()
    assert logp.item() > -1.9
