"""The loss of a micro-batch, its metrics, and tokens that the sampler did not score."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest
import torch
from tests.support.adapter_calls import CALLS, WHOLE, call_tis
from tests.support.peer_modules import install_nemo_rl

from trimtab.adapters import slime
from trimtab.adapters.micro_batch import (
    averaged,
    counted_state,
    dropped_shares,
    per_response,
    prefixed_metrics,
    turns_of,
    usable_tokens,
)
from trimtab.errors import TrimtabError
from trimtab.objectives import PolicyLogps, objective


def test_runs_of_the_mask_are_turns() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 1, 1, 1, 0, 0]]).bool()
    assert turns_of(mask).tolist() == [[0, 0, 0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1, 1, 1]]


NAN, CERTAIN, UNSURE = math.nan, math.log(0.995), math.log(0.9)
HOLES = torch.tensor([[-1.0, NAN, -2.0], [-1.0, NAN, -2.0], [-9999.0, -1.0, 0.0], [NAN, -1.0, -1.0]])
HOLES_TRAINER = torch.tensor([[-1.0, CERTAIN, -2.0], [-1.0, UNSURE, -2.0], [NAN, -1.0, 0.0], [UNSURE, -1.0, -1.0]])
HOLES_MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 1, 1]]).bool()


def test_a_token_without_a_log_prob_is_left_out_alone_only_where_the_trainer_is_certain_of_it() -> None:
    kept = usable_tokens(HOLES_MASK, HOLES, HOLES_TRAINER)
    assert kept.tolist() == [[True, False, True], [False] * 3, [False] * 3, [False, True, True]]
    # Of 4 responses 2, of 10 trained tokens 1 + 3 + 2.
    shares = dropped_shares(HOLES_MASK, kept)
    assert shares.finalize() == {"unscored": 0.5, "unscored_tokens": pytest.approx(0.6)}
    nothing = torch.zeros(2, 0, dtype=torch.bool)
    assert (shares + dropped_shares(nothing, nothing)).finalize() == shares.finalize()


def test_corrections_count_tokens_without_a_log_prob_apart_from_rejected_ones() -> None:
    """geo-mask has no weight that could become NaN: it would reject such responses."""
    for name in ("token-tis", "geo-mask"):
        args = Namespace(trimtab_objective=name, use_tis=True)
        loss, _, values = call_tis(args, torch.ones(6), HOLES_TRAINER[:2], HOLES[:2], torch.ones(2, 3))
        assert loss.tolist() == [1, 0, 1, 0, 0, 0]
        assert values["trimtab/unscored_tokens"].tolist() == [0, 1, 0, 1, 1, 1]
        assert values["trimtab/reject/tokens"].tolist() == [0] * 6


@pytest.mark.parametrize("trainer", CALLS)
def test_a_token_that_the_sampler_did_not_score_is_left_out_and_counted(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were not trained; without this, one NaN makes the whole loss NaN."""
    install_nemo_rl(monkeypatch)
    monkeypatch.setattr(slime, "_log_probs", lambda _args, _batch, logits: list(logits))
    old = torch.tensor([[-0.8, -0.7, -1.9], [-1.2, CERTAIN, -1.1]])
    mask, behavior = torch.ones(2, 3).bool(), torch.full((2, 3), -1.0)
    without, holes = mask.clone(), behavior.clone()
    without[1, 1], holes[1, 1] = False, NAN

    def loss(trained: torch.Tensor, sampled: torch.Tensor) -> tuple[float, dict[str, Any]]:
        batch = {"behavior": sampled, "proximal": old, "mask": trained, "advantage": torch.tensor([[1.0], [-2.0]])}
        current = (old - 0.001).requires_grad_()
        value, metrics = CALLS[trainer](batch, current, "token-tis", WHOLE, {})
        # These two divide by the tokens that are left, the others by the trainer's own count.
        return value.item() * (1 if trainer in ("tinker", "areal") else int(trained.sum())), metrics

    value, metrics = loss(mask, holes)
    assert value == pytest.approx(loss(without, behavior)[0], rel=1e-6)
    assert value != pytest.approx(loss(mask, behavior)[0], rel=1e-2)
    counted = [float(value) for name, value in metrics.items() if name.endswith("trimtab/unscored_tokens")]
    assert counted == (
        [] if trainer in ("openrlhf", "areal") else [pytest.approx(1 / 3 if trainer == "prime-rl" else 1 / 6)]
    )


def test_a_fraction_as_count_is_divided_by() -> None:
    """OpenRLHF averages the counts of an update over its steps of accumulation."""
    current = torch.zeros(1, 1, requires_grad=True)
    logps = PolicyLogps(current=current, behavior=None, mask=torch.ones(1, 1).bool(), proximal=torch.zeros(1, 1))
    for kind in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        state = counted_state(0.25, 0.25, like=current)
        assert objective("grpo", aggregation=kind)(logps, torch.ones(1, 1), state=state).loss.item() == -4.0


def test_one_advantage_a_response_where_the_objective_judges_responses() -> None:
    advantage = torch.tensor([[9.0, 0.5, 0.5], [1.0, 1.0, 2.0]])
    first = torch.tensor([[False, True, True], [True, True, False]])
    assert per_response(objective("gspo"), advantage, first).tolist() == [[0.5], [1.0]]
    assert per_response(objective("grpo"), advantage, first) is advantage
    with pytest.raises(TrimtabError, match="gspo needs one advantage a response"):
        per_response(objective("gspo"), advantage, torch.ones(2, 3).bool())
    empty = torch.zeros(2, 0)
    assert per_response(objective("gspo"), empty, empty.bool()).tolist() == [[0.0], [0.0]]


def test_every_micro_batch_of_a_trainer_that_averages_gets_the_same_metrics() -> None:
    """Trainers reduce key by key over processes: a key less is a process that waits for ever."""
    built, one = objective("icepop"), torch.zeros(2, 3)
    logged = []
    for mask in (torch.ones(2, 3).bool(), torch.zeros(2, 3).bool()):
        logps = PolicyLogps(current=one, behavior=one, mask=mask, proximal=one)
        logged.append(averaged(built(logps, torch.ones(2, 1)).metrics.finalize()))
    assert logged[0].keys() == logged[1].keys() >= {"trimtab/clip/low", "trimtab/weight/mean", "trimtab/reject/tokens"}
    assert (logged[0]["trimtab/weight/mean"], logged[1]["trimtab/weight/mean"]) == (1.0, 0.0)
    # A log of whole updates gets no means over nothing.
    assert prefixed_metrics({"clip/low": 0.5, "kl/mean": math.nan}) == {"trimtab/clip/low": 0.5}


def test_each_share_of_a_loss_is_logged_where_a_trainer_averages() -> None:
    ones = torch.ones(2, 3)
    logps = PolicyLogps(-ones, -2 * ones, ones.bool(), proximal=-2 * ones, reference=-ones)
    for name, keywords, key in (
        ("dapo", {"clip_dual": 3.0}, "clip/dual"),
        ("grpo", {"kl_coef": 0.1}, "kl/mean"),
        ("drpo", {}, "clip/turned"),
    ):
        assert f"trimtab/{key}" in averaged(objective(name, **keywords)(logps, ones).metrics.finalize())
