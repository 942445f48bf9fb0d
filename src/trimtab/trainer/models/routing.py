"""Records the experts each token is routed to in one forward, and replays them in another.

Sampler and trainer compute router scores with different rounding errors, so that nearly tied experts may be chosen
differently. Replaying the experts of the sampler (R3, arXiv 2510.11370) or of the proximal pass (R2, arXiv 2507.18071)
removes this mismatch. The gates, which weigh the experts' outputs, are computed from the current forward's own scores,
so that the router keeps its gradient.

The model is not changed. While a context is open, hooks on the routers read or replace their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int, Int16
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.trainer.models.architecture import MIXTURES, Gates, decoder_stack
from trimtab.types import ExpertArray


class RouterInfo(NamedTuple):
    """The number of mixture layers of a model, of experts in each, and of experts per token; 0 for a dense model."""

    layers: int
    experts: int
    chosen: int


class _MixtureLayer(NamedTuple):
    layer: Any  # the decoder layer that is run again under gradient checkpointing
    router: Any
    gates: Gates


def router_info(model: Any) -> RouterInfo:
    """Returns the sizes of a model's mixtures."""
    if not (mixtures := _mixture_layers(model)):
        return RouterInfo(0, 0, 0)
    return RouterInfo(len(mixtures), mixtures[0].router.num_experts, mixtures[0].router.top_k)


def require_known_experts(routes: ExpertArray, routers: RouterInfo, name: str) -> None:
    """Raises `TrimtabError` if a model does not have the experts (tokens, layers, chosen) that `name` recorded."""
    foreign = routes.size and (routes.min() < 0 or routes.max() >= routers.experts)
    if foreign or routes.shape[1:] != (routers.layers, routers.chosen):
        raise TrimtabError(
            f"{name} records experts that this model does not have: it has {routers.layers} mixture layers of "
            f"{routers.experts} experts, {routers.chosen} for a token"
        )


def _mixture_layers(model: Any) -> list[_MixtureLayer]:
    """Returns the layers with a router, in the order of the forward pass."""
    known = {gates.router: gates for gates in MIXTURES.values()}
    layers: list[_MixtureLayer] = []
    for layer in decoder_stack(model).layers:
        for module in layer.modules():
            kinds = [kind.__name__ for kind in type(module).__mro__]
            if gates := next((known[kind] for kind in kinds if kind in known), None):
                layers.append(_MixtureLayer(layer, module, gates))
    return layers


class RoutingTape:
    """Records the choices of all routers, forward by forward."""

    def __init__(self, mixtures: list[_MixtureLayer]) -> None:
        self._recorded: list[list[Tensor]] = [[] for _ in mixtures]
        self._chosen: int = mixtures[0].router.top_k

    def _record(self, layer: int, _router: nn.Module, _args: Any, out: tuple[Tensor, ...]) -> None:
        self._recorded[layer].append(out[2].to(torch.int16))

    def take(self) -> Int16[Tensor, "tokens layers chosen"]:
        """Returns the record since the last call, with tokens in the order in which they were run, including padding.

        Tokens are flattened batch x time. Experts have the order of the router, highest score first. Raises
        `TrimtabError` when a forward stopped between two layers.
        """
        counts = {sum(len(part) for part in parts) for parts in self._recorded}
        if len(counts) > 1:
            raise TrimtabError(f"layers recorded the routing of {sorted(counts)} tokens: a forward was not finished")
        if counts == {0}:
            return torch.empty(0, len(self._recorded), self._chosen, dtype=torch.int16)
        recorded = torch.stack([torch.cat(parts) for parts in self._recorded], dim=1)
        for parts in self._recorded:
            parts.clear()
        return recorded


