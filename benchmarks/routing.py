"""How much of a mixture's mismatch is routing, and what replaying the sampler's experts leaves of it.

    python benchmarks/routing.py [--out runs/routing] [--seeds 5] [--prompts 256] [--samples 8]
    python benchmarks/routing.py --runs runs/routing-compare    # what a `trimtab compare` of routing.replay came to

Models of 0.4 million parameters that sort ten digits: the laboratory's dense one, a dense twin of `laboratory-switch`
(its width and depth, feed-forward layers as large as its experts together) and the two mixtures. Every seed is a warm
start of its own: other data, the same initial weights. Each sampler draws responses at temperature 1 and reports its
log-probs and, of a mixture, its experts; the trainer (float32, or under bfloat16 autocast) scores them with its own
routing and with the sampler's experts (R3).

First table, means over seeds with the lowest and the highest: k3, k3 under R3, how many times smaller it is (geometric
mean), of 10,000 tokens those whose log-probs differ by more than 0.2 nats without and with R3, the
largest difference of all seeds, the share of (token, layer) pairs on which both sides agree, and of tokens sent
elsewhere in some layer.
Second table: where it comes from. Noise of growing size on the sampler's matrices, and bfloat16 in the routers alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grid import mean_and_range, table
from shared import options_of
from trimtab.corrections.divergences import k3
from trimtab.trainer import tasks
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import NO_QUANTIZATION, WeightQuantization
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.load import LoadedModel, load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.routing import router_info, routing_agreement
from trimtab.trainer.sft import supervised_warm_start
from trimtab.types import Completion, SamplingParams

TWIN = "dense twin"
MODELS = (laboratory.NAME, TWIN, laboratory.MIXTURE, laboratory.SWITCH)
# Sampler, and whether the trainer computes under bfloat16 autocast.
SAMPLERS: dict[str, tuple[str, WeightQuantization, bool]] = {
    "bfloat16": ("bfloat16", NO_QUANTIZATION, False),
    "bfloat16, trainer too": ("bfloat16", NO_QUANTIZATION, True),
    "int8": ("float32", WeightQuantization(bits=8), False),
    "int4": ("float32", WeightQuantization(bits=4), False),
    "int3": ("float32", WeightQuantization(bits=3), False),
}
FAR = 0.2  # nats: a ratio of 1.22 or 0.82
NOISES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Drawn:
    """Responses of one sampler as one micro-batch, its log-probs of their tokens, and the experts it used."""

    batch: TokenBatch
    logp: Tensor
    record: Tensor | None


@dataclass(frozen=True)
class Distance:
    """Of trainer and sampler on sampled tokens: k3 in nats per token, per 10,000 tokens those far off, the largest."""

    k3: float
    far: float
    largest: float

    @classmethod
    def of(cls, trainer: Tensor, batch: TokenBatch, sampler: Tensor) -> Distance:
        log = trainer[batch.response_mask].double() - sampler
        size = log.abs()
        return cls(float(k3(log).mean()), 1e4 * float((size > FAR).double().mean()), float(size.max()))


@dataclass(frozen=True)
class Measured:
    """Each routing freely, and the trainer with the sampler's experts; the rest is None for a dense model."""

    free: Distance
    replayed: Distance | None = None
    agreed: float | None = None
    elsewhere: float | None = None


def warm(name: str, seed: int, root: Path, more: Sequence[str]) -> LoadedModel:
    """The warm-started model of that name; made once."""
    folder = root / f"{name.replace(' ', '-')}-seed{seed}"
    if not folder.exists():
        path = name
        if name == TWIN:
            path = str(root / "twin")
            _twin(Path(path))
        supervised_warm_start(load_config("laboratory", [f"model.path={path}", f"seed={seed}", *more]), out=folder)
    return load(str(folder), dtype=torch.float32)


