"""The laboratory model: its size, its alphabet, its determinism, and that what is saved comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trimtab.trainer import tasks
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.load import load
from trimtab.trainer.models.logprobs import TokenBatch, score


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


def test_the_model_of_long_responses_holds_a_prompt_and_its_response() -> None:
    (model, _), task = laboratory.build(seed=0, name=laboratory.LONG), tasks.build("sort", digits=11, steps=True)
    # embedding and head of 14 x 96, 4 layers of 4 x 96 x 96 + 3 x 96 x 264 + 2 x 96, and the last norm
    assert sum(parameter.numel() for parameter in model.parameters()) == 455_136
    assert len(task.prompt_text(task.test[0], None)) + task.max_tokens <= model.config.max_position_embeddings


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
    built = load(laboratory.NAME, dtype=dtype)
    built.model.save_pretrained(tmp_path)
    built.tokenizer.save_pretrained(tmp_path)
    assert "trimtab" not in (tmp_path / "config.json").read_text()  # loads where Trimtab is not installed
    loaded = load(str(tmp_path), dtype=dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    rows = [np.array(built.tokenizer(text).input_ids) for text in ("3141592653=", "1123345569.")]
    batch = TokenBatch.pack(rows[:1], rows[1:], [0], pad_id=12)
    assert torch.equal(score(built.model, batch).logp, score(loaded.model, batch).logp)
    assert loaded.tokenizer("12=").input_ids == [1, 2, 10]


@pytest.mark.parametrize(("name", "size"), [(laboratory.MIXTURE, 383_232), (laboratory.SWITCH, 402_176)])
def test_mixtures_are_as_large_as_the_dense_model_and_load_anywhere(tmp_path: Path, name: str, size: int) -> None:
    dense, mixture = laboratory.build(seed=0)[0], load(name, dtype=torch.float32)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (dense, mixture.model)]
    assert sizes[1] == size
    assert abs(sizes[1] - sizes[0]) < 0.03 * sizes[0]
    mixture.model.save_pretrained(tmp_path)
    mixture.tokenizer.save_pretrained(tmp_path)
    assert "trimtab" not in (tmp_path / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)  # transformers alone, with its own experts and attention
    ids = torch.tensor([mixture.tokenizer("3141592653=1123345569.").input_ids])
    expected = plain(ids).logits[0, 10:-1].log_softmax(-1).gather(-1, ids[0, 11:, None])[:, 0]
    rows = [np.array(mixture.tokenizer(text).input_ids) for text in ("3141592653=", "1123345569.")]
    batch = TokenBatch.pack(rows[:1], rows[1:], [0], pad_id=12)
    loaded = load(str(tmp_path), dtype=torch.float32)
    for model in (mixture.model, loaded.model):
        torch.testing.assert_close(score(model, batch).logp[0], expected, atol=1e-5, rtol=0)
