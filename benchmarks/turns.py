"""Multi-turn episodes of SmolLM2-135M with a real interpreter: sampler against trainer over turns, and what turns cost.

    .venv/bin/python benchmarks/turns.py [--prompts 32] [--samples 8] [--rounds 9] [--threads 1]

Agreement: word problems of two calls, so three turns. The engine samples in bfloat16, the trainer scores with float32
weights under bfloat16 autocast. Printed is k3 for each turn, with 95% bootstrap intervals over responses; the tokens
right after results have a line of their own. "one turn" is the same prompts without the tool, in one turn in which the
model makes up the results; its k3 is the reference (target: at most twice as much). Rounding moves certain tokens
little, so it is also compared per nat of mean surprise (target: within a factor of 2). With invariant numerics all
log-probs must be equal (target: k3 exactly 0).

Cost: the same responses sampled with and without a turn handler, alternating; no episode calls. Ids must be equal.
Printed is the ratio of processor times, median over rounds (target: <= 1.02).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from shared import options_of
from trimtab.diagnosis.tokens import k3
from trimtab.trainer import environments, tasks
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.invariant import make_invariant
from trimtab.trainer.models.load import BUNDLED, LoadedModel, load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.tasks.task import BuiltTask, FewShot
from trimtab.types import Completion, Problem, Prompt, SamplingParams

QUESTION = "A shop has {a} boxes of {b} nails and {c} more. How many nails are there?"
SHOWN = """
Question: A shop has 41 boxes of 73 nails and 568 more. How many nails are there?
Answer: In the boxes there are <python>41 * 73</python><output>2993</output> nails. \
With the others there are <python>2993 + 568</python><output>3561</output> nails. The answer is 3561

Question: A shop has 57 boxes of 38 nails and 214 more. How many nails are there?
Answer: In the boxes there are <python>57 * 38</python><output>2166</output> nails. \
With the others there are <python>2166 + 214</python><output>2380</output> nails. The answer is 2380

Question: A shop has 26 boxes of 95 nails and 731 more. How many nails are there?
Answer: In the boxes there are <python>26 * 95</python><output>2470</output> nails. \
With the others there are <python>2470 + 731</python><output>3201</output> nails. The answer is 3201

