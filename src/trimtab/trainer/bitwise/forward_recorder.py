"""Records every operation of a forward as a 64-bit digest of inputs and outputs per token.

Two implementations of one model run tokens in different batches and orders, so that calls cannot be compared one by
one. Instead each token has a key, which the recording knows before a forward starts, and the rows of a tensor belong to
tokens if its leading dimensions hold the tokens of that forward. All values would be too large to keep (gigabytes for a
small model and a few hundred tokens): a digest decides whether two rows are equal, and a tensor that differs is
recorded again with its values.
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

from trimtab.trainer.models.architecture import is_norm

Half = Literal["input", "output"]

ROOT = "(module)"
"""The name of the module itself, whose path is empty."""

# Operations that compute nothing: they move or select numbers, or create masks and indices.
_DATA_MOVEMENT = re.compile(
    r"aten\.(_?unsafe_view|_reshape_alias|alias|arange|as_strided|bitwise_\w+|cat|clone|copy_?|detach|empty\w*|eq|expand|"
    r"fill_?|full\w*|gather|ge|gt|index\w*|le|lift\w*|lt|masked_fill_?|ne|new_\w+|ones\w*|permute|repeat|reshape|"
    r"scalar_tensor|scatter_?|select|slice|split\w*|squeeze|stack|t|transpose|unbind|unsqueeze|view|where|zeros\w*)\."
)


class TensorName(NamedTuple):
    """The input or the output of an operation."""

    operation: str
    half: Half


@dataclass
class RecordedTensor:
    """The recorded rows of one input or output, forward by forward: token keys, and digests or all values."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    types: set[str] = field(default_factory=set)

    def joined(self) -> tuple[Int[Tensor, " tokens"], Tensor]:
        return torch.cat(self.keys), torch.cat(self.values)


@dataclass
class ForwardRecording:
    """The recording of one implementation, in the order in which its operations first ran.

    `full`: the tensor whose values are recorded; `inside`: the operation whose tensor operations are recorded as well.
    """

    full: TensorName | None = None
    inside: str | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    tensors: dict[TensorName, RecordedTensor] = field(default_factory=dict)
    steps: set[tuple[str, ...]] = field(default_factory=set)  # distinct sequences of the tensor operations inside
    _keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _calls: dict[str, int] = field(default_factory=dict)

    def begin(self, keys: Int[Tensor, "*shape"]) -> None:
        """Starts a forward over these tokens; equal keys mean equal tokens in equal contexts."""
        self._keys = keys.detach().flatten().cpu()
        self._calls.clear()

    def call(self, operation: str, kind: str) -> str:
        """Returns the name of a new call: that of its operation, numbered if a forward runs it repeatedly."""
        count = self._calls[operation] = self._calls.get(operation, 0) + 1
        name = operation if count == 1 else f"{operation} (call {count})"
        self.kinds.setdefault(name, kind)
        return name

    def add(self, operation: str, half: Half, values: Any) -> None:
        """Records all tensors in the nested `values` that hold one row for each token of this forward."""
        rows, types = [], []
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and (row := _rows(leaf.detach(), len(self._keys))) is not None:
                rows.append(row)
                types.append(str(leaf.dtype).removeprefix("torch."))
        if not rows:
            return
        name = TensorName(operation, half)
        recorded = self.tensors.setdefault(name, RecordedTensor())
        recorded.types.add("+".join(dict.fromkeys(types)))
        whole = torch.cat([row.double() for row in rows], 1)
        recorded.keys.append(self._keys)
        recorded.values.append((whole if name == self.full else row_digests(whole)).cpu())

    def run(self, operation: str, work: Callable[[], Any]) -> Any:
        """Returns `work()` and records its tensor operations if this operation is `inside`."""
        if operation != self.inside:
            return work()
        with _Inside(self, operation) as mode:
            result = work()
        self.steps.add(tuple(mode.names))
        return result


