"""Batch-invariant kernels on a GPU: bits that must be equal, and time beside PyTorch's own kernels, in one run.

    python benchmarks/invariant_cuda.py [--model smollm2-135m-instruct] [--rounds 20]

For each kernel: whether rows keep their bits alone, among others and elsewhere in a tile (the one property of the
hardware that the interpreter's tests take for granted), its time, PyTorch's for the same work, and the ratio. Then the
whole model, bfloat16: the trainer's scores of a batch and of each response alone, and the engine's log-probs beside
the trainer's, in invariant numerics (must be equal) and in native ones (must not be, or the test cannot fail).
Without CUDA it says so and exits with 2.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared import options_of
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import invariant
from trimtab.trainer.models.architecture import ModelParts
from trimtab.trainer.models.fused_head import token_scores
from trimtab.trainer.models.invariant.kernels.attention_kernel import QuerySpans, StoredKeys, attend
from trimtab.trainer.models.invariant.kernels.row_kernels import batch_invariant_matmul, rms_norm, silu
from trimtab.trainer.models.load import load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.types import Problem, Prompt, SamplingParams

# Of SmolLM2-135M: width, inner width, vocabulary; heads, key heads and their width.
HIDDEN, INNER, VOCABULARY = 576, 1536, 49152
HEADS, KEY_HEADS, WIDTH = 9, 3, 64
DEVICE = "cuda"
wrong = 0


def main() -> None:
    options = options_of(__doc__, model="smollm2-135m-instruct", rounds=20).parse_args()
    if not torch.cuda.is_available():
        print(
            "no CUDA device: these kernels run on one alone (tests/unit/trainer/models/test_triton_*.py interpret them)"
        )
        sys.exit(2)
    torch.manual_seed(0)
    square = random(8192, 8192)
    ceiling = 2 * 8192**3 / seconds(lambda: square @ square, options.rounds) / 1e12
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16 product of 8192: {ceiling:.0f} TFLOP/s")
    for dtype in (torch.bfloat16, torch.float32):
        products(dtype, options.rounds)
        rows(dtype, options.rounds)
        attentions(dtype, options.rounds)
    head(options.rounds)
    model(options.model, options.rounds)
    print("all bits as they must be" if not wrong else f"{wrong} comparisons of bits FAILED")
    sys.exit(wrong > 0)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Median time of one call on the device; the first ones compile."""
    for _ in range(3):
        run()
    result = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        result.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(result)


def says(equal: bool, wanted: bool = True) -> str:
    """In words; what is not as wanted is counted."""
    global wrong
    wrong += equal is not wanted
    return ("equal" if equal else "DIFFER") + ("" if equal is wanted else " (WRONG)")


def line(name: str, equal: str, ours: float, native: float, work: float, unit: str) -> None:
    print(
        f"{name:44} {equal:8} {ours * 1e6:9.0f} us {work / ours:8.1f} {unit}"
        f"  PyTorch {native * 1e6:9.0f} us  ratio {ours / native:5.2f}"
    )


