"""Peak memory of a training rank, measured beside computed (`trimtab.trainer.memory`).

    .venv/bin/python benchmarks/memory.py                     # about five minutes
    .venv/bin/python benchmarks/memory.py --models laboratory
    .venv/bin/python benchmarks/memory.py --computed          # large models and long rows, arithmetic alone

Every row is a process of its own: it loads the model, makes an update of one micro-batch and one of two with the
trainer's own parts (forward, backward, clipping, fused AdamW) on random tokens, and reads the highest resident memory
of the second update less what it had before the model was loaded. malloc returns large blocks at once there, so that
resident memory follows the tensors. `kept` (with the weights' copies) is counted exactly, from the tensors autograd
saves; what checkpointing keeps does not pass there. Target: computed within 15% of measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from shared import options_of, reset_peak, resident

MIB = 1 << 20
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Case:
    model: str
    rows: int
    prompt: int
    response: int
    autocast: bool = True
    recompute: bool = False


SMALL, REAL = "laboratory", "smollm2-135m-instruct"
CASES = (
    Case(SMALL, 256, 11, 11, autocast=False),
    Case(SMALL, 1024, 11, 11, autocast=False),
    Case(SMALL, 1024, 11, 11),
    Case(SMALL, 1, 11, 2048),
    Case(SMALL, 1, 11, 4096),
    Case(REAL, 8, 64, 64),
    Case(REAL, 8, 64, 64, autocast=False),
    Case(REAL, 4, 64, 256),
    Case(REAL, 4, 64, 256, recompute=True),
    Case(REAL, 1, 64, 1024),
    Case(REAL, 1, 64, 1024, recompute=True),
)


class Saved:
    """Bytes autograd holds for the backward: every storage once, parameters not counted."""

    def __init__(self, model: Any) -> None:
        self.most = 0
        self._now: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._now[storage.data_ptr()] = storage.nbytes()
            self.most = max(self.most, sum(self._now.values()))
        return tensor


def measure(case: Case) -> dict[str, Any]:
    """One case, in this process."""
    import numpy as np
    import torch

    from trimtab.trainer.build_model import prepare_model
    from trimtab.trainer.config import load_config
    from trimtab.trainer.models.load import load
    from trimtab.trainer.models.logprobs import TokenBatch, score
    from trimtab.trainer.optim import build_optimizer

    config = load_config({"model": {"path": case.model, "gradient_checkpointing": case.recompute}})
    torch.set_num_threads(1)
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # the libraries' own memory
    before = resident()
    model = prepare_model(load(case.model, dtype=torch.float32).model, config).cpu()
    optimizer = build_optimizer(model.parameters(), config.optim)
    numbers = np.random.default_rng(0)
    vocabulary = model.config.vocab_size  # pyright: ignore[reportAttributeAccessIssue]

    def batch() -> TokenBatch:
        prompt = numbers.integers(vocabulary, size=case.prompt)
        responses = list(numbers.integers(vocabulary, size=(case.rows, case.response)))
        return TokenBatch.pack([prompt], responses, [0] * case.rows, pad_id=0)

    saved = Saved(model)
    # The first update makes the optimizer's state and counts what is kept; counting costs a little memory of its own.
    for micro_batches in (1, 2):
        counting = micro_batches == 1
        reset_peak()
        for _ in range(micro_batches):
            with contextlib.ExitStack() as stack:
                if counting:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept))
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast))
                logp = score(model, batch()).logp
            (-logp.mean()).backward()
            del logp
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"peak": resident(peak=True) - before, "kept": saved.most, "computed": computed(case, model.config)}


def computed(case: Case, config: Any) -> dict[str, float]:
    from trimtab.trainer.memory import DecoderSizes, UpdateLoad, rank_memory

    load = UpdateLoad(
        ranks=1,
        tokens=case.prompt + case.rows * (case.response - 1),  # a response's last token predicts nothing
        scored=case.rows * case.response,
        rows=case.rows,
        prompt=case.prompt,
        response=case.response,
        compute=2 if case.autocast else 4,
        recompute=case.recompute,
        cpu=True,
    )
    return rank_memory(DecoderSizes.of(config), load)


# Name, ranks, layers, hidden, heads, key-value heads, inner: config.json of each on huggingface.co.
LARGE = (("Qwen2.5-7B", 8, 28, 3584, 28, 4, 18944), ("Qwen2.5-32B", 64, 64, 5120, 40, 8, 27648))


def large() -> None:
    """GB on each rank for one response of so many tokens after a prompt of 512, with checkpointing."""
    from transformers import AutoConfig

    from trimtab.trainer.memory import DecoderSizes, UpdateLoad, rank_memory

    header = None
    for model, ranks, layers, hidden, heads, kv, inner in LARGE:
        config = AutoConfig.for_model(
            "qwen2",
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            intermediate_size=inner,
            vocab_size=152064,
            tie_word_embeddings=False,
        )
        for response in (2048, 8192, 16384, 32768):
            load = UpdateLoad(ranks, 512 + response, response, 1, 512, response, recompute=True)
            parts = rank_memory(DecoderSizes.of(config), load)
            if header is None:
                header = ["model", "ranks", "response", *parts, "all"]
                print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
            numbers = " | ".join(f"{value / 1e9:.1f}" for value in [*parts.values(), sum(parts.values())])
            print(f"| {model} | {ranks} | {response} | {numbers} |")


def in_a_process(case: Case) -> dict[str, Any]:
    call = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = options_of(__doc__, models=[SMALL, REAL])
    parser.add_argument("--count", type=int, help="the first rows of the table alone")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--computed", action="store_true", help="the table of large models, nothing is run")
    arguments = parser.parse_args()
    if arguments.computed:
        large()
        return
    if arguments.case:
        print(json.dumps(measure(Case(**arguments.case))))
        return
    print(
        "| model | rows x (prompt + response) | products | checkpointing | measured MiB | computed MiB | ratio | kept |"
    )
    print("|---|---|---|---|---|---|---|---|")
    ratios = []
    for case in [case for case in CASES if case.model in arguments.models][: arguments.count]:
        result = in_a_process(case)
        parts = result["computed"]
        total = sum(parts.values())
        ratios.append(total / result["peak"])
        print(
            f"| {case.model} | {case.rows} x ({case.prompt} + {case.response}) | "
            f"{'bfloat16' if case.autocast else 'float32'} | {'yes' if case.recompute else 'no'} | "
            f"{result['peak'] / MIB:.0f} | {total / MIB:.0f} | {ratios[-1]:.2f} | "
            + ("-" if case.recompute else f"{result['kept'] / MIB:.0f}, {(parts['kept'] + parts['copies']) / MIB:.0f}")
            + " |",
            flush=True,
        )
    print(f"\ncomputed / measured: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
