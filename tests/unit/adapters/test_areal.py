"""AReaL's loss, which gets packed rows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from trimtab.adapters import areal
from trimtab.errors import TrimtabError


def test_areal_must_pass_the_policies_that_the_objective_reads() -> None:
    one = torch.zeros(1, 3)
    data = {"logprobs": one, "advantages": one, "loss_mask": torch.tensor([[1.0, 1.0, 0.0]])}
    tis = areal.actor_loss("token-tis")
    with pytest.raises(TrimtabError, match=r"sampler's log-probs.*: set actor\.use_decoupled_loss=true"):
        tis(one, one, data | {"prox_logp": one}, current_version=3)
    with pytest.raises(TrimtabError, match=r"start of the update.*: set actor\.prox_logp_method=recompute"):
        tis(one, one, data, use_decoupled_loss=True)
    aged = functools.partial(areal.actor_loss("a3po"), one, one, current_version=3, use_decoupled_loss=True)
    assert aged(data | {"versions": torch.tensor([[-1, 2, 2]])}).item() == 0
    with pytest.raises(TrimtabError, match="trained tokens have no version"):
        aged(data | {"versions": torch.tensor([[2, 2, -1]])})
    with pytest.raises(TrimtabError, match="distillation from a teacher"):
        packed("grpo", [1.0] * 8, teacher_logp=torch.zeros(8))
    # Tree training passes no borders of a packed row.
    with pytest.raises(TrimtabError, match=r"no borders of sequences .*: set actor\.enable_tree_training=false"):
        packed("grpo", [1.0] * 8, cu_seqlens=None)


def packed(name: str, advantages: list[float], **fields: Any) -> torch.Tensor:
    """AReaL's loss of two responses of four tokens in one row."""
    make = torch.Generator().manual_seed(0)
    current = (-torch.rand(8, generator=make)).requires_grad_()
    old = current.detach() + 0.3 * torch.randn(8, generator=make)
    data: dict[str, Any] = {"logprobs": old, "prox_logp": old, "loss_mask": torch.ones(8), "versions": torch.zeros(8)}
    data |= {"advantages": torch.tensor(advantages), "cu_seqlens": torch.tensor([0, 4, 8]), **fields}
    loss = areal.actor_loss(name, aggregation="token-mean")
    return loss(current, torch.zeros(8), data, current_version=1, use_decoupled_loss=True)


def test_areal_s_advantages_must_not_differ_within_a_response_that_is_judged_whole() -> None:
    """Also in a packed row, where two responses differ."""
    assert packed("gspo", [1.0] * 4 + [-1.0] * 4).requires_grad
    for name in ("gspo", "opsm"):
        with pytest.raises(TrimtabError, match=rf"{name} needs one advantage a response.*set actor\.kl_ctl=0"):
            packed(name, [1.0, 1.0, -1.0, -1.0] * 2)
    assert packed("token-tis", [1.0, 1.0, -1.0, -1.0] * 2).requires_grad
