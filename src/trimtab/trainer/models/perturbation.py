"""Adaptive layerwise perturbation (ALP): learnable Gaussian noise on the inputs of decoder layers.

    h_l  <-  h_l + sigma_l * eps,   sigma_l = exp(a_l),   eps ~ N(0, I) of h's shape     (arXiv 2603.19470)

The noise is added to the residual stream, before the layer's norm, at every token of prompt and response. Each layer
has one learnable a_l = `log_sigma`; its gradient is sigma_l * sum(eps * dL/dh_l). sigma is a standard deviation.
`layers="logits"` perturbs the output logits instead (the paper's ablation), with a single sigma.

A layer whose sigma is 0 gets no noise, and if no sigma is positive no hook is attached, so that the model equals the
unperturbed one bit for bit, also in half precision. From the first layer with a positive sigma on, the residual stream
of a half-precision model is float32 (`perturbed_layer.py`), which itself changes log-probs by rounding errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.trainer.models import fused_head, perturbed_layer
from trimtab.trainer.models.architecture import decoder_stack, model_parts
from trimtab.trainer.models.noise import normals

LOGITS = "logits"
MAX_STD = 1e4
"""The largest standard deviation. Entries of a trained model's hidden states and logits are smaller, and would be lost
to float32 rounding."""


class PerturbationCoverage:
    """Counts the entries that each layer's noise changed, in the inputs of the layer's first matrix product.

    Entries are compared after rounding to the dtype of that product, which may undo small noise. "Clean" is the same
    pass without this layer's own noise; noise of earlier layers is in both. Layers of sigma 0 are not counted, nor are
    logits, which are not rounded. May be used for several passes.
    """

    def __init__(self) -> None:
        self._changed: dict[str, Tensor] = {}
        self._total: dict[str, int] = {}

    def add(self, layer: str, perturbed: Tensor, clean: Tensor) -> None:
        """Counts one pass of one layer."""
        changed = (perturbed != clean).sum()
        self._changed[layer] = changed + self._changed[layer] if layer in self._changed else changed
        self._total[layer] = self._total.get(layer, 0) + clean.numel()

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns the number of changed entries and of all entries, by layer."""
        return {layer: (int(count), self._total[layer]) for layer, count in self._changed.items()}


class Perturbation(nn.Module):
    """The learnable noise of one model. Holds `log_sigma` (float32, one per layer) and nothing of the model.

    `layers` is "all", "logits", or layers and inclusive ranges "0-4,12"; `std` is the first value of every sigma, or
    a list with that of each layer. Raises `TrimtabError` for other layers, a std below 0 or above `MAX_STD`, a list
    of another length, or a model without decoder layers.
    """

    def __init__(self, model: Any, layers: str = "all", std: float | Sequence[float] = 1e-4) -> None:
        super().__init__()
        self._decoder = decoder_stack(model)
        # In a tuple: a module as an attribute would be registered, trained and saved as a submodule.
        self._head: tuple[object, ...] = (model_parts(model).head,) if layers == LOGITS else ()
        self._chosen = [] if layers == LOGITS else select_layers(layers, len(self._decoder.layers))
        stds = list(std) if isinstance(std, Sequence) else [std] * len(self.names)
        if not all(0 <= value <= MAX_STD for value in stds):
            raise TrimtabError(f"perturbation std {std} must be a number from 0 to {MAX_STD:g}, or a list of them")
        if len(stds) != len(self.names):
            raise TrimtabError(
                f"perturbation std lists {len(stds)} values: give one for each of {len(self.names)} perturbed layers"
            )
        start = torch.tensor(stds, dtype=torch.float64).log().float()
        self.log_sigma = nn.Parameter(start.to(next(model.parameters()).device))
        self._seed: int | None = None  # of the current pass

    @property
    def names(self) -> list[str]:
        """The names of the entries of `log_sigma`: layer numbers, or "logits"."""
        return [str(index) for index in self._chosen] or [LOGITS]

    def sigmas(self) -> dict[str, float]:
        """Returns the standard deviations by name, infinity where they are NaN or would overflow."""
        values = [math.exp(value) if value < 700 else math.inf for value in self.log_sigma.tolist()]
        return dict(zip(self.names, values, strict=True))

    @contextmanager
    def attached(
        self, *, seed: int, coverage: PerturbationCoverage | None = None, sigmas: Mapping[str, float] | None = None
    ) -> Iterator[None]:
        """Perturbs every forward of the model inside, with the noise of `seed` (not negative).

        A second forward inside with the same shapes gets the same noise. The backward may run outside: gradient
        checkpointing recomputes with the noise of the same forward. `coverage` counts changed entries.
        sigmas: what `sigmas()` returned since the last update; without it the device is waited for.
        """
        if self._seed is not None:
            raise TrimtabError(
                f"the perturbation is attached already, with seed {self._seed}; leave that context first"
            )
        self._seed, sigmas = seed, self.sigmas() if sigmas is None else sigmas
        try:
            with self._logits(seed, sigmas) if self._head else self._layers(seed, sigmas, coverage):
                yield
        finally:
            self._seed = None

    @contextmanager
    def _logits(self, seed: int, sigmas: Mapping[str, float]) -> Iterator[None]:
        (head,), sigma = self._head, sigmas[LOGITS]
        with fused_head.perturb_logits(head, self.log_sigma, sigma, seed) if sigma != 0 else nullcontext():
            yield

    @contextmanager
    def _layers(self, seed: int, sigmas: Mapping[str, float], watch: PerturbationCoverage | None) -> Iterator[None]:
        layers, final_norms, dtype = self._decoder
        first = min((int(name) for name, sigma in sigmas.items() if sigma != 0), default=len(layers))
        with ExitStack() as stack:
            for index, module in enumerate(layers[first:], first):
                noise = see = None
                if sigma := sigmas.get(str(index), 0.0):
                    log_sigma = self.log_sigma[self._chosen.index(index)]
                    noise = partial(_perturb, log_sigma=log_sigma, sigma=sigma, seed=seed, layer=index)
                    see = None if watch is None else partial(watch.add, str(index))
                stack.enter_context(perturbed_layer.PerturbedLayer(module, dtype, noise, see).attached())
            if first < len(layers):
                stack.enter_context(perturbed_layer.float32_norms(final_norms, dtype, narrow=True))
            yield


