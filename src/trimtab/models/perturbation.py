"""Adaptive layerwise perturbation (ALP): learnable Gaussian noise on the inputs of decoder layers.

    h_l  <-  h_l + sigma_l * eps,   sigma_l = exp(a_l),   eps ~ N(0, I) of h's shape     (arXiv 2603.19470)

The noise goes into the residual stream, before the layer's norm, at every token, prompt and response alike. Each layer
has one learnable a_l = `log_sigma`; its gradient is sigma_l * sum(eps * dL/dh_l). sigma is a standard deviation.
`layers="logits"` perturbs the output logits instead (the paper's ablation), with a single sigma.

A layer whose sigma is 0 is left alone altogether: nothing is attached to it, and if no sigma is positive the model is
untouched, so that it equals the unperturbed one bit for bit, in a half-precision model too. Where some sigma is
positive the residual stream of a half-precision model is float32 from that layer on (`perturbed_layer.py`), which by
itself changes its log-probs by a rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.models import fused_head, perturbed_layer
from trimtab.models.architecture import decoder, parts
from trimtab.models.noise import normals

LOGITS = "logits"
LARGEST = 1e4
"""Standard deviation beyond which a policy is noise: no entry of a trained model's hidden states or logits is so large,
and those that are not of this size are lost in float32's rounding."""


class PerturbationCoverage:
    """Fraction of each layer's entries that its noise changed, among the inputs of the layer's first matrix product.

    Compared after rounding to the type of that product: noise that rounding undoes changes nothing. "Clean" is the
    same pass without this layer's own noise, so what earlier layers added is in both. May be used for several passes.
    """

    def __init__(self) -> None:
        self._changed: dict[str, Tensor] = {}
        self._total: dict[str, int] = {}

    def add(self, layer: str, perturbed: Tensor, clean: Tensor) -> None:
        """Count one pass of one layer."""
        changed = (perturbed != clean).sum()
        self._changed[layer] = changed + self._changed[layer] if layer in self._changed else changed
        self._total[layer] = self._total.get(layer, 0) + clean.numel()

    def counts(self) -> dict[str, tuple[int, int]]:
        """Entries changed and entries seen, by layer."""
        return {layer: (int(count), self._total[layer]) for layer, count in self._changed.items()}

    @classmethod
    def merged(cls, parts: Iterable[Mapping[str, Sequence[int]]]) -> PerturbationCoverage:
        """The sum of several `counts`, such as those of different ranks."""
        whole = cls()
        for layer, (changed, seen) in (item for part in parts for item in part.items()):
            whole._changed[layer] = whole._changed.get(layer, torch.zeros((), dtype=torch.int64)) + changed
            whole._total[layer] = whole._total.get(layer, 0) + seen
        return whole

    def fractions(self) -> dict[str, float]:
        """By layer, as in `Perturbation.sigmas`; without layers of sigma 0 and logits, which nothing rounds."""
        return {layer: int(count) / max(self._total[layer], 1) for layer, count in self._changed.items()}


