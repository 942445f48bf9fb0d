"""Hooks of one perturbed decoder layer: they add the noise and keep the residual stream in float32.

A half-precision residual stream loses small noise: near 1.0 the spacing of bfloat16 is 0.0078, and rounding removes
anything below half of it, whatever the precision of the addition. Therefore the stream is float32 from the first
perturbed layer to the final norm. Norms read it in float32; matrix products get the model's own dtype. A float32 model
under autocast behaves like that already, and only gets the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from trimtab.trainer.models.architecture import is_block, is_norm
from trimtab.trainer.models.packed_attention import PackedLayout

Perturb = Callable[[Float[Tensor, "*batch hidden"]], Float[Tensor, "*batch hidden"]]
# Called with the input of a layer's first product, with and without this layer's noise.
ObserveInput = Callable[[Tensor, Tensor], None]

# The layer whose checkpointed pass is running. A recomputation may run while other noise is attached to the same layer,
# and must not use it.
_owner: ContextVar[PerturbedLayer | None] = ContextVar("owner", default=None)


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a perturbed residual stream."""
    return torch.promote_types(dtype, torch.float32)


class PerturbedLayer:
    """One decoder layer, perturbed inside `attached`. `dtype` is that of the model's own residual stream."""

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, perturb: Perturb | None = None, observe: ObserveInput | None = None
    ) -> None:
        self.module = module
        self.dtype = dtype
        self.perturb = perturb
        self.observe = observe
        self._attached = False
        # This layer's input before and after its noise, until both are passed to `observe`.
        self._clean: Tensor | None = None
        self._perturbed: Tensor | None = None
        self._norm: nn.Module | None = None  # what stands between the perturbed input and the first product
        self._tokens: int | None = None  # how many come before the fillers of a packed row; None without any

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
        """Runs a checkpointed pass: the first one, or the recomputation, when this context may have been left."""
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
            clean = self._norm.forward(clean)  # not a call of the module, which would run the hooks
        dtype = self._product_dtype(value)
        self.observe(value[:, : self._tokens].to(dtype), clean[:, : self._tokens].to(dtype))

    def _product_dtype(self, value: Tensor) -> torch.dtype:
        device = value.device.type
        if torch.is_autocast_enabled(device) and value.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return self.dtype


@contextmanager
def float32_norms(modules: Iterable[nn.Module], dtype: torch.dtype, *, narrow: bool = False) -> Iterator[None]:
    """Lets the norms among `modules` read a float32 stream in a half-precision model.

    `narrow` converts their output back.
    """
    with ExitStack() as stack:
        if dtype != stream_dtype(dtype):
            for module in filter(is_norm, modules):
                if isinstance(module, nn.LayerNorm):  # its kernel wants parameters of the input's type
                    stack.enter_context(_override(module, "forward", partial(_layer_norm, module)))
                if narrow:
                    stack.callback(module.register_forward_hook(lambda *call: call[2].to(dtype)).remove)
        yield


def _layer_norm(module: nn.LayerNorm, hidden: Tensor) -> Tensor:
    weight, bias = (p if p is None else p.to(hidden.dtype) for p in (module.weight, module.bias))
    return functional.layer_norm(hidden, module.normalized_shape, weight, bias, module.eps)


@contextmanager
def _override(module: nn.Module, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of one object inside, whether it is defined by the object or its class."""
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
