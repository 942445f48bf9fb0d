"""The guard of TRL's trainers without TRL: its settings, its copies, and the checkpoint that it names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from trimtab.adapters.trl_guard import Guard, checkpoint_advice, copied
from trimtab.adapters.trl_shared import TrainsObjective
from trimtab.errors import TrimtabError
from trimtab.trainer.config.training_sections import GuardConfig


def test_its_numbers_are_those_of_the_recipe() -> None:
    recipe = GuardConfig()
    assert (Guard().every, Guard().lr_factor, Guard().times) == (recipe.every, recipe.lr_factor, recipe.times)
    assert list(Guard().on) == GuardConfig(on=list(Guard().on)).on


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on": ("es",)}, "guard: 'es' cannot be watched"),
        ({"every": 0}, "every must be at least 1"),
        ({"times": -1}, "times at least 0"),
        ({"lr_factor": 1.0}, "lr_factor between 0 and 1"),
    ],
)
def test_what_it_cannot_do_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        Guard(**given)  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="guard=5: give True, or a Guard"):
        TrainsObjective(guard=5)  # type: ignore[arg-type]


class Moments(NamedTuple):
    mean: torch.Tensor
    steps: tuple[int, ...]


def test_a_named_tuple_of_an_optimizer_keeps_its_class() -> None:
    given = Moments(torch.ones(2), (1, 2))
    copy = copied({"state": [given]})["state"][0]
    given.mean.zero_()
    assert isinstance(copy, Moments)
    assert (copy.mean.tolist(), copy.steps) == ([1, 1], (1, 2))


def test_a_copy_has_tensors_of_its_own() -> None:
    step = torch.ones(2)
    given = {"state": {0: {"step": step, "betas": (0.9, 0.95)}}, "groups": [{"params": [0, 1], "lr": 1e-3}]}
    copy = copied(given)
    step += 1
    assert copy["state"][0]["step"].tolist() == [1, 1]
    assert copy["state"][0]["betas"] == (0.9, 0.95)
    assert copy["groups"] == given["groups"]
    assert copy["groups"][0] is not given["groups"][0]


def test_the_newest_checkpoint_that_is_not_in_doubt_is_named(tmp_path: Path) -> None:
    assert checkpoint_advice(tmp_path, 20) == f"no checkpoint is in {tmp_path}: set save_steps"
    for name in ("checkpoint-100", "checkpoint-9", "checkpoint-20", "checkpoint-best"):
        (tmp_path / name).mkdir()
    assert checkpoint_advice(tmp_path, 99) == f"go on from {tmp_path / 'checkpoint-20'}"
    assert checkpoint_advice(tmp_path, 100) == f"go on from {tmp_path / 'checkpoint-100'}"
    assert checkpoint_advice(tmp_path, 8).startswith(f"the newest checkpoint is {tmp_path / 'checkpoint-100'}, and")
