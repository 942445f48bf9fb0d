"""A Trimtab objective as a custom loss of tinker. Checked against the SDK 0.38.0 and tinker-cookbook 9dfcc3a2.

from trimtab.adapters.tinker import custom_loss
training_client.forward_backward_custom(data, custom_loss("icepop"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab.adapters.hooks import build
from trimtab.adapters.micro_batch import evaluate, prefixed_metrics
from trimtab.adapters.recording import Dump, MonitorChoice, Observations
from trimtab.errors import TrimtabError
from trimtab.monitor import Monitor
from trimtab.objectives import Objective, PolicyLogps


def custom_loss(
    objective: str | Objective | None = None,
    *,
    dump: str | None = None,
    monitor: Monitor | MonitorChoice = None,
    **keywords: Any,
) -> Callable[[Sequence[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]:
    """Returns a loss for `forward_backward_custom`; the SDK 0.32 or newer passes it all `loss_fn_inputs`.

    Each datum's `loss_fn_inputs` hold `target_tokens`, `logprobs` (the sampler's) and `advantages`, and may hold `mask`
    (0 at tokens that are not trained), `old_logprobs` and `ref_logprobs`. All data of a call are one update; without
    `old_logprobs`, the policy at its start is the current one. dump: a folder for the log-probs of every call, which
    `trimtab diagnose` reads. monitor: a `trimtab.Monitor`, True, or a folder for its files; each call is a step. Raises
    `TrimtabError` without an objective: tinker computes its own losses in its service, so those cannot be wrapped.
    """
    built = build("tinker", objective, keywords)
    written = None if dump is None else Dump(dump)
    observed, steps = Observations(monitor) if monitor else None, count()

    def loss(data: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        current = pad_sequence(list(logprobs), batch_first=True)
        fields = [datum.loss_fn_inputs for datum in data]
        mask = _column(fields, "mask", current)
        behavior, advantage = (_required(fields, name, current) for name in ("logprobs", "advantages"))
        lengths = torch.tensor([len(logp) for logp in logprobs], device=current.device)
        inside = torch.arange(current.shape[1], device=current.device) < lengths[:, None]  # not padding
        mask = inside if mask is None else inside & (mask != 0)
        proximal = _column(fields, "old_logprobs", current)
        logps = PolicyLogps(
            current,
            behavior,
            mask,
            proximal=current.detach() if proximal is None else proximal,
            reference=_column(fields, "ref_logprobs", current),
        )
        value, metrics, _ = evaluate(built, logps, advantage, dump=written, monitor=observed, step=next(steps))
        return value, prefixed_metrics(metrics)

    return loss


def _column(fields: Sequence[Any], name: str, like: Tensor) -> Tensor | None:
    """Returns (batch, time) a field of all data, or None if no datum has it."""
    present = [name in inputs for inputs in fields]
    if not any(present):
        return None
    if not all(present):
        raise TrimtabError(f"{present.count(False)} of {len(fields)} data have no {name!r}: give it to all or to none")
    values = [inputs[name] for inputs in fields]
    tensors = [value if isinstance(value, Tensor) else value.to_torch() for value in values]
    return pad_sequence([tensor.to(like) for tensor in tensors], batch_first=True)


def _required(fields: Sequence[Any], name: str, like: Tensor) -> Tensor:
    column = _column(fields, name, like)
    if column is None:
        raise TrimtabError(f"the data have no {name!r} in loss_fn_inputs: add it")
    return column