def select_layers(layers: str, count: int) -> list[int]:
    """Returns the layer numbers that "all", "3", "0-5" or "0-4,12" denotes in a model of `count` layers."""
    if layers == "all":
        return list(range(count))
    chosen: list[int] = []
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise TrimtabError(
                f'perturbation layers {layers!r}: give "all", "logits", or layers and ranges such as "3" or "0-4,12-16"'
            )
        low = int(match[1])
        high = int(match[2] or low)
        if not low <= high < count:
            raise TrimtabError(
                f"perturbation layers {layers!r}: the model's layers are 0-{count - 1}, lower number first"
            )
        chosen += range(low, high + 1)
    if len({*chosen}) < len(chosen):
        raise TrimtabError(f"perturbation layers {layers!r}: name each layer once")
    return chosen


def _perturb(
    hidden: Float[Tensor, "*batch hidden"], *, log_sigma: Float[Tensor, ""], sigma: float, seed: int, layer: int
) -> Float[Tensor, "*batch hidden"]:
    return _Perturb.apply(hidden, log_sigma, sigma, seed, layer)


class _Perturb(torch.autograd.Function):
    """Computes hidden + exp(log_sigma) * noise, in float32 or wider. The backward draws the noise again.

    `sigma` is exp(log_sigma) as a Python float, which the caller reads once for all layers.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, log_sigma: Tensor, sigma: float, seed: int, layer: int) -> Tensor:
        # Saved also as a check: a recomputation without this layer's noise saves fewer tensors, and PyTorch then raises
        # an error instead of returning wrong gradients.
        ctx.save_for_backward(log_sigma)
        ctx.draw = partial(normals, tuple(hidden.shape), seed, (layer,), device=hidden.device)
        ctx.dtype = hidden.dtype
        noise = ctx.draw(dtype=perturbed_layer.stream_dtype(hidden.dtype))
        return torch.add(hidden.to(noise.dtype), noise, alpha=sigma, out=noise)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (log_sigma,) = ctx.saved_tensors
        (grad,) = grads
        to_log_sigma = None
        if ctx.needs_input_grad[1]:
            total = torch.dot(ctx.draw(dtype=grad.dtype).view(-1), grad.reshape(-1))
            to_log_sigma = (log_sigma.exp() * total).to(log_sigma.dtype)
        return grad.to(ctx.dtype) if ctx.needs_input_grad[0] else None, to_log_sigma, None, None, None
