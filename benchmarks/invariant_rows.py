"""What invariant numerics take for granted of PyTorch on this machine: which sizes change the bits of a number.

    .venv/bin/python benchmarks/invariant_rows.py [--threads 1 2] [--seed 0] [--checks rows sums]

Every line computes the same numbers among few and among many others, in one place and in another, and names the sizes
at which a bit differs. Lines marked `yes` are what `trimtab/trainer/models/invariant` is built on: none may name a
size. The others say why it pads, avoids an operation, or could do without. Shapes are SmolLM2-135M's and the laboratory
model's.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.trainer.models.fused_head import TILE_VOCABULARY
from trimtab.trainer.models.invariant.invariant_attention import KEY_BLOCK, query_rows
from trimtab.trainer.models.matmul import TILE_ROWS, product

Functions = Mapping[str, Callable[[Tensor], Tensor]]
Multiply = Callable[[Tensor, Tensor], Tensor]

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LARGE = (576, 640, 768, 1024, 1536, 2048)
ROWS = {
    "1 to 3": range(1, 4),
    "5 to 31, no multiples of 4": [n for n in range(5, 32) if n % 4],
    "multiples of 4": [*range(4, 513, 4), *LARGE],
}
SIXTEENS = (*range(16, 513, 16), *LARGE)  # what `products.padded` makes, and more
# Inner dimension and columns.
WEIGHTS = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, TILE_VOCABULARY))
WEIGHTS += ((128, 128), (128, 336), (336, 128), (128, 14))
FUSED = {
    "q/k/v": (576, (576, 192, 192)),
    "gate/up": (576, (1536, 1536)),
    "tiles of the head": (576, (TILE_VOCABULARY,) * 4),
    "laboratory q/k/v": (128, (128, 128, 128)),
    "laboratory gate/up": (128, (336, 336)),
}
WIDTHS = (32, 64, 80, 128, 256)  # of an attention head
QUERY_COUNTS = (*range(1, 21), *range(24, 65, 4), 96, 100, 192, 384)
KEY_COUNTS = (KEY_BLOCK, 2 * KEY_BLOCK, 5 * KEY_BLOCK, 8 * KEY_BLOCK)
BATCHES = (1, 2, 3, 4, 6, 24, 48)
FORMS: Functions = {"copied": Tensor.contiguous, "views of larger tensors": lambda x: x}
EXACT: Functions = {
    "exp": torch.exp,
    "log": lambda x: x.abs().add(1e-3).log(),
    "cos": torch.cos,
    "sin": torch.sin,
    "1 / sqrt(x)": lambda x: x.abs().add(1e-3).sqrt().reciprocal(),
    "x / (1 + exp(-x))": lambda x: x / (1 + x.neg().exp()),
}
AVOIDED: Functions = {
    "rsqrt": lambda x: x.abs().add(1e-3).rsqrt(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "logaddexp": lambda x: torch.logaddexp(x, x / 2),
}
NUMBERS = (*range(1, 130), 1000, 40_000, 70_001, 100_001)  # a thread takes 32,768 of them at least
PLACES = range(0, 2000, 49)  # a bit differs for some numbers only: many are tried
SUMS: Functions = {"sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1)}
SUMMED = (14, KEY_BLOCK, 128, 576, 1536, TILE_VOCABULARY)
SUM_ROWS = (*range(1, 40), 64, 100, 300, 512)


class Line(NamedTuple):
    what: str
    relied: bool  # whether invariant numerics rest on it
    tried: Sequence[int]
    differ: Mapping[str, Sequence[int]]  # by case: the sizes at which a bit differs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    checks = {check.__name__: check for check in (rows, columns, attention, elementwise, sums)}
    parser.add_argument("--checks", nargs="+", choices=list(checks), default=list(checks))
    options = parser.parse_args()
    onednn = "with" if torch.backends.mkldnn.is_available() else "without"
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {onednn} oneDNN")
    relied = broken = 0
    for threads in options.threads:
        torch.set_num_threads(threads)
        torch.manual_seed(options.seed)
        print(f"\n{f'threads: {threads}':59} relied on  sizes  that differ")
        for name in options.checks:
            for line in checks[name]():
                print(f"{line.what:59} {'yes' if line.relied else '-':9} {len(line.tried):6}  {told(line.differ)}")
                relied, broken = relied + line.relied, broken + (line.relied and any(line.differ.values()))
    print(f"\n{relied - broken} of {relied} lines that invariant numerics rely on hold here")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def cancelling(rows: int, inner: int, sign: int, dtype: torch.dtype) -> Tensor:
    """Rows whose products with those of the other sign are rounding errors alone, which bfloat16 does not hide."""
    half = normal(rows, inner // 2)
    return torch.cat([half, sign * half], 1).to(dtype)


def rows() -> Iterator[Line]:
    """Some rows of a product, against products of `TILE` rows each that begin elsewhere."""
    for name, dtype in TYPES.items():
        for which, counts in ROWS.items():
            result = {}
            for inner, outer in WEIGHTS:
                weight, x, whole = tiles(inner, outer, max(counts) // TILE_ROWS + 1, dtype)
                same = {n: torch.equal(product(x[4 : 4 + n], weight), whole[4 : 4 + n]) for n in counts}
                result[f"{inner} to {outer}"] = [n for n in counts if not same[n]]
            yield Line(f"{name} product, rows: {which}", False, counts, result)
        places, result = range(1, TILE_ROWS), {}
        for inner, outer in WEIGHTS:
            weight, x, whole = tiles(inner, outer, 2, dtype)
            same = {n: torch.equal(product(x[n : n + TILE_ROWS], weight), whole[n : n + TILE_ROWS]) for n in places}
            result[f"{inner} to {outer}"] = [n for n in places if not same[n]]
        yield Line(f"{name} product, {TILE_ROWS} rows: place among others", True, places, result)


def tiles(inner: int, outer: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, rows, and their products, made `TILE` rows at a time."""
    weight, x = cancelling(outer, inner, 1, dtype), cancelling(count * TILE_ROWS, inner, -1, dtype)
    return weight, x, torch.cat([product(part, weight) for part in x.split(TILE_ROWS)])


