"""Gradients that tinker's SDK sends to its service for a loss of Trimtab; the environment must have tinker.

    python tests/programs/tinker_loss.py

Prints a JSON object by preset: the loss that the SDK reports, and the largest difference of the weights that it sends
for the backward pass from the library's gradient.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from tinker import types
from tinker.lib.public_interfaces.training_client import TrainingClient
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab.adapters.tinker import custom_loss
from trimtab.objectives import PolicyLogps, objective

LENGTHS = (5, 3, 4)


def tensor(values: Tensor) -> types.TensorData:
    return types.TensorData.from_torch(values)


def data(columns: dict[str, list[Tensor]]) -> list[types.Datum]:
    """Data as the cookbook assembles them, of which the second one's first token is of the prompt."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(range(length))),
            loss_fn_inputs={
                "target_tokens": tensor(torch.arange(length)),
                **{name: tensor(values[index]) for name, values in columns.items()},
            },
        )
        for index, length in enumerate(LENGTHS)
    ]


def compared(name: str) -> dict[str, float]:
    make = torch.Generator().manual_seed(0)
    current = [-torch.rand(length, generator=make) for length in LENGTHS]
    behavior = [logp + 0.2 * torch.randn(len(logp), generator=make) for logp in current]
    mask = [torch.ones(length) for length in LENGTHS]
    mask[1][0] = 0
    advantage = [torch.full((length,), value) for length, value in zip(LENGTHS, (1.0, -0.5, 0.25), strict=True)]
    sent = data({"logprobs": behavior, "advantages": advantage, "mask": mask})
    client: Any = SimpleNamespace()
    forward = TrainingClient._get_custom_loss_forward_data(client, sent, "cross_entropy")
    assert all(set(datum.loss_fn_inputs) == {"target_tokens", "weights"} for datum in forward)
    answer: Any = SimpleNamespace(loss_fn_outputs=[{"logprobs": tensor(logp)} for logp in current])
    result: Any = TrainingClient._compute_custom_loss(sent, custom_loss(name), answer)
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in result.data]

    leaf = pad_sequence(current, batch_first=True).requires_grad_()
    logps = PolicyLogps(
        current=leaf,
        behavior=pad_sequence(behavior, batch_first=True),
        mask=pad_sequence(mask, batch_first=True).bool(),
        proximal=leaf.detach(),
    )
    loss = objective(name)(logps, torch.tensor([[1.0], [-0.5], [0.25]])).loss
    loss.backward()
    assert leaf.grad is not None
    gap = (pad_sequence(weights, batch_first=True) + leaf.grad).abs().max().item()
    return {"loss": abs(result.loss_sum - loss.item()), "weights": gap, "largest": leaf.grad.abs().max().item()}


if __name__ == "__main__":
    print(json.dumps({name: compared(name) for name in ("icepop", "seq-tis", "m2po", "token-bypass")}))