@contextmanager
def record_routing(model: Any) -> Iterator[RoutingTape]:
    """Records the experts of every token that runs through the model, or through single layers of it, inside.

    Under `replay_routing` it records what the routers would have chosen themselves, given the replayed choices of the
    previous layers. Leave the context before a backward with gradient checkpointing, which runs the layers again.
    The model must have experts.
    """
    mixtures = _mixture_layers(model)
    tape = RoutingTape(mixtures)
    with ExitStack() as stack:
        for index, mixture in enumerate(mixtures):
            # Prepended: it must run before a hook that replaces the router's output.
            handle = mixture.router.register_forward_hook(partial(tape._record, index), prepend=True)
            stack.callback(handle.remove)
        yield tape


@contextmanager
def replay_routing(model: Any, routes: Int[Tensor, "tokens layers chosen"]) -> Iterator[None]:
    """Replays `routes` in one forward inside; tokens are flattened batch x time.

    The order of the experts is kept, so that replaying a forward's own choices changes no bit of it. The backward may
    run outside. The routes must be on the model's device. They are not checked, which would wait for the device: call
    `require_known_experts` before. Raises `TrimtabError` if a layer does not run exactly once inside.
    """
    mixtures = _mixture_layers(model)
    layers = [_Replay(index, mixture, routes[:, index].long()) for index, mixture in enumerate(mixtures)]
    with ExitStack() as stack:
        for layer in layers:
            layer.attach(stack)
        yield
    if idle := [str(layer.index) for layer in layers if layer.uses == 0]:
        raise TrimtabError(f"the routing of mixture layers {', '.join(idle)} was never replayed: run the model inside")


@dataclass(eq=False)
class _Replay:
    """Replays the routing of one layer in one forward; the autograd graph keeps it alive for a recomputation."""

    index: int
    mixture: _MixtureLayer
    chosen: Int[Tensor, "tokens chosen"]
    uses: int = 0

    def attach(self, stack: ExitStack) -> None:
        layer = self.mixture.layer
        if getattr(layer, "gradient_checkpointing", False) and layer.training:
            # Bound to the call, not to the context: the recomputation may run after the context has ended.
            original = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(self._checkpoint, original)
            stack.callback(setattr, layer, "_gradient_checkpointing_func", original)
        else:
            stack.callback(self.mixture.router.register_forward_hook(self._count_and_replace).remove)

    def _checkpoint(self, original: Callable[..., Any], run: Callable[..., Any], *args: Any) -> Any:
        self._count()
        return original(partial(self._run, run), *args)

    def _run(self, run: Callable[..., Any], *args: Any) -> Any:
        handle = self.mixture.router.register_forward_hook(self._replace)
        try:
            return run(*args)
        finally:
            handle.remove()

    def _count(self) -> None:
        self.uses += 1
        if self.uses > 1:
            raise TrimtabError(
                f"mixture layer {self.index} runs a second time with routes of one forward: replay each forward alone"
            )

    def _count_and_replace(self, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
        self._count()
        return self._replace(*call)

    def _replace(self, router: nn.Module, _args: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        scores = out[0]
        if len(scores) != len(self.chosen):
            raise TrimtabError(
                f"routes of {len(self.chosen)} tokens do not belong to this forward, which runs {len(scores)}"
            )
        chosen, how = self.chosen, self.mixture.gates
        # The family's own gates, operation by operation, with `gather` in place of `topk`.
        gates = scores.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        if router.norm_topk_prob if how.renormalized is None else how.renormalized:
            gates = gates / gates.sum(-1, keepdim=True)
        return scores, gates if how.float32 else gates.to(scores.dtype), chosen


def routing_agreement(
    one: Int16[Tensor, "tokens layers chosen"], other: Int16[Tensor, "tokens layers chosen"]
) -> Int[Tensor, "2"]:
    """Returns the number of (token, layer) pairs with equal sets of experts, and of all pairs, on `one`'s device."""
    same = (one.sort(-1).values == other.to(one.device).sort(-1).values).all(-1)
    return torch.stack([same.sum(), torch.full((), same.numel(), device=same.device)])
