"""Tokens per second of the embedded engine against `transformers.generate`, interleaved in one run.

    python benchmarks/generation.py [--threads 2] [--rounds 5] [--cases 32x48] [--busy]

Both sample at temperature 1 from the same bfloat16 weights and prompts, 8 samples each, with forced length.
`generate` gets its best setting: SDPA attention, inference mode, no logits processor, no log-probs or scores
returned, and the better of its dynamic and static caches, chosen here by a first measurement. The engine
does all of its usual work: it returns log-probs, entropies and text.

With --busy another process keeps one core busy meanwhile: compare it with and without GOMP_SPINCOUNT=1000, which the
`trimtab` command sets.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shared import alternate, medians, options_of
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.load import default_device, load
from trimtab.types import Problem, Prompt, SamplingParams

SAMPLES = 8
CASES = ((32, 48), (64, 64), (128, 48))
BOUNDS = {(32, 48): 2.0, (128, 48): 2.8}


def main() -> None:
    parser = options_of(__doc__, model="smollm2-135m-instruct", threads=2, rounds=5)
    parser.add_argument("--cases", nargs="+", type=case, default=CASES, help="ROWSxTOKENS")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps one core busy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model, dtype=torch.bfloat16)
    loaded.model.to(default_device())  # pyright: ignore[reportArgumentType]
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    with busy() if options.busy else contextlib.nullcontext():
        for rows, tokens in options.cases:
            prompts = make_prompts(loaded.tokenizer, rows // SAMPLES)
            contenders = contest(engine, loaded.model, prompts, tokens)
            seconds = measure(contenders, options.rounds)
            report(rows, tokens, prompts, seconds)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keeps one core busy in another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def case(text: str) -> tuple[int, int]:
    """Rows and tokens of `32x48`."""
    rows, tokens = map(int, text.split("x"))
    return rows, tokens


def make_prompts(tokenizer: Any, count: int) -> list[Prompt]:
    """Few-shot additions of about 30 to 60 tokens."""
    rng = np.random.default_rng(0)
    prompts = []
    for i in range(count):
        sums = [tuple(rng.integers(10, 100, size=2)) for _ in range(2 + i % 2)]
        text = "".join(f"Question: What is {a} + {b}?\nAnswer: {a + b}\n\n" for a, b in sums[:-1])
        text += f"Question: What is {sums[-1][0]} + {sums[-1][1]}?\nAnswer:"
        prompts.append(Prompt(Problem(str(i), text, ""), text, np.array(tokenizer(text)["input_ids"])))
    return prompts


def contest(engine: EmbeddedEngine, model: Any, prompts: list[Prompt], tokens: int) -> dict[str, Callable[[], Any]]:
    sampling = SamplingParams(max_tokens=tokens, ignore_stop=True)
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
        mask[i, width - len(prompt.ids) :] = 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    model.generation_config.eos_token_id = None  # forced length without a logits processor

    def generate(cache: str) -> torch.Tensor:
        with torch.inference_mode():
            return model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                num_return_sequences=SAMPLES,
                cache_implementation=cache,
                pad_token_id=0,
            ).cpu()  # waits for an accelerator

    return {
        "engine": lambda: engine.generate(prompts, SAMPLES, sampling, seed=0),
        "generate, dynamic cache": lambda: generate("dynamic"),
        "generate, static cache": lambda: generate("static"),
    }


def measure(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds per round, of the engine and of the faster `generate`."""
    warm = {name: taken[0] for name, taken in alternate(contenders, 1).items()}
    slower = max((name for name in warm if name != "engine"), key=lambda name: warm[name])
    print(f"warm-up: {', '.join(f'{name} {s:.2f} s' for name, s in warm.items())}; dropped: {slower}", flush=True)
    return alternate({name: run for name, run in contenders.items() if name != slower}, rounds)


def report(rows: int, tokens: int, prompts: list[Prompt], seconds: dict[str, list[float]]) -> None:
    lengths = [len(prompt.ids) for prompt in prompts]
    median = medians(seconds)
    print(f"{rows} rows x {tokens} tokens, {len(prompts)} prompts of {min(lengths)}-{max(lengths)} tokens")
    for name, taken in seconds.items():
        rates = f"{rows * tokens / median[name]:7.0f} tokens/s"
        print(f"  {name:24} {rates}   rounds {', '.join(f'{s:.2f}' for s in taken)} s")
    other = next(name for name in median if name != "engine")
    bound = BOUNDS.get((rows, tokens))
    wanted = "" if bound is None else f" (wanted: >= {bound})"
    print(f"  ratio of medians {median[other] / median['engine']:.2f}{wanted}", flush=True)


if __name__ == "__main__":
    main()
