"""Cost of log-probs: ours against logits -> float -> log_softmax -> gather, forward and backward.

    python benchmarks/logprobs.py [--part head|step] [--tokens 4096] [--repeats 5] [--model smollm2-135m-instruct]

Answered in float32 and in bf16 autocast (vocabulary 49152):
  head     time and peak memory above the model's activations, on stored hidden states, and the largest
           difference of log-probs and gradients
  step     forward and backward of one group (8 responses x 64 tokens, 45 prompt tokens) through the whole model

"Naive" has logits at every position of prompt and response, as a causal language model's forward gives them;
"naive, responses" has them at response positions only. Times are medians, the ways interleaved in one process.
Memory is the high-water mark of resident memory in a fresh process per way, less what was resident before, so it
counts what libraries allocate behind PyTorch's back. Set OMP_NUM_THREADS for the number of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared import alternate, medians, options_of, reset_peak, resident
from trimtab.trainer.models.architecture import ModelParts
from trimtab.trainer.models.fused_head import token_scores
from trimtab.trainer.models.load import BUNDLED, load
from trimtab.trainer.models.logprobs import TokenBatch, score

PROMPT, RESPONSE, GROUP = 45, 64, 8
PRECISIONS = ("float32", "bf16 autocast")
WAYS = ("ours", "naive", "naive, responses")


def precision(name: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if name == "bf16 autocast" else contextlib.nullcontext()


def head_way(way: str, data: dict[str, Tensor]) -> Callable[[], Tensor]:
    """A function of stored hidden states (rows, positions, width) to log-probs (rows, response)."""
    hidden, weight, ids = data["hidden"], data["weight"], data["ids"]
    predicting = slice(PROMPT - 1, -1)
    parts = ModelParts(torch.nn.Identity(), weight, None)

    def ours() -> Tensor:
        return token_scores(hidden[:, predicting].flatten(0, 1), ids.flatten(), parts).logp.view(ids.shape)

    def from_logits(states: Tensor, positions: slice) -> Tensor:
        logits = torch.nn.functional.linear(states, weight)[:, positions]
        return logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0]

    return {
        "ours": ours,
        "naive": lambda: from_logits(hidden, predicting),
        "naive, responses": lambda: from_logits(hidden[:, predicting], slice(None)),
    }[way]


def head_step(way: str, name: str, data: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and the gradients of hidden states and weight, for a different gradient at every token."""
    for key in ("hidden", "weight"):
        data[key].requires_grad_().grad = None
    with precision(name):
        logp = head_way(way, data)()
    logp.backward(data["grad"])
    assert data["hidden"].grad is not None
    assert data["weight"].grad is not None
    return logp.detach(), data["hidden"].grad, data["weight"].grad


def measure_memory(way: str, name: str, folder: str) -> None:
    data = load_file(f"{folder}/states.safetensors")
    data = {key: value.clone() for key, value in data.items()}  # resident, not mapped
    few = {key: value if key == "weight" else value[:2] for key, value in data.items()}
    head_step(way, name, few)  # libraries' own start-up memory is not what is asked for
    data["weight"].grad = None
    del few
    reset_peak()
    before = resident()
    head_step(way, name, data)
    print(json.dumps(resident(peak=True) - before))


def compare_heads(folder: str, data: dict[str, Tensor], repeats: int) -> None:
    for name in PRECISIONS:
        seconds = medians(alternate({way: functools.partial(head_step, way, name, data) for way in WAYS}, repeats))
        memory = {}
        for way in WAYS:
            child = [sys.executable, __file__, "--memory", way, name, folder]
            memory[way] = int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
        print(f"\nhead, {name}, {data['ids'].numel()} response tokens")
        for way in WAYS:
            times, share = seconds["ours"] / seconds[way], memory["ours"] / memory[way]
            print(f"  {way:17} {seconds[way]:7.3f} s   {memory[way] / 2**20:7.0f} MiB   ours/this: ", end="")
            print(f"time {times:.2f}x  memory {share:.3f} (1/{1 / share:.1f})")
        ours, theirs = (head_step(way, name, data) for way in ("ours", "naive, responses"))
        for label, a, b in zip(("log-prob", "hidden gradient", "weight gradient"), ours, theirs, strict=True):
            print(f"  {label}: max difference / max value {((a - b).abs().max() / b.abs().max()).item():.1e}")


def compare_steps(path: str, repeats: int) -> None:
    model, plain = (load(path, dtype=torch.float32).model for _ in range(2))
    plain.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    prompts = torch.randint(5, 49000, (1, PROMPT)).numpy()
    responses = torch.randint(5, 49000, (GROUP, RESPONSE)).numpy()
    batch = TokenBatch.pack(list(prompts), list(responses), [0] * GROUP, pad_id=0)
    rows = torch.cat([batch.prompt_ids.expand(GROUP, -1), batch.response_ids], dim=1)
    weight = torch.randn(GROUP, 1)

    def naive() -> Tensor:
        logits = plain(rows, use_cache=False).logits[:, PROMPT - 1 : -1]
        return logits.float().log_softmax(-1).gather(2, batch.response_ids[..., None])[..., 0]

    def step(name: str, call: Callable[[], Tensor]) -> None:
        with precision(name):
            logp = call()
        (weight * logp).mean().backward()

    for name in PRECISIONS:
        ways = {"ours": lambda: score(model, batch).logp, "naive": naive}
        seconds = medians(alternate({way: functools.partial(step, name, call) for way, call in ways.items()}, repeats))
        print(f"\nstep, {name}, {GROUP} x {RESPONSE} tokens after {PROMPT}: ", end="")
        print(f"ours {seconds['ours']:.2f} s, naive {seconds['naive']:.2f} s", end="")
        print(f" ({seconds['ours'] / seconds['naive']:.2f}x)")


def stored_states(path: str, tokens: int) -> dict[str, Tensor]:
    """Hidden states of real text would differ little: what matters is their size and a trained head."""
    model = load(path, dtype=torch.float32).model
    torch.manual_seed(0)
    count = tokens // RESPONSE
    ids = torch.randint(5, 49000, (count, PROMPT + RESPONSE))
    with torch.no_grad(), precision("bf16 autocast"):
        hidden = torch.cat([model.base_model(rows, use_cache=False).last_hidden_state for rows in ids.split(8)])
    weight = model.get_output_embeddings().weight.detach().clone()  # type: ignore[union-attr]
    return {
        "hidden": hidden.float(),
        "weight": weight,
        "ids": ids[:, PROMPT:].contiguous(),
        "grad": torch.randn(count, RESPONSE),
    }


def main() -> None:
    parser = options_of(__doc__, model=BUNDLED, tokens=4096, repeats=5)
    parser.add_argument("--part", choices=("head", "step"), help="default: both")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        measure_memory(*options.memory)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if options.part != "step":
        with tempfile.TemporaryDirectory() as folder:
            data = stored_states(options.model, options.tokens)
            save_file(data, f"{folder}/states.safetensors")
            compare_heads(folder, data, options.repeats)
    if options.part != "head":
        compare_steps(options.model, options.repeats)


if __name__ == "__main__":
    main()
