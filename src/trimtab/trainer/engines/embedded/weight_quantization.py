"""Quantization of a sampler's weights, and noise on them: a controlled mismatch that is exactly repeatable.

The matrices of the linear layers inside the decoder are quantized, with one symmetric scale for each output row, as in
engines with weight-only quantization. Embedding, head, norms, biases and the routers of mixtures of experts stay
unchanged, as in such engines: quantizing them saves little memory and costs much accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config
from trimtab.trainer.models.architecture import decoder_stack
from trimtab.trainer.models.noise import normals
from trimtab.trainer.seeds import derive

BITS = {"none": None, "int8": 8, "int4": 4, "int3": 3}


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """Rounds weights to `bits` (None: unchanged), then adds Gaussian noise of `noise` x the RMS of each matrix.

    The noise is a function of (seed, name of the matrix, policy version): new noise for each version, because rounding
    errors of activations differ under other weights, and the same noise when a version is published again.
    """

    bits: int | None = None
    noise: float = 0.0
    seed: int = 0

    @property
    def active(self) -> bool:
        """Whether quantization or noise changes any weight."""
        return self.bits is not None or self.noise > 0

    def apply(
        self, name: str, weight: Float[Tensor, "... rows columns"], version: int
    ) -> Float[Tensor, "... rows columns"]:
        """Returns the weight that the sampler uses in place of `weight`, in the same dtype."""
        used = weight if self.bits is None else quantize(weight, self.bits)
        if self.noise == 0:
            return used
        wide = used.float()
        noise_values = normals(
            tuple(wide.shape), self.seed, (crc32(name.encode()), version), device=wide.device, dtype=torch.float32
        )
        return (wide + self.noise * wide.square().mean().sqrt() * noise_values).to(weight.dtype)


NO_QUANTIZATION = WeightQuantization()


def weight_quantization(config: Config) -> WeightQuantization:
    """Returns the quantization and noise that the recipe applies to the sampler's weights."""
    return WeightQuantization(BITS[config.engine.quantize], config.engine.noise, derive(config.seed, "rounding"))


def quantize(weight: Float[Tensor, "... rows columns"], bits: int) -> Float[Tensor, "... rows columns"]:
    """Rounds every weight of a row to a level -n..n times the row's scale, max |row| / n, with n = 2^(bits - 1) - 1.

    Returns the dtype of `weight`. Quantizing the result again changes no bit: products are computed in float64, so a
    row keeps its largest weight and therefore its scale. Half-way values are rounded to the even level.
    """
    top = 2 ** (bits - 1) - 1
    wide = weight.double()
    scale = wide.abs().amax(-1, keepdim=True) / top
    # A row of zeros has no scale and stays zero.
    levels = (wide / scale.where(scale > 0, 1.0)).round_()
    return levels.mul_(scale).to(weight.dtype)


def matrices(model: Any) -> tuple[str, ...]:
    """Returns the names of the parameters that are quantized, in the order of `model.named_parameters()`."""
    owners = {
        id(p): module
        for layer in decoder_stack(model).layers
        for module in layer.modules()
        for p in module.parameters(False)
    }
    names = []
    for name, parameter in model.named_parameters():
        owner = owners.get(id(parameter))
        # transformers names the classes that choose the experts of a token `...Router`.
        if owner is None or parameter.ndim < 2 or type(owner).__name__.endswith("Router"):
            continue
        # Experts may be a stack (experts, outputs, inputs) of matrices, transformers' layout by default.
        stacked = parameter.ndim == 3 and hasattr(owner, "num_experts") and not getattr(owner, "is_transposed", False)
        if not isinstance(owner, nn.Linear) and not stacked:
            raise TrimtabError(
                f"weight {name!r} belongs to a {type(owner).__name__}, whose rows cannot be rounded one by one; "
                'set engine.quantize = "none" and engine.noise = 0 for this model'
            )
        names.append(name)
    return tuple(names)
