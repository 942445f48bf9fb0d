"""Cost of noise drawn for each response (`perturbation.per_response`) instead of once for a group.

    python benchmarks/noise_per_response.py --rounds 7

One forward and backward of the perturbed policy over 4 groups of 8 responses, one thread, prompts computed once for a
group or for each response. Both take turns; printed is the median ratio of processor time, with the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from trimtab.trainer.models import load as models
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.perturbation import Perturbation

GROUPS, SAMPLES = 4, 8


def batch(prompt: int, response: int, vocabulary: int, *, shared: bool) -> TokenBatch:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, vocabulary, prompt) for _ in range(GROUPS)]
    responses = [rng.integers(5, vocabulary, response) for _ in range(GROUPS * SAMPLES)]
    if shared:
        return TokenBatch.pack(prompts, responses, [row // SAMPLES for row in range(len(responses))], pad_id=0)
    own = [prompts[row // SAMPLES] for row in range(len(responses))]
    return TokenBatch.pack(own, responses, list(range(len(responses))), pad_id=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", nargs="*", default=["11x11", "64x64", "256x64"], help="PROMPTxRESPONSE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = models.load(given.model, dtype=torch.float32)
    perturbation = Perturbation(loaded.model, "all", 1e-4)
    print("| prompt x response | per response / per group | quartiles |\n|---|---|---|")
    for lengths in given.lengths:
        prompt, response = map(int, lengths.split("x"))
        batches = [batch(prompt, response, loaded.model.config.vocab_size, shared=shared) for shared in (True, False)]
        ratios = []
        for _ in range(given.rounds + 1):
            seconds = []
            for tokens in batches:
                start = time.process_time()
                with perturbation.attached(seed=1):
                    score(loaded.model, tokens).logp.sum().backward()
                loaded.model.zero_grad(set_to_none=True)
                seconds.append(time.process_time() - start)
            ratios.append(seconds[1] / seconds[0])
        low, middle, high = statistics.quantiles(ratios[1:], n=4)
        print(f"| {prompt} x {response} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
