"""Cost of noise drawn for each response (`perturbation.per_response`) instead of once for a group.

    python benchmarks/noise_per_response.py --rounds 7

One forward and backward of the perturbed policy over 4 groups of 8 responses, one thread, prompts computed once for a
group or for each response. Both take turns; printed is the median ratio of processor time, with the quartiles.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch

from shared import alternate, options_of, quartiles
from trimtab.trainer.models import load as models
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.perturbation import Perturbation

GROUPS, SAMPLES = 4, 8
SIDES = ("group", "response")  # for what one noise is drawn


def batch(prompt: int, response: int, vocabulary: int, *, shared: bool) -> TokenBatch:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, vocabulary, prompt) for _ in range(GROUPS)]
    responses = [rng.integers(5, vocabulary, response) for _ in range(GROUPS * SAMPLES)]
    if shared:
        return TokenBatch.pack(prompts, responses, [row // SAMPLES for row in range(len(responses))], pad_id=0)
    own = [prompts[row // SAMPLES] for row in range(len(responses))]
    return TokenBatch.pack(own, responses, list(range(len(responses))), pad_id=0)


def main() -> None:
    parser = options_of(__doc__, model="smollm2-135m-instruct", rounds=7)
    parser.add_argument("--lengths", nargs="*", default=["11x11", "64x64", "256x64"], help="PROMPTxRESPONSE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = models.load(given.model, dtype=torch.float32)
    perturbation = Perturbation(loaded.model, "all", 1e-4)

    def update(tokens: TokenBatch) -> None:
        with perturbation.attached(seed=1):
            score(loaded.model, tokens).logp.sum().backward()
        loaded.model.zero_grad(set_to_none=True)

    print("| prompt x response | per response / per group | quartiles |\n|---|---|---|")
    for lengths in given.lengths:
        prompt, response = map(int, lengths.split("x"))
        sides = {
            name: batch(prompt, response, loaded.model.config.vocab_size, shared=name == "group") for name in SIDES
        }
        seconds = alternate({name: partial(update, of) for name, of in sides.items()}, given.rounds, time.process_time)
        low, middle, high = quartiles(seconds["response"], seconds["group"])
        print(f"| {prompt} x {response} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