class Perturbation(nn.Module):
    """The learnable noise of one model. Holds `log_sigma` (float32, one per layer) and nothing of the model.

    `layers` is "all", "logits", one layer "3" or an inclusive range "0-5"; `std` is every sigma's first value.
    Raises `TrimtabError` for other layers, a std below 0 or above `LARGEST`, or a model without decoder layers.
    """

    def __init__(self, model: Any, layers: str = "all", std: float = 1e-4) -> None:
        super().__init__()
        if not 0 <= std <= LARGEST:
            raise TrimtabError(f"perturbation std {std} must be a number from 0 to {LARGEST:g}")
        self._decoder = decoder(model)
        # In a tuple: a module kept as an attribute would be trained, and saved, as this module's own.
        self._head: tuple[object, ...] = (parts(model).owner,) if layers == LOGITS else ()
        self._chosen = [] if layers == LOGITS else choose(layers, len(self._decoder.layers))
        start = math.log(std) if std > 0 else -math.inf
        size = len(self.names)
        self.log_sigma = nn.Parameter(torch.full((size,), start, device=next(model.parameters()).device))
        self._seed: int | None = None  # of the pass that is under way

    @property
    def names(self) -> list[str]:
        """What each entry of `log_sigma` belongs to: a layer's number, or "logits"."""
        return [str(index) for index in self._chosen] or [LOGITS]

    def sigmas(self) -> dict[str, float]:
        """The standard deviations by name."""
        return {name: math.exp(value) for name, value in zip(self.names, self.log_sigma.tolist(), strict=True)}

    @property
    def diverged(self) -> bool:
        """Whether some sigma is no number or above `LARGEST`."""
        return not bool((self.log_sigma.detach() <= math.log(LARGEST)).all())

    @contextmanager
    def attached(self, *, seed: int, watch: PerturbationCoverage | None = None) -> Iterator[None]:
        """Perturb every forward of the model inside, with the noise of `seed` (not negative).

        One draw for a seed: a second forward inside repeats it if its shapes are the same. The backward may run
        outside: gradient checkpointing recomputes with the noise of its own forward. `watch` counts what changed.
        """
        if self._seed is not None:
            raise TrimtabError(
                f"the perturbation is attached already, with seed {self._seed}; leave that context first"
            )
        self._seed = seed
        try:
            with self._logits(seed) if self._head else self._layers(seed, watch):
                yield
        finally:
            self._seed = None

    @contextmanager
    def _logits(self, seed: int) -> Iterator[None]:
        (owner,) = self._head
        with fused_head.perturbed(owner, self.log_sigma, seed) if self.sigmas()[LOGITS] != 0 else nullcontext():
            yield

    @contextmanager
    def _layers(self, seed: int, watch: PerturbationCoverage | None) -> Iterator[None]:
        layers, final_norms, dtype = self._decoder
        sigmas = {int(name): sigma for name, sigma in self.sigmas().items()}
        first = min((index for index, sigma in sigmas.items() if sigma != 0), default=len(layers))
        with ExitStack() as stack:
            for index, module in enumerate(layers[first:], first):
                noise = see = None
                if sigma := sigmas.get(index, 0.0):
                    log_sigma = self.log_sigma[self._chosen.index(index)]
                    noise = partial(_perturb, log_sigma=log_sigma, sigma=sigma, seed=seed, layer=index)
                    see = None if watch is None else partial(watch.add, str(index))
                stack.enter_context(perturbed_layer.Layer(module, dtype, noise, see).attached())
            if first < len(layers):
                stack.enter_context(perturbed_layer.wide_norms(final_norms, dtype, narrow=True))
            yield


def choose(layers: str, count: int) -> list[int]:
    """The numbers that "all", "3" or "0-5" stands for in a model of `count` layers."""
    if layers == "all":
        return list(range(count))
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", layers)
    if match is None:
        raise TrimtabError(f'perturbation layers {layers!r}: give "all", "logits", one layer "3" or a range "0-5"')
    low = int(match[1])
    high = int(match[2] or low)
    if not low <= high < count:
        raise TrimtabError(f"perturbation layers {layers!r}: the model's layers are 0-{count - 1}, lower number first")
    return list(range(low, high + 1))


def _perturb(
    hidden: Float[Tensor, "*batch hidden"], *, log_sigma: Float[Tensor, ""], sigma: float, seed: int, layer: int
) -> Float[Tensor, "*batch hidden"]:
    return _Perturb.apply(hidden, log_sigma, sigma, seed, layer)


class _Perturb(torch.autograd.Function):
    """hidden + exp(log_sigma) * noise, in float32 or wider. The noise is drawn again for the backward, not kept.

    `sigma` is exp(log_sigma) on the host, which the caller reads once for all layers.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, log_sigma: Tensor, sigma: float, seed: int, layer: int) -> Tensor:
        # Saved for more than its value: a recomputation that misses this layer's noise saves fewer tensors, and
        # PyTorch then refuses it instead of giving wrong gradients.
        ctx.save_for_backward(log_sigma)
        ctx.draw = partial(normals, tuple(hidden.shape), seed, (layer,), device=hidden.device)
        ctx.dtype = hidden.dtype
        noise = ctx.draw(dtype=perturbed_layer.wide(hidden.dtype))
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