def keeps_bits(run: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Rows alone, permuted, sliced from the middle and between others."""
    whole, order = run(x), torch.randperm(len(x), device=DEVICE)
    some = sorted({0, len(x) // 3, len(x) - 1})
    others = torch.cat([x.flip(0)[:37], x])
    return (
        all(torch.equal(run(x[i : i + 1])[0], whole[i]) for i in some)
        and torch.equal(run(x[order]), whole[order])
        and torch.equal(run(x[1:]), whole[1:])
        and torch.equal(run(others)[-len(x) :], whole)
    )


def products(dtype: torch.dtype, rounds: int) -> None:
    for n, k in ((INNER, HIDDEN), (HIDDEN, INNER), (VOCABULARY, HIDDEN)):
        b = random(n, k, dtype=dtype)
        for m in (1, 32, 256, 8192):
            a = random(m, k, dtype=dtype)
            equal = says(keeps_bits(lambda x, b=b: batch_invariant_matmul(x, b), a))
            times = [
                seconds(run, rounds)
                for run in (lambda a=a, b=b: batch_invariant_matmul(a, b), lambda a=a, b=b: F.linear(a, b))
            ]
            line(f"product {dtype} {m} x {k} x {n}", equal, *times, work=2 * m * n * k / 1e12, unit="TFLOP/s")


def rows(dtype: torch.dtype, rounds: int) -> None:
    x, weight = random(8192, HIDDEN, dtype=dtype), random(HIDDEN, dtype=dtype)
    equal = says(keeps_bits(lambda x: rms_norm(x, weight, 1e-5), x))
    times = [
        seconds(r, rounds) for r in (lambda: rms_norm(x, weight, 1e-5), lambda: F.rms_norm(x, x.shape[1:], weight))
    ]
    line(f"norm {dtype} 8192 x {HIDDEN}", equal, *times, work=x.numel() * (x.itemsize + 4) / 1e9, unit="GB/s   ")
    equal = says(keeps_bits(silu, x))
    times = [seconds(run, rounds) for run in (lambda: silu(x), lambda: F.silu(x))]
    line(f"silu {dtype} 8192 x {HIDDEN}", equal, *times, work=2 * x.numel() * x.itemsize / 1e9, unit="GB/s   ")


def attentions(dtype: torch.dtype, rounds: int) -> None:
    """Prefill of texts of 512 tokens, and decoding behind 448 of them: the last 64 tokens are a response."""
    count, time, prompt = 32, 512, 448
    q = random(count, time, HEADS, WIDTH, dtype=dtype)
    k, v = (random(count, KEY_HEADS, time, WIDTH, dtype=dtype) for _ in range(2))
    row = torch.arange(count, device=DEVICE)
    one, zero = torch.ones_like(row), torch.zeros_like(row)
    shared, own = StoredKeys(k, v, row, zero), StoredKeys(k, v, row, zero + prompt)

    def prefill(texts: slice = slice(None), first: int = 0, stop: int = prompt) -> Tensor:
        some = row[texts]
        keys = StoredKeys(k, v, some, torch.zeros_like(some))
        queries = QuerySpans(
            row[: len(some)] * (stop - first), 0 * some + stop - first, 0 * some + first + 1, 0 * some, stop
        )
        output = attend(q[texts, first:stop].reshape(-1, HEADS, WIDTH), queries, keys, keys, WIDTH**-0.5)
        return output.view(len(some), -1, HEADS, WIDTH)

    def respond(first: int, stop: int) -> Tensor:
        queries = QuerySpans(row * (stop - first), one * (stop - first), one * prompt, one * (first + 1), stop - first)
        some = q[:, prompt + first : prompt + stop].reshape(-1, HEADS, WIDTH)
        return attend(some, queries, shared, own, WIDTH**-0.5).view(count, -1, HEADS, WIDTH)

    whole, response = prefill(), respond(0, time - prompt)
    equal = says(
        torch.equal(prefill(slice(5, 6))[0], whole[5])
        and torch.equal(torch.cat([prefill(first=0, stop=77), prefill(first=77)], 1), whole)
        and all(torch.equal(respond(at, at + 1)[:, 0], response[:, at]) for at in range(time - prompt))
    )
    heads = HEADS // KEY_HEADS
    sdpa = [x.repeat_interleave(heads, 1) for x in (k, v)]

    def native(first: int, stop: int) -> Tensor:
        return F.scaled_dot_product_attention(
            q[:, first:stop].transpose(1, 2), *(x[:, :, :stop] for x in sdpa), is_causal=first == 0
        )

    flops = 2 * count * HEADS * WIDTH * prompt**2 / 1e12  # two products of half a square
    times = [seconds(run, rounds) for run in (prefill, lambda: native(0, prompt))]
    line(f"attention {dtype} {count} x {prompt}, prefill", equal, *times, work=flops, unit="TFLOP/s")
    times = [seconds(run, rounds) for run in (lambda: respond(63, 64), lambda: native(time - 1, time))]
    work = 2 * k.numel() * k.itemsize / 1e9
    line(f"attention {dtype} {count} x {time}, decoding", equal, *times, work=work, unit="GB/s   ")


def head(rounds: int) -> None:
    hidden, weight = random(4096, HIDDEN), random(VOCABULARY, HIDDEN) * 0.05
    ids = torch.randint(VOCABULARY, (4096,), device=DEVICE)
    parts = ModelParts(torch.nn.Identity(), weight, None, invariant=True)

    def scores(rows: slice) -> Tensor:
        return token_scores(hidden[rows], ids[rows], parts, temperature=0.7).logp

    def native() -> Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(1, ids[:, None])

    whole = slice(0, 4096)
    logp = scores(whole)
    equal = says(all(torch.equal(scores(rows), logp[rows]) for rows in (slice(9, 10), slice(100, 180))))
    times = [seconds(run, rounds) for run in (lambda: scores(whole), native)]
    line("log-probs of 4096 tokens", equal, *times, work=2 * hidden.numel() * VOCABULARY / 1e12, unit="TFLOP/s")


def model(name: str, rounds: int) -> None:
    """64 responses to 8 prompts: sampled by the engine, scored by the trainer, alone and together."""
    loaded = load(name, dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 10000, size=16 + 17 * i) for i in range(8)]
    asked = [Prompt(Problem(str(i), "", ""), "", ids) for i, ids in enumerate(prompts)]
    times = {}
    for numerics in ("native", "invariant"):
        one: Any = copy.deepcopy(loaded.model).to(DEVICE)
        if numerics == "invariant":
            invariant.make_invariant(one)
        engine = EmbeddedEngine(one, loaded.tokenizer, torch.bfloat16)
        sampling = SamplingParams(max_tokens=256, temperature=0.7)
        groups = engine.generate(asked, 8, sampling, seed=0)
        completions = [completion for group in groups for completion in group]
        responses = [completion.response_ids for completion in completions]
        index = [i // 8 for i in range(64)]
        batch = moved(TokenBatch.pack(prompts, responses, index, pad_id=0))
        with torch.no_grad():
            together = score(one, batch, temperature=0.7).logp
            alone = [
                score(
                    one, moved(TokenBatch.pack([prompts[i // 8]], [responses[i]], [0], pad_id=0)), temperature=0.7
                ).logp[0]
                for i in range(0, 64, 9)
            ]
            times[numerics] = seconds(lambda one=one, batch=batch: score(one, batch, temperature=0.7), rounds)
        equal = all(torch.equal(row, together[9 * i, : len(row)]) for i, row in enumerate(alone))
        gap = max(
            float(np.abs(together[i, : len(c.response_ids)].cpu().numpy() - c.logp_behavior).max())
            for i, c in enumerate(completions)
        )
        tokens, exact = sum(map(len, responses)), numerics == "invariant"
        company = says(equal) if exact else ("equal" if equal else "differ")
        print(f"{name}, {numerics}: {tokens} tokens scored at {tokens / times[numerics]:.0f} tokens/s")
        print(f"  alone and together {company}; max |log mu - log pi| {gap:.2g}: {says(gap == 0, exact)}")
    print(f"{name} forward: invariant / native {times['invariant'] / times['native']:.2f}")


def moved(batch: TokenBatch) -> TokenBatch:
    return TokenBatch(*(getattr(batch, name).to(DEVICE) for name in TokenBatch.__dataclass_fields__))


if __name__ == "__main__":
    main()