def columns() -> Iterator[Line]:
    """One product with the columns of several matrices, against one with each."""
    for name, dtype in TYPES.items():
        result: dict[str, list[int]] = defaultdict(list)
        for case, (inner, outer) in FUSED.items():
            weights = [cancelling(n, inner, 1, dtype) for n in outer]
            x = cancelling(max(SIXTEENS), inner, -1, dtype)
            joint = torch.cat(weights)
            for n in SIXTEENS:
                apart = torch.cat([product(x[:n], weight) for weight in weights], -1)
                result[case] += [] if torch.equal(product(x[:n], joint), apart) else [n]
        yield Line(f"{name} product, matrices side by side, rows", False, SIXTEENS, result)


def attention() -> Iterator[Line]:
    """Float32 products of queries and keys, and of weights and values, by the number of queries."""
    scores, values, enough = {}, {}, {}
    for width in WIDTHS:
        query, key = (normal(max(BATCHES), n, width) for n in (max(QUERY_COUNTS), max(KEY_COUNTS)))
        weights = normal(max(BATCHES), max(QUERY_COUNTS), 2 * KEY_BLOCK)[..., KEY_BLOCK:]
        for form, of in FORMS.items():
            case = f"width {width}, {form}"
            enough[case] = query_rows(width)
            scores[case] = differing(lambda a, b: torch.bmm(a, b.mT), of, query, key, KEY_COUNTS)
            values[case] = differing(torch.bmm, of, weights, key[:, -KEY_BLOCK:], (KEY_BLOCK,))
    for what, result in (("scores", scores), ("values", values)):
        for which, relied in (("too few or no multiple", False), ("multiples of query_rows", True)):
            differ = {case: [n for n in sizes if (n % enough[case] == 0) == relied] for case, sizes in result.items()}
            yield Line(f"attention, {what}, queries: {which}", relied, QUERY_COUNTS, differ)


def differing(
    multiply: Multiply, of: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, keys: Sequence[int]
) -> list[int]:
    """Numbers of rows of `a` that change a bit, in any batch and with any number of rows of `b`.

    Against products of one batch, `TILE` rows and `KEYS` rows.
    """
    whole = []
    for one, other in zip(a.contiguous().split(1), b.contiguous().split(1), strict=True):
        pieces = [torch.cat([multiply(x, y) for y in other.split(KEY_BLOCK, 1)], 2) for x in one.split(TILE_ROWS, 1)]
        whole.append(torch.cat(pieces, 1))
    expected = torch.cat(whole)

    def same(rows: int, batch: int, many: int) -> bool:
        result = multiply(of(a[:batch, :rows]), of(b[:batch, :many]))
        return torch.equal(result, expected[:batch, :rows, : result.shape[2]])

    return [n for n in QUERY_COUNTS if not all(same(n, batch, many) for batch in BATCHES for many in keys)]


def elementwise() -> Iterator[Line]:
    """Functions of some numbers, which begin anywhere, against those of a large tensor that holds them."""
    for functions, relied in ((EXACT, True), (AVOIDED, False)):
        for name, dtype in TYPES.items():
            x, result = normal(max(NUMBERS) + max(PLACES), dtype=dtype) * 3, {}
            for what, function in functions.items():
                whole = function(x)
                result[what] = [
                    n
                    for n in NUMBERS
                    if not all(torch.equal(function(x[at : at + n].clone()), whole[at : at + n]) for at in PLACES)
                ]
            # Whatever the products' type, these are computed in float32.
            yield Line(f"{name} {', '.join(functions)}", relied and dtype == torch.float32, NUMBERS, result)


def sums() -> Iterator[Line]:
    """Float32 sums over the last dimension of some rows, also of parts of wider ones, against those of many rows."""
    result: dict[str, list[int]] = defaultdict(list)
    for width in SUMMED:
        wide = normal(2 * max(SUM_ROWS), 2 * width)
        x = wide[:, width:].clone()
        for what, function in SUMS.items():
            whole = function(x)
            for n in SUM_ROWS:
                first, later = slice(0, n), slice(n, 2 * n)
                cases = (x[first].clone(), first), (x[later].clone(), later), (wide[first, width:], first)
                same = all(torch.equal(function(some), whole[place]) for some, place in cases)
                result[f"{what} of {width}"] += [] if same else [n]
    yield Line(f"float32 {', '.join(SUMS)} over the last dimension, rows", True, SUM_ROWS, result)


def told(differ: Mapping[str, Sequence[int]], most: int = 8) -> str:
    """The sizes, and which cases have them unless all do."""
    cases: dict[str, list[str]] = defaultdict(list)
    for case, sizes in differ.items():
        if sizes:
            rest = f" ... ({len(sizes)})" if len(sizes) > most else ""
            cases[" ".join(map(str, sizes[:most])) + rest].append(case)
    every = len(differ) in map(len, cases.values())
    return "; ".join(text if every else f"{text} [{', '.join(names)}]" for text, names in cases.items()) or "none"


if __name__ == "__main__":
    main()
