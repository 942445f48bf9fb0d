"""Adaptive layerwise perturbation (ALP): learnable Gaussian noise on the inputs of decoder layers.

    h_l  <-  h_l + sigma_l * eps,   sigma_l = exp(a_l),   eps ~ N(0, I) of h's shape     (arXiv 2603.19470)

The noise is added to the residual stream, before the layer's norm, at every token of prompt and response. Each layer
has one learnable a_l = `log_sigma`; its gradient is sigma_l * sum(eps * dL/dh_l). sigma is a standard deviation.
`layers="logits"` perturbs the output logits instead (the paper's ablation), with a single sigma.

A layer whose sigma is 0 gets no noise, and if no sigma is positive no hook is attached, so that the model equals the
unperturbed one bit for bit, also in half precision. From the first layer with a positive sigma to the final norm, the
residual stream of a half-precision model is float32, which itself changes log-probs by rounding errors. A
half-precision stream would lose small noise: near 1.0 the spacing of bfloat16 is 0.0078, and rounding removes anything
below half of it, whatever the precision of the addition. Norms read the float32 stream; matrix products get the model's
own dtype. A float32 model under autocast behaves like that already, and only gets the noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.trainer.models import fused_head
from trimtab.trainer.models.architecture import decoder_stack, is_block, is_norm, model_parts
from trimtab.trainer.models.noise import normals
from trimtab.trainer.models.packed_attention import PackedLayout

LOGITS = "logits"
MAX_STD = 1e4
"""The largest standard deviation. Entries of a trained model's hidden states and logits are smaller, and would be lost
to float32 rounding."""


class PerturbationCoverage:
    """Counts the entries that each layer's noise changed, in the inputs of the layer's first matrix product.

    Entries are compared after rounding to the dtype of that product, which may undo small noise. "Clean" is the same
    pass without this layer's own noise; noise of earlier layers is in both. Layers of sigma 0 are not counted, nor are
    logits, which are not rounded. It may count several passes.
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
    """The learnable noise of one model. Holds `log_sigma` (float32, one per layer) and no part of the model.

    `layers` is "all", "logits", or layers and inclusive ranges "0-4,12"; `std` is the initial sigma of all layers, or a
    list with one for each layer. Raises `TrimtabError` for other layers, a std below 0 or above `MAX_STD`, or a
    list of another length.
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

    @property
    def names(self) -> list[str]:
        """The names of the entries of `log_sigma`: layer numbers, or "logits"."""
        return [str(index) for index in self._chosen] or [LOGITS]

    def sigmas(self) -> dict[str, float]:
        """Returns the standard deviations by name, infinity if they are NaN or would overflow."""
        values = [math.exp(value) if value < 700 else math.inf for value in self.log_sigma.tolist()]
        return dict(zip(self.names, values, strict=True))

    @contextmanager
    def attached(
        self, *, seed: int, coverage: PerturbationCoverage | None = None, sigmas: Mapping[str, float] | None = None
    ) -> Iterator[None]:
        """Perturbs every forward of the model inside, with the noise of `seed` (not negative).

        A second forward inside with the same shapes gets the same noise. The backward may run outside: gradient
        checkpointing recomputes with the noise of the same forward. `coverage` counts changed entries.
        sigmas: what `sigmas()` returned since the last update; None: read now, which waits for the device.
        """
        sigmas = self.sigmas() if sigmas is None else sigmas
        with self._logits(seed, sigmas) if self._head else self._layers(seed, sigmas, coverage):
            yield

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
                    noise = partial(_Perturb.apply, log_sigma, sigma, seed, index)
                    see = None if watch is None else partial(watch.add, str(index))
                stack.enter_context(PerturbedLayer(module, dtype, noise, see).attached())
            if first < len(layers):
                stack.enter_context(float32_norms(final_norms, dtype, narrow=True))
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
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < count:
            raise TrimtabError(
                f"perturbation layers {layers!r}: the model's layers are 0-{count - 1}, lower number first"
            )
        chosen += range(low, high + 1)
    if len(set(chosen)) < len(chosen):
        raise TrimtabError(f"perturbation layers {layers!r}: name each layer once")
    return chosen


class _Perturb(torch.autograd.Function):
    """Computes hidden + exp(log_sigma) * noise, in float32 or wider. The backward draws the noise again.

    `sigma` is exp(log_sigma) as a Python float, which the caller reads once for all layers.
    """

    @staticmethod
    def forward(ctx: Any, log_sigma: Tensor, sigma: float, seed: int, layer: int, hidden: Tensor) -> Tensor:
        # Saved also as a check: a recomputation without this layer's noise saves fewer tensors, and PyTorch then raises
        # an error instead of returning wrong gradients.
        ctx.save_for_backward(log_sigma)
        ctx.draw = partial(normals, tuple(hidden.shape), seed, (layer,), device=hidden.device)
        ctx.dtype = hidden.dtype
        noise = ctx.draw(dtype=stream_dtype(hidden.dtype))
        return torch.add(hidden.to(noise.dtype), noise, alpha=sigma, out=noise)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (log_sigma,), (grad,), to_log_sigma = ctx.saved_tensors, grads, None
        if ctx.needs_input_grad[0]:
            total = torch.dot(ctx.draw(dtype=grad.dtype).view(-1), grad.reshape(-1))
            to_log_sigma = (log_sigma.exp() * total).to(log_sigma.dtype)
        return to_log_sigma, None, None, None, grad.to(ctx.dtype) if ctx.needs_input_grad[4] else None


# The layer whose checkpointed pass is running. A recomputation may run while other noise is attached to the same layer,
# and must not use it.
_owner: ContextVar[PerturbedLayer | None] = ContextVar("owner", default=None)


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a perturbed residual stream."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(eq=False)
class PerturbedLayer:
    """Hooks of one decoder layer, which add the noise and keep the stream in float32 inside `attached`.

    dtype: of the model's own residual stream. observe: called with the input of the layer's first product, with and
    without this layer's noise.
    """

    module: nn.Module
    dtype: torch.dtype
    perturb: Callable[[Tensor], Any] | None = None
    observe: Callable[[Tensor, Tensor], None] | None = None
    _attached: bool = False
    # This layer's input before and after its noise, until both are passed to `observe`.
    _clean: Tensor | None = None
    _perturbed: Tensor | None = None
    _norm: nn.Module | None = None  # the norm between the perturbed input and the first product
    _tokens: int | None = None  # number of tokens before the fillers of a packed row; None: all

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attaches the hooks inside. Gradient checkpointing recomputes with the same hooks, also after the context."""
        with ExitStack() as stack:
            if original := vars(self.module).get("_gradient_checkpointing_func"):
                checkpoint = partial(self._checkpoint, original)
                stack.enter_context(_override(self.module, "_gradient_checkpointing_func", checkpoint))
            stack.enter_context(self._hooks())
            yield

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        children = list(self.module.children())
        with ExitStack() as stack:
            if self.perturb is not None:
                handle = self.module.register_forward_pre_hook(self._before_layer, with_kwargs=True)
                stack.callback(handle.remove)
            if self.dtype != stream_dtype(self.dtype) or self.observe is not None:
                for child in filter(is_block, children):
                    stack.callback(child.register_forward_pre_hook(self._before_block, with_kwargs=True).remove)
            if self.observe is not None:
                for child in filter(is_norm, children):
                    stack.callback(child.register_forward_pre_hook(self._before_norm).remove)
            stack.enter_context(float32_norms(children, self.dtype))
            self._attached = True
            stack.callback(self._detach)
            yield

    def _detach(self) -> None:
        self._attached = False
        self._clean = self._perturbed = self._norm = None

    def _checkpoint(self, original: Callable[..., Any], run: Callable[..., Any], *args: Any) -> Any:
        return original(partial(self._run, run), *args)

    def _run(self, run: Callable[..., Any], *args: Any) -> Any:
        """Runs a checkpointed pass: the first one, or the recomputation, which may run after `attached` has ended."""
        token = _owner.set(self)
        try:
            if self._attached:
                return run(*args)
            self.observe = None  # it was called in the first pass
            with self._hooks():
                return run(*args)
        finally:
            _owner.reset(token)

    def _before_layer(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.perturb is None or _owner.get() not in (None, self):
            return None
        hidden, put = _first(args, kwargs)
        perturbed = self.perturb(hidden)
        if self.observe is not None:
            self._clean, self._perturbed, self._norm = hidden.detach(), perturbed, None
            layout = kwargs.get("layout")
            self._tokens = layout.responses.stop if isinstance(layout, PackedLayout) else None
        return put(perturbed)

    def _before_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._perturbed is not None and args[0] is self._perturbed:
            self._norm = module

    def _before_block(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value, put = _first(args, kwargs)
        if self.observe is not None and self._clean is not None:
            self._call_observe(value, self._clean)
            self._clean = self._perturbed = None
        return put(value.to(self.dtype)) if self.dtype != stream_dtype(self.dtype) else None

    @torch.no_grad()
    def _call_observe(self, value: Tensor, clean: Tensor) -> None:
        assert self.observe is not None
        clean = clean.to(stream_dtype(clean.dtype))
        if self._norm is not None:
            clean = self._norm.forward(clean)  # calling the module itself would run the hooks
        device = value.device.type
        cast = torch.is_autocast_enabled(device) and value.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if cast else self.dtype
        self.observe(value[:, : self._tokens].to(dtype), clean[:, : self._tokens].to(dtype))


@contextmanager
def float32_norms(modules: Iterable[nn.Module], dtype: torch.dtype, *, narrow: bool = False) -> Iterator[None]:
    """Lets norms of a half-precision model read a float32 stream inside; `narrow` converts their output back."""
    with ExitStack() as stack:
        if dtype != stream_dtype(dtype):
            for module in filter(is_norm, modules):
                if isinstance(module, nn.LayerNorm):  # its kernel needs parameters of the input's dtype
                    stack.enter_context(_override(module, "forward", partial(_layer_norm, module)))
                if narrow:
                    stack.callback(module.register_forward_hook(lambda *call: call[2].to(dtype)).remove)
        yield


def _layer_norm(module: nn.LayerNorm, hidden: Tensor) -> Tensor:
    weight, bias = (p if p is None else p.to(hidden.dtype) for p in (module.weight, module.bias))
    return F.layer_norm(hidden, module.normalized_shape, weight, bias, module.eps)


@contextmanager
def _override(module: nn.Module, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of one object inside, whether the object or its class defines it."""
    attributes = vars(module)
    before = attributes.get(name)
    attributes[name] = replacement
    try:
        yield
    finally:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Returns the hidden state among a module's arguments, and a function that replaces it."""
    if args:
        return args[0], lambda value: ((value, *args[1:]), kwargs)
    return kwargs["hidden_states"], lambda value: (args, {**kwargs, "hidden_states": value})
