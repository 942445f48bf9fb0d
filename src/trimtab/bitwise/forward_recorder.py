"""Records every operation of a forward as a 64-bit digest of inputs and outputs per token.

Two ways of running one model meet tokens in other batches and another order, so nothing can be compared call by call.
Each token has a key instead, known to the tape before a forward starts, and a tensor belongs to it as far as its
leading dimensions hold the tokens of that forward. The numbers themselves are too many to keep (gigabytes for a small
model and a few hundred tokens); a fingerprint decides whether two rows are equal, and what differs is run again and
kept in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trimtab.models.architecture import is_norm

Half = Literal["input", "output"]

ROOT = "(module)"
"""What the module itself is called, which has no path of its own."""

# Operations that compute nothing: they move numbers, choose among them, or make masks and places for that.
_MOVES = re.compile(
    r"aten\.(_?unsafe_view|_reshape_alias|alias|arange|as_strided|bitwise_\w+|cat|clone|copy_?|detach|empty\w*|eq|expand|"
    r"fill_?|full\w*|gather|ge|gt|index\w*|le|lift\w*|lt|masked_fill_?|ne|new_\w+|ones\w*|permute|repeat|reshape|"
    r"scalar_tensor|scatter_?|select|slice|split\w*|squeeze|stack|t|transpose|unbind|unsqueeze|view|where|zeros\w*)\."
)


class Place(NamedTuple):
    """One half of an operation: what it was given, or what it made."""

    operation: str
    half: Half


@dataclass
class Track:
    """What one place saw, forward by forward: keys of tokens, and a fingerprint or all numbers of each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    types: set[str] = field(default_factory=set)

    def joined(self) -> tuple[Int[Tensor, " tokens"], Tensor]:
        return torch.cat(self.keys), torch.cat(self.values)


@dataclass
class Tape:
    """The tracks of one side in the order its operations first ran.

    `full`: the place whose numbers are kept; `inside`: the operation whose tensor operations are recorded as well.
    """

    full: Place | None = None
    inside: str | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    tracks: dict[Place, Track] = field(default_factory=dict)
    steps: set[tuple[str, ...]] = field(default_factory=set)  # operations inside, one sequence for every way they ran
    _keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _calls: dict[str, int] = field(default_factory=dict)

    def begin(self, keys: Int[Tensor, "*shape"]) -> None:
        """A forward over these tokens starts; equal keys are equal tokens in equal contexts."""
        self._keys = keys.detach().flatten().cpu()
        self._calls.clear()

    def call(self, operation: str, kind: str) -> str:
        """The name of a call that starts now: its operation's, numbered where one forward runs it again."""
        count = self._calls[operation] = self._calls.get(operation, 0) + 1
        name = operation if count == 1 else f"{operation} (call {count})"
        self.kinds.setdefault(name, kind)
        return name

    def add(self, operation: str, half: Half, values: Any) -> None:
        """Tensors anywhere in `values`, as far as they hold one row for each token of this forward."""
        rows, types = [], []
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and (found := _rows(leaf.detach(), len(self._keys))) is not None:
                rows.append(found)
                types.append(str(leaf.dtype).removeprefix("torch."))
        if not rows:
            return
        place = Place(operation, half)
        track = self.tracks.setdefault(place, Track())
        track.types.add("+".join(dict.fromkeys(types)))
        whole = torch.cat([row.double() for row in rows], 1)
        track.keys.append(self._keys)
        track.values.append((whole if place == self.full else fingerprints(whole)).cpu())

    def run(self, operation: str, work: Callable[[], Any]) -> Any:
        """`work()`, with its tensor operations recorded where this operation is the one to look into."""
        if operation != self.inside:
            return work()
        with _Inside(self, operation) as mode:
            result = work()
        self.steps.add(tuple(mode.names))
        return result


@contextmanager
def recorded(model: nn.Module, tape: Tape, *, skip: frozenset[str] = frozenset()) -> Iterator[None]:
    """Inside, `tape` hears every module of `model` that computes something itself (it has no children, or parameters
    of its own), and the attention function of transformers models. `skip`: paths of modules to leave out."""
    names = {module: name or ROOT for name, module in model.named_modules()}
    with ExitStack() as undo:
        for module, name in names.items():
            if _computes(module) and name not in skip:
                tape.modules[name] = module
                undo.enter_context(_heard(module, name, tape))
        undo.enter_context(_attention_heard(names, tape))
        yield