@contextmanager
def record_forward(
    model: nn.Module, recording: ForwardRecording, *, skip: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Records every module of `model` that computes something itself, and transformers' attention function.

    Such a module has no children, or has parameters itself. `skip`: paths of modules to leave out.
    """
    names = {module: name or ROOT for name, module in model.named_modules()}
    with ExitStack() as undo:
        for module, name in names.items():
            leaf = next(module.children(), None) is None
            if (leaf or next(module.parameters(recurse=False), None) is not None) and name not in skip:
                recording.modules[name] = module
                undo.enter_context(_record_module(module, name, recording))
        undo.enter_context(_record_attention(names, recording))
        yield


@contextmanager
def record_tokens(backbone: nn.Module, recording: ForwardRecording) -> Iterator[None]:
    """Starts a forward of the recording with the token keys of every forward of a transformers backbone inside."""

    def begin(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        recording.begin(token_keys(kwargs["position_ids"], kwargs["input_ids"]))

    handle = backbone.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def token_keys(positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns one number for each pair of position and id.

    It identifies a token if no two texts have the same id at the same position after their common prefix.
    """
    return positions * 2**32 + ids


def row_digests(rows: torch.Tensor) -> Int[Tensor, " rows"]:
    """Returns a 64-bit digest of each row of float64 numbers.

    Rows that differ in one number never collide, others with a probability of about 2^-50; 0 and -0 differ.
    """
    bits = rows.contiguous().view(torch.int64)
    # Values converted from narrower dtypes end in zeros: otherwise products would keep only a few of the 64 bits.
    bits = bits ^ (bits >> 32 & 0xFFFFFFFF)
    return (bits * _odd(rows.shape[1]).to(bits.device)).sum(1)


@cache
def _odd(count: int) -> Tensor:
    numbers = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))
    return numbers * 2 + 1


def _rows(tensor: Tensor, count: int) -> Tensor | None:
    """Returns the tensor as (count, values) if its leading dimensions hold the tokens, else None."""
    size = 1
    for extent in tensor.shape:
        size *= extent
        if size == count:
            return tensor.reshape(count, -1)
    return None


@contextmanager
def _record_module(module: nn.Module, name: str, recording: ForwardRecording) -> Iterator[None]:
    original, kind = module.forward, kind_of(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = recording.call(name, kind)
        recording.add(call, "input", (args, kwargs))
        result = recording.run(call, lambda: original(*args, **kwargs))
        recording.add(call, "output", result)
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
def _record_attention(names: dict[nn.Module, str], recording: ForwardRecording) -> Iterator[None]:
    """Records the attention function of transformers between the projections, which is not a module."""
    original = ALL_ATTENTION_FUNCTIONS.get_interface

    def get(*args: Any, **kwargs: Any) -> Any:
        attend = original(*args, **kwargs)

        def recorded_attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
        ) -> Any:
            if module not in names:
                return attend(module, query, key, value, *rest, **options)
            new = query.shape[2]  # cached keys and values come first and are skipped
            q, k, v = (x.transpose(1, 2)[:, -new:] for x in (query, key, value))
            recording.add(recording.call(f"{names[module]} (rotary)", "rotary"), "output", (q, k))
            call = recording.call(f"{names[module]} (attention)", "attention")
            recording.add(call, "input", (q, k, v))
            result = recording.run(call, lambda: attend(module, query, key, value, *rest, **options))
            recording.add(call, "output", result[0])
            return result

        return recorded_attention

    ALL_ATTENTION_FUNCTIONS.get_interface = get
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


class _Inside(TorchDispatchMode):
    """Records the names and the outputs of all tensor operations that run."""

    def __init__(self, recording: ForwardRecording, operation: str) -> None:
        super().__init__()
        self._recording, self._operation = recording, operation
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func._can_decompose():  # in inference mode composite operations arrive undecomposed
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not _DATA_MOVEMENT.match(name):
            self._recording.add(step_name(self._operation, len(self.names)), "output", result)
            self.names.append(name.rpartition(".")[0])
        return result


def step_name(operation: str, index: int) -> str:
    """Returns the name of the output of one tensor operation inside `operation`."""
    return f"{operation} step {index}"


def kind_of(module: nn.Module) -> str:
    """Returns the kind of a module in one word."""
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
