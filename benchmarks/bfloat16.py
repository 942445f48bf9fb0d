"""Forward and backward of the bundled model under bfloat16 autocast: products through float32 against PyTorch's.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bfloat16.py [--model MODEL] [--tokens 128] [--rounds 3]

Only a processor without bfloat16 instructions goes through float32; on another one both sides are the same.
Printed is the processor time of each, the smallest of the rounds, and their ratio.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from shared import alternate, options_of
from trimtab.trainer.models import matmul
from trimtab.trainer.models.load import BUNDLED, load


def main() -> None:
    options = options_of(__doc__, model=BUNDLED, tokens=128, rounds=3).parse_args()
    torch.set_num_threads(1)
    model = load(options.model, dtype=torch.float32).model.base_model
    ids = torch.randint(0, model.config.vocab_size, (2, options.tokens // 2))

    def update(dtypes: tuple[torch.dtype, ...]) -> None:
        matmul._FAST_DTYPES = dtypes
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(ids)[0]
        hidden.float().square().mean().backward()

    sides = {"here": partial(update, matmul._FAST_DTYPES), "PyTorch": partial(update, (torch.float32,))}
    times = {name: min(taken) for name, taken in alternate(sides, options.rounds, time.process_time).items()}
    print(f"{options.tokens} tokens: here {times['here']:.2f} s, PyTorch {times['PyTorch']:.2f} s")
    print(f"ratio {times['PyTorch'] / times['here']:.1f}x")


if __name__ == "__main__":
    main()
