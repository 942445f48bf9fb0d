"""Validates a weight update: names, shapes and tied weights.

Inference engines accept any set of weights: unknown names are skipped and missing names keep their old values, both
without an error. Therefore an update is validated completely before any weight is handed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.errors import TrimtabError, did_you_mean


@dataclass(frozen=True)
class WeightManifest:
    """The weights of a model: shapes by name, and which names share one tensor.

    `aliases` maps each additional name of a tied parameter to its first name. `required` lists the names that an update
    must contain; buffers and additional names may be left out.
    """

    shapes: Mapping[str, torch.Size]
    aliases: Mapping[str, str]
    required: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> WeightManifest:
        """Returns the manifest of a transformers model on any device."""
        state = model.state_dict(keep_vars=True)
        first = {id(p): name for name, p in model.named_parameters()}
        named = model.named_parameters(remove_duplicate=False)
        return cls(
            shapes={name: tensor.shape for name, tensor in state.items()},
            aliases={name: first[id(p)] for name, p in named if first[id(p)] != name},
            required=tuple(first.values()),
        )

    @classmethod
    def read(cls, folder: Path | str) -> WeightManifest:
        """Returns the manifest of a model folder, from its config.json; no weight is read or allocated."""
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return cls.of(AutoModelForCausalLM.from_config(config, trust_remote_code=False))

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the weights by their first names, each tied tensor once.

        Raises:
            TrimtabError: a name is missing, unknown or repeated, a shape differs, values are not finite, or two names
                of one tied weight carry different values.
        """
        given: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in given:
                raise TrimtabError(f"weight {name!r} was published twice; publish each name once")
            given[name] = tensor.detach()
        chosen: dict[str, Tensor] = {}
        for name, tensor in given.items():
            self._check_one(name, tensor)
            first = chosen.setdefault(self.aliases.get(name, name), tensor)
            if first is not tensor and first.data_ptr() != tensor.data_ptr() and not torch.equal(first, tensor):
                raise TrimtabError(
                    f"weight {name!r} is tied in the engine but differs from its twin; tie them or publish one name"
                )
        missing = [name for name in self.required if name not in chosen]
        if missing:
            raise TrimtabError(
                f"weight {missing[0]!r} is missing ({len(missing)} in all); publish every weight of the model"
            )
        return chosen

    def _check_one(self, name: str, tensor: Tensor) -> None:
        if name not in self.shapes:
            raise TrimtabError(f"weight {name!r} is not in the engine's model{did_you_mean(name, self.shapes)}")
        if tensor.shape != self.shapes[name]:
            shapes = f"{tuple(tensor.shape)}, the engine's is {tuple(self.shapes[name])}"
            raise TrimtabError(f"weight {name!r} has shape {shapes}; publish merged weights of the same model")
        # A sum is one cheap pass, and finite unless values are not or it overflows; then every value is checked.
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            raise TrimtabError(f"weight {name!r} has non-finite values; the engine keeps the weights it has")
