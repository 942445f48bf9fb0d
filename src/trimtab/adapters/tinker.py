"""A Trimtab objective as a custom loss of tinker. Checked against tinker-cookbook 9dfcc3a2 and the SDK 0.25.0.

from trimtab.adapters.tinker import custom_loss
loss = custom_loss("icepop")
training_client.forward_backward_custom(*loss(data))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab.adapters.dump import Dump
from trimtab.adapters.hooks import build, per_response, reported, turns_of
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, PolicyLogps

LossFunction = Callable[[Sequence[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]
CustomLoss = Callable[[Sequence[Any]], tuple[list[Any], LossFunction]]


def custom_loss(objective: str | Objective, *, dump: str | None = None, **keywords: Any) -> CustomLoss:
    """Returns a function of data that returns the two arguments of `forward_backward_custom`.

    Each datum's `loss_fn_inputs` hold `target_tokens`, `logprobs` (the sampler's), `advantages`, and `mask` where some
    tokens are not trained; `old_logprobs` and `ref_logprobs` where given. The returned data have `target_tokens` only,
    because the service takes nothing else. All data of the call are one update: without `old_logprobs`, the policy at
    its start is the current one. dump: a folder for the log-probs of every call, which `trimtab diagnose` reads.
    """
    built = build("tinker", objective, keywords)
    written = None if dump is None else Dump(dump)

    def arguments(data: Sequence[Any]) -> tuple[list[Any], LossFunction]:
        fields = [datum.loss_fn_inputs for datum in data]

        def loss(_: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
            logps, advantage = _policies(built, fields, logprobs)
            if written is not None:
                written.write_call(logps, advantage)
            output = built(logps, per_response(built, advantage, logps.mask))
            return output.loss, reported(output.metrics.finalize())

        return [_sent(datum) for datum in data], loss

    return arguments


def _sent(datum: Any) -> Any:
    """Returns a datum with `target_tokens` as its only input of a loss."""
    if "target_tokens" not in datum.loss_fn_inputs:
        raise TrimtabError("a datum has no 'target_tokens' in loss_fn_inputs: add them")
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"]}
    return type(datum)(model_input=datum.model_input, loss_fn_inputs=inputs)


def _policies(objective: Objective, fields: Sequence[Any], logprobs: list[Tensor]) -> tuple[PolicyLogps, Tensor]:
    """Returns log-probs and advantages (batch, time) from the inputs of all data."""
    current = pad_sequence(list(logprobs), batch_first=True)
    mask = _column(fields, "mask", current)
    behavior, advantage = (_required(fields, name, current) for name in ("logprobs", "advantages"))
    inside = _inside(logprobs, current)
    mask = inside if mask is None else inside & (mask != 0)
    proximal = _column(fields, "old_logprobs", current)
    logps = PolicyLogps(
        current=current,
        behavior=behavior,
        mask=mask,
        proximal=current.detach() if proximal is None else proximal,
        reference=_column(fields, "ref_logprobs", current),
        turn=turns_of(mask) if "turn" in objective.needs else None,
    )
    return logps, advantage


def _inside(logprobs: Sequence[Tensor], like: Tensor) -> Tensor:
    """Returns (batch, time) bool, False at padding."""
    lengths = torch.tensor([len(one) for one in logprobs], device=like.device)
    return torch.arange(like.shape[1], device=like.device) < lengths[:, None]


def _column(fields: Sequence[Any], name: str, like: Tensor) -> Tensor | None:
    """Returns (batch, time) a field of all data, or None where no datum has it."""
    present = [name in one for one in fields]
    if not any(present):
        return None
    if not all(present):
        raise TrimtabError(f"{present.count(False)} of {len(fields)} data have no {name!r}: give it to all or to none")
    values = [one[name] for one in fields]
    tensors = [value if isinstance(value, Tensor) else value.to_torch() for value in values]
    return pad_sequence([tensor.to(like) for tensor in tensors], batch_first=True)


def _required(fields: Sequence[Any], name: str, like: Tensor) -> Tensor:
    column = _column(fields, name, like)
    if column is None:
        raise TrimtabError(f"the data have no {name!r} in loss_fn_inputs: add it")
    return column