"""
MAX_TOKENS = 96
GROUPS = 4  # of a micro-batch
RESAMPLES = 2000
Groups = list[list[Completion]]


def main() -> None:
    options = options_of(__doc__, model=BUNDLED, prompts=32, samples=8, rounds=9, threads=1).parse_args()
    torch.set_num_threads(options.threads)
    print("| numerics | tokens | count | surprise, nats | k3 | 95% | against one turn | per nat |")
    print("|---|---|---|---|---|---|---|---|")
    agreement(options.model, "native", options.prompts, options.samples)
    agreement(options.model, "invariant", max(1, options.prompts // 4), options.samples)
    cost(options.model, options.prompts // 4, options.samples, options.rounds)


def nails(count: int) -> BuiltTask:
    """The word problems, without an example."""
    rng = np.random.default_rng(0)
    numbers = [
        {"a": a, "b": b, "c": c}
        for a, b, c in zip(*(rng.integers(low, 10 * low, count) for low in (10, 10, 100)), strict=True)
    ]
    problems = [
        Problem(f"nails-{i}", QUESTION.format(**n), str(n["a"] * n["b"] + n["c"])) for i, n in enumerate(numbers)
    ]
    return BuiltTask("nails", [], problems, FewShot(()), (), ("\n",), MAX_TOKENS)


def agreement(model: str, numerics: str, count: int, samples: int) -> None:
    loaded = load(model, dtype=torch.float32)
    if numerics == "invariant":
        make_invariant(loaded.model)
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    environment = environments.build(EnvironmentConfig(name="python", instructions=SHOWN, max_turns=3))
    task = environment.adapt(nails(count))
    asked = [tasks.encode(task, problem, loaded.tokenizer) for problem in task.test]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop=task.stop)
    one_turn = engine.generate(asked, samples, replace(sampling, stop=("\n",)), seed=0)
    runner = environment.runner(loaded.tokenizer, MAX_TOKENS, partial(tasks.encode, task))
    episodes = runner.generate(engine.generate, asked, samples, sampling, seed=0, reset_seeds=range(len(asked)))
    environment.close()
    reference = line(numerics, "one turn", log_ratios(loaded, asked, one_turn), one_turn, lambda one: one.sampled, None)
    ratios = log_ratios(loaded, asked, episodes)
    for turn in range(3):
        line(numerics, f"turn {turn + 1}", ratios, episodes, lambda one, turn=turn: inside(one, turn), reference)
    line(numerics, "right after a result", ratios, episodes, after_results, reference)
    turns = [int(one.turn[-1]) + 1 for one in chain(*episodes)]
    outcomes = [one.outcome for one in chain(*episodes) if one.outcome is not None]
    print(
        f"\n{len(turns)} episodes, {sum(n == 3 for n in turns)} of three turns, {sum(one.calls for one in outcomes)} "
        f"calls, {sum(one.tool_errors for one in outcomes)} of them with an error\n",
        flush=True,
    )


def after_results(one: Completion) -> np.ndarray:
    """Marks the first sampled token after each observation."""
    return one.sampled & ~np.concatenate([[True], one.sampled[:-1]])


def inside(one: Completion, turn: int) -> np.ndarray:
    """Marks the sampled tokens of a turn, except the first one after an observation."""
    return one.sampled & (one.turn == turn) & ~after_results(one)


@torch.no_grad()
def log_ratios(loaded: LoadedModel, asked: Sequence[Prompt], groups: Groups) -> list[np.ndarray]:
    """Returns trainer minus sampler for all tokens of all responses; NaN at observations."""
    result = []
    for start in range(0, len(asked), GROUPS):
        part = groups[start : start + GROUPS]
        owner = [index for index, group in enumerate(part) for _ in group]
        rows = [one.response_ids for one in chain(*part)]
        prompts = [prompt.ids for prompt in asked[start : start + GROUPS]]
        batch = TokenBatch.pack(prompts, rows, owner, pad_id=int(loaded.tokenizer.pad_token_id))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logp = score(loaded.model, batch).logp.double().numpy()
        result += [logp[i, : len(one.response_ids)] - one.logp_behavior for i, one in enumerate(chain(*part))]
    return result


def line(
    numerics: str,
    name: str,
    ratios: Sequence[np.ndarray],
    groups: Groups,
    chosen: Callable[[Completion], np.ndarray],
    reference: tuple[float, float] | None,
) -> tuple[float, float]:
    """Prints k3 over the chosen tokens, and returns it with their mean surprise."""
    marks = [chosen(one) for one in chain(*groups)]
    sums = np.array([k3(r[m]).sum() for r, m in zip(ratios, marks, strict=True)])
    counts = np.array([int(m.sum()) for m in marks])
    nats = -sum(float(one.logp_behavior[m].sum()) for one, m in zip(chain(*groups), marks, strict=True)) / counts.sum()
    size = float(sums.sum() / counts.sum())
    rows = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    low, high = np.quantile(sums[rows].sum(1) / np.maximum(counts[rows].sum(1), 1), [0.025, 0.975])
    compared = "- | -"
    if reference is not None and reference[0] > 0:
        ratio = size / reference[0]
        compared = f"{ratio:.2f} | {ratio * reference[1] / nats:.2f}"
    print(f"| {numerics} | {name} | {counts.sum()} | {nats:.3f} | {size:.2e} | {low:.1e} to {high:.1e} | {compared} |")
    return size, nats


def cost(model: str, count: int, samples: int, rounds: int) -> None:
    loaded = load(model, dtype=torch.float32)
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    environment = environments.build(EnvironmentConfig(name="python"))
    task = environment.adapt(nails(count))
    asked = [tasks.encode(task, problem, loaded.tokenizer) for problem in task.test]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop=task.stop)
    runner = environment.runner(loaded.tokenizer, MAX_TOKENS, partial(tasks.encode, task))

    def single(seed: int) -> Groups:
        return engine.generate(asked, samples, sampling, seed=seed)

    def episodes(seed: int) -> Groups:
        return runner.generate(engine.generate, asked, samples, sampling, seed=seed, reset_seeds=range(len(asked)))

    pairs = []
    for seed in range(rounds + 1):  # the first is a warm-up
        order = (single, episodes) if seed % 2 else (episodes, single)
        timed = {call: processor_seconds(call, seed) for call in order}
        pairs.append((timed[single][0], timed[episodes][0]))
        for one, other in zip(chain(*timed[single][1]), chain(*timed[episodes][1]), strict=True):
            assert one.response_ids.tolist() == other.response_ids.tolist()
            assert other.outcome is not None
            assert other.outcome.calls == 0
    environment.close()
    ratios = sorted(b / a for a, b in pairs[1:])
    a, b = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
    print(
        f"cost, {count} prompts x {samples}, up to {MAX_TOKENS} tokens, no calls, {rounds} rounds: one turn {a:.2f} s "
        f"of processor time, episodes {b:.2f} s; ratio {statistics.median(ratios):.3f} (rounds {ratios[0]:.3f} to "
        f"{ratios[-1]:.3f}), target <= 1.02"
    )


def processor_seconds(call: Callable[[int], Groups], seed: int) -> tuple[float, Groups]:
    begin = time.process_time()
    result = call(seed)
    return time.process_time() - begin, result


if __name__ == "__main__":
    main()
