"""Forward and backward of the bundled model under bfloat16 autocast: products through float32 against PyTorch's.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bfloat16.py [--model MODEL] [--tokens 128] [--rounds 3]

Only a processor without bfloat16 instructions goes through float32; on another one both sides are the same.
Printed is the processor time of each, the smallest of the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import time

import torch

from trimtab.trainer.models import matmul
from trimtab.trainer.models.load import BUNDLED, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load(options.model, dtype=torch.float32).model.base_model
    ids = torch.randint(0, model.config.vocab_size, (2, options.tokens // 2))

    def seconds() -> float:
        begin = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(ids)[0]
        hidden.float().square().mean().backward()
        return time.process_time() - begin

    times = {}
    for name, dtypes in (("here", matmul._FAST_DTYPES), ("PyTorch", (torch.float32,))):
        matmul._FAST_DTYPES = dtypes
        times[name] = min(seconds() for _ in range(options.rounds))
    print(f"{options.tokens} tokens: here {times['here']:.2f} s, PyTorch {times['PyTorch']:.2f} s")
    print(f"ratio {times['PyTorch'] / times['here']:.1f}x")


if __name__ == "__main__":
    main()