def _twin(folder: Path) -> None:
    """`laboratory-switch` with dense layers, not yet trained."""
    mixture, tokenizer = laboratory.build(0, laboratory.SWITCH)
    shape: Any = mixture.config
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    others = ("max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    torch.manual_seed(0)
    size = shape.num_experts * shape.moe_intermediate_size
    model = LlamaForCausalLM(
        LlamaConfig(**{name: getattr(shape, name) for name in (*names, *others)}, intermediate_size=size)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def draw(loaded: LoadedModel, dtype: str, rounding: WeightQuantization, prompts: int, samples: int) -> Drawn:
    task, mixture = tasks.build("sort"), router_info(loaded.model).layers > 0
    asked = [tasks.encode(task, problem, loaded.tokenizer) for problem in task.train[:prompts]]
    engine = EmbeddedEngine(
        loaded.model, loaded.tokenizer, getattr(torch, dtype), quantization=rounding, routes=mixture
    )
    groups = engine.generate(asked, samples, SamplingParams(max_tokens=task.max_tokens, stop=task.stop), seed=0)
    answers = [(index, answer) for index, group in enumerate(groups) for answer in group]
    batch = TokenBatch.pack(
        [one.ids for one in asked],
        [answer.response_ids for _, answer in answers],
        [index for index, _ in answers],
        pad_id=laboratory.ALPHABET.index(laboratory.PADDING),
    )
    logp = torch.from_numpy(np.concatenate([answer.logp_behavior for _, answer in answers])).double()
    return Drawn(batch, logp, record_of(batch, groups) if mixture else None)


def record_of(batch: TokenBatch, groups: Sequence[Sequence[Completion]]) -> Tensor:
    """The engine's record in the order of the forward; of a prompt its first sample's."""
    lengths = batch.prompt_mask.sum(-1).tolist()
    records = [[torch.from_numpy(np.array(answer.routed_experts)) for answer in group] for group in groups]
    prompts = [group[0][:length] for group, length in zip(records, lengths, strict=True)]
    responses = [one[length:] for group, length in zip(records, lengths, strict=True) for one in group]
    return torch.cat([*prompts, *responses])


@torch.no_grad()
def measure(loaded: LoadedModel, drawn: Drawn, autocast: bool = False) -> Measured:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        free = score(loaded.model, drawn.batch, record=drawn.record is not None)
        here = Distance.of(free.logp, drawn.batch, drawn.logp)
        if drawn.record is None or free.routes is None:
            return Measured(here)
        replayed = Distance.of(score(loaded.model, drawn.batch, routes=drawn.record).logp, drawn.batch, drawn.logp)
    same, pairs = routing_agreement(free.routes, drawn.record)
    return Measured(here, replayed, same / pairs, elsewhere(free.routes, drawn.record))


def elsewhere(one: Tensor, other: Tensor) -> float:
    """Share of tokens that went to another set of experts in at least one layer."""
    return float((one.sort(-1).values != other.sort(-1).values).any(-1).any(-1).float().mean())


@contextmanager
def rough_routers(model: Any) -> Iterator[None]:
    """Routers that read their input, and their own weight, in bfloat16; everything else stays as it is."""

    def forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = (hidden.reshape(-1, router.hidden_dim).bfloat16() @ router.weight.bfloat16().T).float()
        top = scores.softmax(-1).topk(router.top_k, -1)
        gates = top.values / top.values.sum(-1, keepdim=True) if router.norm_topk_prob else top.values
        return scores, gates, top.indices

    gates = [layer.mlp.gate for layer in model.model.layers]
    for gate in gates:
        gate.forward = partial(forward, gate)
    yield
    for gate in gates:
        del gate.forward


@torch.no_grad()
def routers_alone(loaded: LoadedModel, batch: TokenBatch) -> Measured:
    """A sampler that differs from the trainer in nothing but the type its routers compute in."""
    free = score(loaded.model, batch, record=True)
    with rough_routers(loaded.model):
        rough = score(loaded.model, batch, record=True)
    replayed = score(loaded.model, batch, routes=rough.routes).logp
    assert free.routes is not None
    assert rough.routes is not None
    sampler = rough.logp[batch.response_mask].double()
    same, pairs = routing_agreement(free.routes, rough.routes)
    return Measured(
        Distance.of(free.logp, batch, sampler),
        Distance.of(replayed, batch, sampler),
        agreed=same / pairs,
        elsewhere=elsewhere(free.routes, rough.routes),
    )


def row_of(result: Sequence[Measured]) -> list[str]:
    """Means over seeds, with the lowest and the highest."""

    def several(values: Sequence[float], form: str) -> str:
        low, high = (format(bound(values), form) for bound in (min, max))
        return format(float(np.mean(values)), form) + (f" [{low}, {high}]" if len(values) > 1 else "")

    free, replayed = [one.free for one in result], [one.replayed for one in result if one.replayed is not None]
    cells = [several([one.k3 for one in free], ".1e")]
    if not replayed:
        return [*cells, "-", "-", f"{np.mean([one.far for one in free]):.1f}", _largest(free), "-", "-"]
    factors = [one.k3 / other.k3 for one, other in zip(free, replayed, strict=True)]
    middle = float(np.exp(np.mean(np.log(factors))))
    return [
        *cells,
        several([one.k3 for one in replayed], ".1e"),
        f"{middle:.1f}" + (f" [{min(factors):.1f}, {max(factors):.1f}]" if len(factors) > 1 else ""),
        " -> ".join(f"{np.mean([one.far for one in side]):.1f}" for side in (free, replayed)),
        f"{_largest(free)} -> {_largest(replayed)}",
        f"{np.mean([one.agreed for one in result if one.agreed is not None]):.2%}",
        f"{np.mean([one.elsewhere for one in result if one.elsewhere is not None]):.1%}",
    ]


def _largest(result: Sequence[Distance]) -> str:
    return f"{max(one.largest for one in result):.2f}"


HEAD = (
    *("k3", "k3 under R3", "times smaller", "far off per 10,000", "largest", "pairs that agree"),
    "sent elsewhere",
)


def mismatch(root: Path, names: Sequence[str], seeds: int, prompts: int, samples: int, more: Sequence[str]) -> None:
    rows = []
    for name in names:
        models = [warm(name, seed, root, more) for seed in range(seeds)]
        for sampler, (dtype, rounding, autocast) in SAMPLERS.items():
            result = [measure(model, draw(model, dtype, rounding, prompts, samples), autocast) for model in models]
            rows.append([name, sampler, *row_of(result)])
            print(" | ".join(rows[-1]), flush=True)
    print("\n" + table(["model", "sampler", *HEAD], rows) + "\n")


def sources(root: Path, prompts: int, samples: int, more: Sequence[str]) -> None:
    """One model: the smaller the sampler's error, the more of k3 is routing."""
    model, rows = warm(laboratory.SWITCH, 0, root, more), []
    for noise in NOISES:
        drawn = draw(model, "float32", WeightQuantization(noise=noise), prompts, samples)
        rows.append([f"noise {noise:g}", *row_of([measure(model, drawn)])])
    batch = draw(model, "float32", NO_QUANTIZATION, prompts, samples).batch
    rows.append(["routers in bfloat16, the rest exact", *row_of([routers_alone(model, batch)])])
    print(table(["sampler", *HEAD], rows))


def training(root: Path) -> None:
    """What `trimtab compare` left in `root`: accuracy, reward of the last quarter, k3 and agreement by method."""
    rows = []
    for regime in sorted(path for path in root.iterdir() if path.is_dir()):
        for method in sorted(regime.iterdir()):
            files = sorted(method.glob("seed*/metrics.jsonl"))
            runs = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
            ends = [[step for step in run if any(key.endswith("/greedy") for key in step)][-1] for run in runs]
            greedy = [next(value for key, value in end.items() if key.endswith("/greedy")) for end in ends]
            late = [float(np.mean([step["reward/mean"] for step in run[-len(run) // 4 :]])) for run in runs]
            sizes = [np.mean([step["mismatch/k3"] for step in run]) for run in runs]
            known = [[step["routing/agreement"] for step in run if "routing/agreement" in step] for run in runs]
            agreed = [float(np.mean(run)) for run in known if run]
            rows.append([
                regime.name, method.name, str(len(runs)), mean_and_range(greedy), mean_and_range(late),
                f"{np.mean(sizes):.1e}", f"{np.mean(agreed):.2%}" if agreed else "-",
            ])  # fmt: skip
    head = ["regime", "method", "seeds", "held-out accuracy", "reward, last quarter", "k3", "pairs that agree"]
    print(table(head, rows))


def main() -> None:
    parser = options_of(__doc__, out=Path("runs/routing"), seeds=5, prompts=256, samples=8)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of the warm starts")
    parser.add_argument("--runs", type=Path, help="summarize these runs instead")
    given = parser.parse_args()
    if given.runs is not None:
        training(given.runs)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    mismatch(given.out, given.models, given.seeds, given.prompts, given.samples, given.set)
    sources(given.out, given.prompts, given.samples, given.set)


if __name__ == "__main__":
    main()
