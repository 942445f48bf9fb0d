"""Micro-batches that fit the memory of a device, and what happens where it is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.run_results import untimed, weights
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.errors import TrimtabError
from trimtab.trainer import learner, memory, run
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.models.logprobs import TokenBatch
from trimtab.trainer.run import out_of_memory_as_user_error

PIB = 1 << 50


@pytest.mark.parametrize(
    "fill",
    [lambda: torch.empty(PIB, dtype=torch.uint8), lambda: np.ones(PIB, dtype=np.uint8), lambda: bytearray(PIB)],
    ids=["torch", "numpy", "python"],
)
def test_a_full_memory_is_one_line(fill: Callable[[], object]) -> None:
    line = r"the memory is full \(.+\): lower trainer.micro_batch_tokens"
    with pytest.raises(TrimtabError, match=line) as raised, out_of_memory_as_user_error():
        fill()
    assert "\n" not in str(raised.value)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), out_of_memory_as_user_error():
        torch.ones(2, 3) @ torch.ones(2, 3)


def qwen(trained: bool = True) -> Any:
    """Qwen2.5-1.5B's shape, without weights."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    shape = AutoConfig.for_model("qwen2", num_hidden_layers=28, vocab_size=151936, tie_word_embeddings=True, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape).requires_grad_(trained)


def chosen(gib: float, monkeypatch: pytest.MonkeyPatch, *, model: Any = None, device: str = "cuda", **sets: Any) -> int:
    monkeypatch.setattr(memory, "free_memory", lambda _: gib * 2**30)
    config = load_config("quickstart", [f"{key.replace('__', '.')}={value}" for key, value in sets.items()])
    lengths = {"prompt": 64, "response": 512}
    return memory.micro_batch_tokens(config, model or qwen(), torch.device(device), **lengths)


def test_micro_batches_grow_with_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen()
    sizes = [chosen(gib, monkeypatch, model=model) for gib in (24, 40, 72, 200)]
    assert sizes == [512, 2048, 8192, 32768]  # 18.5 GB of optimizer state come first; docs/results/gpu.md
    assert chosen(40, monkeypatch, model=model, model__gradient_checkpointing="true") > sizes[1]
    assert chosen(24, monkeypatch, model=qwen(trained=False)) > sizes[0]


def test_several_ranks_have_a_micro_batch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: 200 * 2**30)
    lengths = {"prompt": 64, "response": 512, "ranks": 4}
    budgets = [
        memory.micro_batch_tokens(load_config("quickstart"), qwen(), torch.device("cuda"), update=tokens, **lengths)
        for tokens in (40_000, 1_000)
    ]
    assert budgets == [8192, 512]


def test_a_cpu_has_the_size_of_laptops_and_a_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(1, monkeypatch, device="cpu") == 2048
    assert chosen(1, monkeypatch, trainer__micro_batch_tokens=4096) == 4096


def recipe(tokens: str, *sets: str) -> Config:
    sizes = ["trainer.steps=3", "trainer.prompts=4", "trainer.samples=4", "eval.problems=8"]
    return load_config("laboratory", [*sizes, f"trainer.micro_batch_tokens={tokens}", *sets])


def fill_above(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training forwards of more padded tokens fail as on a device that is full."""
    score = learner.score

    def limited(model: Any, batch: TokenBatch, **options: Any) -> Any:
        if torch.is_grad_enabled() and batch.prompt_ids.numel() + batch.response_ids.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return score(model, batch, **options)

    monkeypatch.setattr(learner, "score", limited)


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("objective.name=token-alp", "trainer.max_lag=0"),
        ("objective.name=geo-mask", "objective.calibrate=true", "trainer.prompts=16"),
    ],
)
def test_a_full_memory_halves_micro_batches_and_repeats_the_update(
    sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = run.train(recipe("64", *sets), out=tmp_path / "direct").run
    fill_above(64, monkeypatch)
    halved = run.train(recipe("256", *sets), out=tmp_path / "halved").run
    assert untimed(halved) == untimed(direct)
    assert all(torch.equal(weights(halved)[name], value) for name, value in weights(direct).items())


def test_an_update_that_cannot_be_repeated_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_above(0, monkeypatch)
    with pytest.raises(TrimtabError, match="the memory is full"):
        run.train(recipe("64"), out=tmp_path / "run")
