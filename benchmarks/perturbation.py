"""Cost of noise on every layer: forward and backward of one optimizer update, perturbed against clean.

    python benchmarks/perturbation.py [--rounds 9] [--response 12] [--layers all] [--model smollm2-135m-instruct]

The update is quickstart's: 16 prompts of about 45 tokens x 8 samples of about 12 tokens of the bundled model, float32
master weights under bf16 autocast, micro-batches of at most 2048 tokens; scoring, a loss, and its backward, nothing
else. Clean and perturbed rounds alternate, each going first in turn. The ratio is taken within a round; printed are
its median and the interval from 2000 bootstrap resamples of the rounds (95 %). The first round warms up and is left
out. Beside wall time stands the processor's time, which a busy machine disturbs less. Target: at most 1.05, never
above 1.10. Set OMP_NUM_THREADS for the number of threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from shared import median_interval, options_of
from trimtab.trainer.models.load import BUNDLED, load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.perturbation import Perturbation, PerturbationCoverage

PROMPTS, SAMPLES, PROMPT, BUDGET = 16, 8, 45, 2048


def micro_batches(response: int) -> Iterator[TokenBatch]:
    """Whole groups, as many as the token budget holds. Lengths vary by a third around their mean."""
    random = np.random.default_rng(0)

    def ids(mean: int) -> np.ndarray:
        return random.integers(5, 49000, random.integers(mean * 2 // 3, mean * 4 // 3 + 1))

    groups = max(1, BUDGET // (PROMPT * 4 // 3 + SAMPLES * response * 4 // 3))
    for start in range(0, PROMPTS, groups):
        count = min(groups, PROMPTS - start)
        prompts = [ids(PROMPT) for _ in range(count)]
        responses = [ids(response) for _ in range(count * SAMPLES)]
        yield TokenBatch.pack(prompts, responses, [row // SAMPLES for row in range(len(responses))], pad_id=0)


def seconds(call: Callable[[], object]) -> np.ndarray:
    """Wall and processor time of a call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return np.array([time.perf_counter() - wall, time.process_time() - processor])


def interval(ratios: np.ndarray) -> str:
    low, high = median_interval(ratios)
    return f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = options_of(__doc__, model=BUNDLED, rounds=9)
    parser.add_argument("--response", type=int, default=12, help="mean length of a response")
    parser.add_argument("--layers", default="all", help='"all", "0-5" or "logits"')
    options = parser.parse_args()
    model = load(options.model, dtype=torch.float32).model
    perturbation = Perturbation(model, options.layers)
    batches = list(micro_batches(options.response))

    def update(perturbed: bool) -> None:
        model.zero_grad()
        perturbation.zero_grad()
        for index, batch in enumerate(batches):
            context = perturbation.attached(seed=index) if perturbed else contextlib.nullcontext()
            with torch.autocast("cpu", torch.bfloat16), context:
                logp = score(model, batch).logp
            logp.mean().backward()

    tokens = sum(int(batch.prompt_mask.sum() + batch.response_mask.sum()) for batch in batches)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(batches)} micro-batches, ", end="")
    print(f"{tokens} tokens, layers {options.layers}")
    times: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for index in range(options.rounds + 1):
        for perturbed in (index % 2 == 0, index % 2 == 1):
            times[perturbed].append(seconds(lambda perturbed=perturbed: update(perturbed)))
    clean, noisy = (np.stack(times[perturbed])[1:] for perturbed in (False, True))
    for column, name in enumerate(("wall", "processor")):
        print(f"{name:<10} clean {np.median(clean[:, column]):6.3f} s   perturbed ", end="")
        print(f"{np.median(noisy[:, column]):6.3f} s   ratio {interval(noisy[:, column] / clean[:, column])}")

    watch = PerturbationCoverage()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = score(model, batches[-1]).logp
        with perturbation.attached(seed=0, coverage=watch):
            difference = (score(model, batches[-1]).logp - plain)[batches[-1].response_mask].abs().mean()
    print(f"mean |change of log-prob| on random tokens {float(difference):.4f}; changed inputs of layers: ", end="")
    shares = (f"{layer}: {changed / max(seen, 1):.3f}" for layer, (changed, seen) in watch.counts().items())
    print("  ".join(shares) or "none")


if __name__ == "__main__":
    main()
