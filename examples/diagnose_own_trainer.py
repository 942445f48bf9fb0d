"""What is wrong between sampler and trainer? Write the log-probs of your own training loop, and ask.

    python examples/diagnose_own_trainer.py
    trimtab diagnose own-logps

The loop below is any loop. Its sampler draws at temperature 0.9, its trainer forgets to divide by it.
"""

from __future__ import annotations

import sys

import torch

import trimtab
from trimtab.adapters.recording import Dump, response_rows

VOCABULARY, TOKENS, RESPONSES, TEMPERATURE = 50, 40, 64, 0.9


def main(folder: str) -> None:
    """Three steps, each written as one file, and the causes that `trimtab diagnose` names."""
    torch.manual_seed(0)
    dump = Dump(folder)
    for step in range(1, 4):
        logits = 2 * torch.randn(RESPONSES, TOKENS, VOCABULARY)
        sampler = (logits / TEMPERATURE).log_softmax(-1)
        trainer = (logits + 0.003 * torch.randn_like(logits)).log_softmax(-1)  # The temperature is missing.
        ids = torch.multinomial(sampler.exp().flatten(0, 1), 1).view(RESPONSES, TOKENS, 1)
        length = torch.randint(TOKENS // 2, TOKENS + 1, (RESPONSES,))
        tokens = {
            "response_ids": ids[..., 0],
            "logp_behavior": sampler.gather(-1, ids)[..., 0],
            "logp_proximal": trainer.gather(-1, ids)[..., 0],
        }
        dump.write(step, list(response_rows(length, tokens, responses={})))
    diagnosis = trimtab.diagnose(folder)
    for cause in diagnosis.causes:
        print(f"{cause.name} (confidence {cause.confidence:.2f}): {cause.evidence}")
        print(f"  {cause.fix}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "own-logps")
