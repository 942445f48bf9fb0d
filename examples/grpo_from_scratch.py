"""GRPO from scratch: a tiny model learns to sort digits from rewards alone, in one file of plain PyTorch.

    python examples/grpo_from_scratch.py

Everything a trainer does is here once: sample groups of responses, score them, compare each with its group, update the
weights a few times, hand them to the sampler. The sampler is off-policy in the two usual ways: its weights are rounded
to bfloat16, and they are refreshed only after every `--refresh` batches. The loss that corrects for both is one line,
`trimtab.objective(...)`. With `--refresh 16` the held-out accuracy goes from .47 to .60; with `--objective reinforce`
beside it, which corrects nothing, to .09. `trimtab train laboratory` is the same experiment with all that a real run
needs.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import trimtab

ALPHABET = "0123456789=. "  # "3141592653=" is to be continued as "1123345569."
EQUALS, END, PAD = (ALPHABET.index(character) for character in "=. ")
DIGITS = 10
LENGTH = DIGITS + 1  # of a prompt, and of a response: ten digits and a final character


def build_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ALPHABET),
            hidden_size=128,
            intermediate_size=336,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=2 * LENGTH,
            pad_token_id=PAD,
        )
    )


def draw_problems(count: int) -> tuple[Tensor, Tensor]:
    """Prompts and their answers, each (count, LENGTH) token ids."""
    digits = torch.randint(0, 10, (count, DIGITS))
    ends = [torch.full((count, 1), token) for token in (EQUALS, END)]
    return torch.cat([digits, ends[0]], 1), torch.cat([digits.sort(1).values, ends[1]], 1)


def response_logp(model: LlamaForCausalLM, prompts: Tensor, responses: Tensor) -> Tensor:
    """Log-probability of every response token given all tokens before it, (rows, LENGTH) in float32."""
    logits = model(torch.cat([prompts, responses], 1)).logits[:, LENGTH - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, responses[..., None])[..., 0]


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Responses, the log-probs they were sampled with, and a mask of their tokens, each (rows, LENGTH)."""
    tokens, logps, running = prompts, [], torch.ones(len(prompts), dtype=torch.bool)
    masks = []
    for _ in range(LENGTH):
        logp = model(tokens).logits[:, -1].float().log_softmax(-1)
        chosen = logp.argmax(-1) if greedy else torch.multinomial(logp.exp(), 1)[:, 0]
        chosen = torch.where(running, chosen, PAD)
        logps.append(logp.gather(1, chosen[:, None])[:, 0])
        masks.append(running)
        running = running & (chosen != END)
        tokens = torch.cat([tokens, chosen[:, None]], 1)
    return tokens[:, LENGTH:], torch.stack(logps, 1), torch.stack(masks, 1)


def correct(responses: Tensor, answers: Tensor) -> Tensor:
    """The reward, (rows,): 1 for the whole answer, else 0."""
    return (responses == answers).all(1).float()


def warm_start(model: LlamaForCausalLM, steps: int) -> None:
    """Supervised steps, after which some samples are right: rewards of 0 alone would teach nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        loss = -response_logp(model, *draw_problems(128)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_on(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    objective: trimtab.Objective,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    rewards: Tensor,
) -> None:
    """Two updates on one batch; `rewards` is (groups, samples)."""
    prompts, responses, behavior, mask = batch
    # How much better a response is than its group. A group of equal rewards has nothing to teach.
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    with torch.no_grad():  # the policy at the start of the updates, by the trainer's own arithmetic
        proximal = response_logp(model, prompts, responses)
    for rows in torch.arange(len(prompts)).chunk(2):
        current = response_logp(model, prompts[rows], responses[rows])
        logps = trimtab.PolicyLogps(current=current, behavior=behavior[rows], mask=mask[rows], proximal=proximal[rows])
        out = objective(logps, advantages[rows, None])
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--objective", default="token-tis", help="any preset: `trimtab explain NAME` prints its equation"
    )
    parser.add_argument("--refresh", type=int, default=4, help="batches between two refreshes of the sampler")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    objective = trimtab.objective(options.objective)
    print(objective.equation(), end="\n\n")

    model = build_model()
    warm_start(model, steps=70)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.99))
    test_prompts, test_answers = draw_problems(256)
    sampler = copy.deepcopy(model).bfloat16()
    for step in range(options.steps + 1):
        if step % 10 == 0:
            solved = correct(sample(model, test_prompts, greedy=True)[0], test_answers).mean()
            print(f"step {step:3}  held-out accuracy {solved:.3f}")
        if step % options.refresh == 0:
            sampler.load_state_dict(model.state_dict())  # rounds to bfloat16
        prompts, answers = (rows.repeat_interleave(8, 0) for rows in draw_problems(16))
        responses, behavior, mask = sample(sampler, prompts)
        rewards = correct(responses, answers).view(16, 8)
        train_on(model, optimizer, objective, (prompts, responses, behavior, mask), rewards)


if __name__ == "__main__":
    main()
