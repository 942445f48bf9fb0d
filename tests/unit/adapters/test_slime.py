"""The loss and the correction of slime and Miles."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trimtab.adapters import slime
from trimtab.errors import TrimtabError


@pytest.mark.parametrize("running", ["miles", "slime"])
def test_the_trainer_is_the_one_that_runs_where_both_are_installed(
    running: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("miles", "slime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert slime._trainer() == "miles"
    for module in slime.SCORING[running].split("."):
        path = module if module == running else f"{path}.{module}"
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules[path].get_log_probs_and_entropy = running  # type: ignore[attr-defined]
    assert (slime._trainer(), slime._score_function()) == (running, running)


def tis(
    name: str | dict[str, object], lengths: tuple[int, ...] = (3, 2), *, use_tis: bool = True
) -> tuple[torch.Tensor, list, dict]:
    train = [torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0])]
    rollout = [torch.tensor([-1.0, -3.0, 2.0]), torch.tensor([-1.5, -1.0])]
    return slime.tis(
        Namespace(trimtab_objective=name, use_tis=use_tis),
        pg_loss=torch.ones(5),
        train_log_probs=train,
        rollout_log_probs=rollout,
        loss_masks=[torch.tensor([1, 1, 1]), torch.tensor([1, 0])],
        response_lengths=lengths,
        total_lengths=[7, 6],
    )


def test_slime_multiplies_weights_and_rejection_into_its_loss() -> None:
    loss, masks, metrics = tis({"name": "token-tis", "weight_max": 2.0})
    # Ratios 1, e^2 and e^-3; e^0.5, and an untrained token.
    torch.testing.assert_close(loss, torch.tensor([1.0, 2.0, 0.049787, 1.648721, 0.0]))
    assert [mask.tolist() for mask in masks] == [[1, 1, 1], [1, 0]]
    loss, _, metrics = tis({"name": "icepop", "weight_min": 0.5, "weight_max": 5.0})
    torch.testing.assert_close(loss, torch.tensor([1.0, 0.0, 0.0, 1.648721, 0.0]))
    assert metrics["trimtab/reject/tokens"].tolist() == [0, 1, 1, 0, 0]


def test_slime_only_measures_without_its_option() -> None:
    """`--get-mismatch-metrics` asks for the metrics alone."""
    loss, _, metrics = tis("token-tis", use_tis=False)
    assert loss.tolist() == [1.0] * 5
    assert metrics["trimtab/weight/mean"][3].item() == pytest.approx(1.648721)


WITH_KL = {"name": "grpo", "kl_coef": 0.1}


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("grpo", {"use_kl_loss": True}, "--use-kl-loss has no effect"),
        (WITH_KL, {"use_kl_loss": True, "kl_loss_coef": 0.0}, "no reference log-probs are passed: set --use-kl-loss"),
        ("icepop", {"use_rollout_logprobs": True}, "--use-rollout-logprobs leaves them out: turn it off"),
        ("grpo", {}, "a rollout of several samples counts once"),
    ],
)
def test_slime_s_loss_refuses_settings_under_which_it_would_be_another(name: Any, options: Any, line: str) -> None:
    one = [torch.zeros(2)]
    batch = {
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
        "log_probs": one,
        "rollout_mask_sums": torch.tensor([5.0]),
    }
    args = Namespace(trimtab_objective=name, calculate_per_token_loss=False, **options)
    with pytest.raises(TrimtabError, match=line):
        slime.loss(args, batch, torch.zeros(1), torch.sum)


@pytest.mark.parametrize("given", [{"weight_max": 3}, ["icepop"], 3, {"name": ["icepop"]}])
def test_slime_s_objective_is_a_name_or_a_table(given: Any) -> None:
    with pytest.raises(TrimtabError, match="give the name of an objective"):
        tis(given)


def test_slime_refuses_what_its_hook_does_not_pass() -> None:
    with pytest.raises(TrimtabError, match="grpo has no weight and no mask"):
        tis("grpo")
    with pytest.raises(TrimtabError, match="opsm reads advantage and current, which this hook does not pass: use loss"):
        tis("opsm")
    with pytest.raises(TrimtabError, match="token-tis reads current, which this hook does not pass: use loss"):
        tis({"name": "token-tis", "weight": {"over": "current"}})
    with pytest.raises(TrimtabError, match="context parallelism"):
        tis("token-tis", lengths=(4, 2))
