"""The warm start: where it ends, and what its seed decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.trainer import sft, tasks
from trimtab.trainer.config import load_config
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.load import load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.sft import laboratory_folder, supervised_warm_start

SMALL = ("task.digits=2", "task.holdout=10", "sft.steps=3", "sft.batch=8")


def test_it_ends_at_the_first_batch_that_is_probable_enough_and_saves_the_model_of_that_batch(tmp_path: Path) -> None:
    """Three characters of 14 have about 14^-3 = 3.6e-4 before any update."""
    config = load_config("laboratory", [*SMALL, "sft.until=1e-4", "sft.seed=4"])
    metrics = supervised_warm_start(config, out=tmp_path / "model")
    assert metrics["step"] == 1
    untrained, tokenizer = laboratory.build(seed=4)
    saved = load(str(tmp_path / "model"), dtype=torch.float32).model.state_dict()
    assert all(torch.equal(saved[key], value) for key, value in untrained.state_dict().items())

    task = tasks.build("sort", digits=2, holdout=10)
    prompts = PromptStream(task, tokenizer, seed=4).at(0, 8)
    answers = [torch.tensor(tokenizer(prompt.problem.answer).input_ids).numpy() for prompt in prompts]
    batch = TokenBatch.pack([prompt.ids for prompt in prompts], answers, range(8), pad_id=12)
    expected = score(untrained, batch).logp.detach().sum(-1).exp().mean()
    assert metrics["sft/gold_probability"] == pytest.approx(float(expected), rel=1e-4)


def test_the_size_of_micro_batches_is_chosen_before_the_first_update_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later the optimizer's state, which the choice counts as still to come, is allocated."""
    calls, name, choose = [], "choose_micro_batch_tokens", sft.choose_micro_batch_tokens
    monkeypatch.setattr(sft, name, lambda *args, **sizes: calls.append(sizes) or choose(*args, **sizes))
    supervised_warm_start(load_config("laboratory", SMALL), out=tmp_path / "model")
    assert calls == [{"prompt": 3, "response": 3}]


def test_a_probability_that_is_not_reached_is_an_error(tmp_path: Path) -> None:
    config = load_config("laboratory", [*SMALL, "sft.until=0.99"])
    with pytest.raises(TrimtabError, match=r"^gold answers have probability \d\S+ after 3 steps .* raise sft.steps"):
        supervised_warm_start(config, out=tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_each_seed_of_the_warm_start_has_a_model_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    configs = [
        load_config("laboratory", [*SMALL, "sft.steps=1", *more])
        for more in ([], ["seed=5"], ["sft.seed=5"], ["sft.seed=6"])
    ]
    folders = [laboratory_folder("laboratory", config) for config in configs]
    assert folders[0] == folders[1]
    assert len({*folders}) == 3