@contextmanager
def followed(backbone: nn.Module, tape: Tape) -> Iterator[None]:
    """Inside, every forward of a transformers backbone tells `tape` its tokens, by position and id (`token_keys`)."""

    def begin(_module: nn.Module, _args: Any, given: dict[str, Any]) -> None:
        tape.begin(token_keys(given["position_ids"], given["input_ids"]))

    handle = backbone.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def token_keys(positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One number for each pair of position and id. They name a token where no two texts that part have the same id at
    the same position from there on."""
    return positions * 2**32 + ids


def fingerprints(rows: torch.Tensor) -> Int[Tensor, " rows"]:
    """64 bits for each row of float64 numbers. Rows that differ in one number never agree, others with a chance of
    about 2^-50; 0 and -0 differ, as their bits do."""
    bits = rows.contiguous().view(torch.int64)
    # Numbers that were narrower end in zeros: without this, products would keep only a few of the 64 bits.
    bits = bits ^ (bits >> 32 & 0xFFFFFFFF)
    return (bits * _odd(rows.shape[1]).to(bits.device)).sum(1)


@cache
def _odd(count: int) -> Tensor:
    numbers = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))
    return numbers * 2 + 1


def _rows(tensor: Tensor, count: int) -> Tensor | None:
    """(count, numbers), if the leading dimensions hold the tokens."""
    size = 1
    for extent in tensor.shape:
        size *= extent
        if size == count:
            return tensor.reshape(count, -1)
    return None


def _computes(module: nn.Module) -> bool:
    return next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None


@contextmanager
def _heard(module: nn.Module, name: str, tape: Tape) -> Iterator[None]:
    own, kind = module.forward, kind_of(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = tape.call(name, kind)
        tape.add(call, "input", (args, kwargs))
        result = tape.run(call, lambda: own(*args, **kwargs))
        tape.add(call, "output", result)
        return result

    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextmanager
def _attention_heard(names: dict[nn.Module, str], tape: Tape) -> Iterator[None]:
    """Listen at the function between the projections of transformers' attention, which is no module."""
    own = ALL_ATTENTION_FUNCTIONS.get_interface

    def get(*args: Any, **kwargs: Any) -> Any:
        attend = own(*args, **kwargs)

        def heard(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
            if module not in names:
                return attend(module, query, key, value, *rest, **options)
            new = query.shape[2]  # keys and values of a cache come first
            q, k, v = (x.transpose(1, 2)[:, -new:] for x in (query, key, value))
            tape.add(tape.call(f"{names[module]} (rotary)", "rotary"), "output", (q, k))
            call = tape.call(f"{names[module]} (attention)", "attention")
            tape.add(call, "input", (q, k, v))
            result = tape.run(call, lambda: attend(module, query, key, value, *rest, **options))
            tape.add(call, "output", result[0])
            return result

        return heard

    ALL_ATTENTION_FUNCTIONS.get_interface = get
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


class _Inside(TorchDispatchMode):
    """Names of the tensor operations that run, and what each made of the tokens."""

    def __init__(self, tape: Tape, operation: str) -> None:
        super().__init__()
        self._tape, self._operation = tape, operation
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func._can_decompose():  # without autograd, operations made of others arrive here whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not _MOVES.match(name):
            self._tape.add(step(self._operation, len(self.names)), "output", result)
            self.names.append(name.rpartition(".")[0])
        return result


def step(operation: str, index: int) -> str:
    """The name under which a tape keeps what one tensor operation inside `operation` made."""
    return f"{operation} step {index}"


def kind_of(module: nn.Module) -> str:
    """What a module does, in one word."""
    name = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "embedding"
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    if "Norm" in name or is_norm(module):
        return "norm"
    if "rotary" in name.lower():
        return "rotary"
    return "activation" if next(module.parameters(), None) is None else name
