"""Cost of one update with every preset, relative to `grpo`.

    python benchmarks/objective_step.py --rounds 15                     # laboratory model
    python benchmarks/objective_step.py --model smollm2-135m-instruct --rounds 5 --presets score-centering ctpo pnpo
    python benchmarks/objective_step.py --loss-only [--packed] --rows 64 --response 1024 --presets dapo cppo ctpo pnpo

One update: the statistics of the update, one forward of the policy with a gradient, the loss, and the backward pass,
over one micro-batch, one thread. Log-probs of the proximal policy are given, as after its own pass; presets that read
none save that pass besides. `score-centering` scores 128 further ids of each token. With `--loss-only` there is no
model: the loss and its backward pass alone, on random log-probs, with sequences as rows or (`--packed`) by ids. Presets
take turns within each round; printed are the median of processor time over that of `grpo` in the same round, and the
quartiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from shared import alternate, options_of, quartiles
from trimtab.objectives import PolicyLogps, objective, objectives
from trimtab.trainer.models import load as models
from trimtab.trainer.models.logprobs import TokenBatch, score

HEAD = 128


def build(model_path: str, rows: int, prompt: int, response: int) -> Callable[[str], None]:
    """Returns a function that runs one update of a preset, without the optimizer's step."""
    loaded = models.load(model_path, dtype=torch.float32)
    model, vocabulary = loaded.model, loaded.model.config.vocab_size
    rng = np.random.default_rng(0)
    batch = TokenBatch.pack(
        [rng.integers(5, vocabulary, prompt) for _ in range(rows // 8)],
        [rng.integers(5, vocabulary, response) for _ in range(rows)],
        [row // 8 for row in range(rows)],
        pad_id=0,
    )
    torch.manual_seed(0)
    mask = batch.response_mask
    size = min(HEAD, vocabulary)
    with torch.no_grad():
        proximal = score(model, batch).logp
        ids = torch.randint(5, vocabulary, (*mask.shape, size))
        head = score(model, batch, head=ids).head
    assert head is not None
    behavior = proximal + 0.05 * torch.randn_like(proximal)
    advantage = torch.randn(rows, 1)

    def update(name: str) -> None:
        built = objective(name)
        centered = built.centering
        logps = PolicyLogps(
            current=None,
            behavior=behavior,
            mask=mask,
            proximal=proximal,
            off_policy=torch.zeros_like(mask) if "off_policy" in built.needs else None,
            turn=torch.zeros_like(batch.response_ids) if "turn" in built.needs else None,
            age=torch.ones_like(batch.response_ids) if "age" in built.needs else None,
        )
        current = {}
        if "current" in built.prepare_needs:
            with torch.no_grad():
                current = {"current": score(model, batch).logp}
        state = built.prepare(PolicyLogps(**{**vars(logps), **current}), advantage)
        scores = score(model, batch, head=ids if centered else None)
        heads = {"head_current": scores.head, "head_behavior": head} if centered else {}
        built(PolicyLogps(**{**vars(logps), "current": scores.logp, **heads}), advantage, state=state).loss.backward()
        model.zero_grad(set_to_none=True)

    return update


def build_loss(rows: int, response: int, *, packed: bool) -> Callable[[str], None]:
    """Returns a function that computes the loss of a preset and its gradient from given log-probs."""
    generator = torch.Generator().manual_seed(0)
    noise = [0.01 * torch.randn(rows, response, generator=generator) for _ in range(2)]
    behavior = -2 * torch.rand(rows, response, generator=generator) - 0.05
    proximal = behavior + noise[0]
    current = (proximal + noise[1]).requires_grad_()
    mask = torch.ones(rows, response, dtype=torch.bool)
    advantage = torch.randn(rows, 1, generator=generator)
    ids = torch.arange(rows)[:, None].expand(rows, response).contiguous() if packed else None
    head = torch.randn(rows, response, HEAD, generator=generator).log_softmax(-1) - 0.01

    def update(name: str) -> None:
        built = objective(name)
        logps = PolicyLogps(
            current,
            behavior,
            mask,
            proximal,
            sequence_ids=ids,
            off_policy=torch.zeros_like(mask) if "off_policy" in built.needs else None,
            turn=torch.zeros(rows, response, dtype=torch.long) if "turn" in built.needs else None,
            age=torch.ones(rows, response, dtype=torch.long) if "age" in built.needs else None,
            head_current=head.requires_grad_() if built.centering else None,
            head_behavior=head.detach() if built.centering else None,
        )
        built(logps, advantage).loss.backward()
        current.grad = head.grad = None

    return update


def main() -> None:
    parser = options_of(
        __doc__, model="laboratory", presets=objectives(), rounds=15, rows=128, prompt=12, response=12, loss_only=False
    )
    parser.add_argument("--packed", action="store_true", help="with --loss-only: sequences by ids")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.loss_only:
        update = build_loss(given.rows, given.response, packed=given.packed)
    else:
        update = build(given.model, given.rows, given.prompt, given.response)
    names = list(dict.fromkeys(["grpo", *given.presets]))
    seconds = alternate({name: partial(update, name) for name in names}, given.rounds, time.process_time)
    print("| preset | update / grpo | quartiles |\n|---|---|---|")
    for name in names[1:]:
        low, middle, high = quartiles(seconds[name], seconds["grpo"])
        print(f"| `{name}` | {middle:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
