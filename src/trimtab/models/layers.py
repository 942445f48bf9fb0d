"""Finds the decoder layers of a transformers model, whatever its family names them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab.errors import TrimtabError


class Decoder(NamedTuple):
    """The decoder layers in order, and the norms that follow the last one."""

    layers: tuple[nn.Module, ...]
    final_norms: tuple[nn.Module, ...]
    dtype: torch.dtype  # of the residual stream as the model makes it: that of its embedding


def decoder(model: Any) -> Decoder:
    """Find the one list of `num_hidden_layers` modules in a model, a peft-wrapped one included.

    Raises `TrimtabError` where there is none, or more than one (an encoder and a decoder, a vision tower).
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    name = type(model).__name__
    if not hasattr(model, "get_input_embeddings"):
        raise TrimtabError(f"cannot find the decoder layers of a {name}: give a transformers causal language model")
    count: int | None = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    # Every list has a name of its own; lists inside a layer (experts) may happen to have the same length.
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        found = f"{len(outer)} of them ({', '.join(outer)})" if outer else "none"
        raise TrimtabError(
            f"cannot find the decoder layers of a {name}: expected one list of {count} modules, found {found}; "
            "use a decoder-only causal language model"
        )
    parent = model.get_submodule(outer[0].rpartition(".")[0])
    embedding: Any = model.get_input_embeddings()
    return Decoder(
        layers=tuple(lists[outer[0]]),
        final_norms=tuple(child for child in parent.children() if is_norm(child)),
        dtype=embedding.weight.dtype,
    )


def is_norm(module: nn.Module) -> bool:
    """Whether all a module has is vectors: scales and shifts of channels."""
    shapes = [parameter.ndim for parameter in module.parameters()]
    return bool(shapes) and max(shapes) <= 1


def is_block(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: attention, a feed-forward network, a linear layer."""
    return any(parameter.ndim > 1 for parameter in module.parameters())
