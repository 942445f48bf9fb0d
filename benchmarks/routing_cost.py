"""What routing replay costs: bytes of the record, and time with and without it, alternating in one run.

    python benchmarks/routing_cost.py [--rounds 9] [--threads 1]

On the laboratory's mixture, whose two small layers make every hook dear: a large model does more work between two of
them. The record is measured as it is in a checkpoint, compressed, beside everything else of the trajectories there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from shared import alternate, options_of, quartiles
from trimtab.runs import trajectories
from trimtab.trainer import tasks
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.features.routing_replay import RoutingReplay
from trimtab.trainer.models.load import LoadedModel, load
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.routing import router_info
from trimtab.trainer.packing import MicroBatch, to_tensors
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Completion, Prompt, SamplingParams, Trajectory

PROMPTS, SAMPLES = 16, 8


def main() -> None:
    options = options_of(__doc__, rounds=9, threads=1).parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(str(laboratory_folder("laboratory-moe")), dtype=torch.float32)
    rows = sampled(loaded, options.rounds)
    sizes(loaded, rows)
    trained(loaded, rows, options.rounds)


def sampled(loaded: LoadedModel, rounds: int) -> list[Trajectory]:
    """Batches of the engine that records, against those of one that does not."""
    task = tasks.build("sort")
    sampling = SamplingParams(max_tokens=task.max_tokens, stop=task.stop)
    asked = PromptStream(task, loaded.tokenizer, 0).at(0, PROMPTS)
    engines = [EmbeddedEngine(loaded.model, loaded.tokenizer, torch.float32, routes=on) for on in (False, True)]
    result: list[list[list[Completion]]] = []
    jobs = [
        lambda engine=engine: result.append(engine.generate(asked, SAMPLES, sampling, seed=0)) for engine in engines
    ]
    ratio("sampling with a record / without", *jobs, rounds)
    groups = zip(asked, result[-1], strict=True)
    return [trajectory(p, i, one, sampling) for i, (p, group) in enumerate(groups) for one in group]


def trajectory(prompt: Prompt, group: int, completion: Completion, sampling: SamplingParams) -> Trajectory:
    mask = torch.ones(len(completion.response_ids), dtype=torch.bool).numpy()
    return Trajectory(prompt, group, completion, sampling, mask, 0.0, {})


def sizes(loaded: LoadedModel, rows: list[Trajectory]) -> None:
    bare = [replace(row, completion=replace(row.completion, routed_experts=None)) for row in rows]
    tokens = sum(len(row.prompt.ids) + len(row) - 1 for row in rows)
    whole, without = (len(trajectories.to_bytes(some)) for some in (rows, bare))
    kind = router_info(loaded.model)
    each = kind.layers * kind.chosen  # one byte for each choice, two above 256 experts
    print(f"record, {kind.layers} layers and {kind.chosen} of {kind.experts} experts: {each} bytes a token")
    packed, rest = (whole - without) / tokens, without / tokens
    print(f"in a checkpoint, compressed: {packed:.2f} bytes a token; all other columns {rest:.2f}")


def trained(loaded: LoadedModel, rows: list[Trajectory], rounds: int) -> None:
    """Forward and backward with replay and measured agreement, against both without."""
    replay = RoutingReplay("rollout", router_info(loaded.model))
    micro = replay.pack(to_tensors(rows, range(len(rows)), 12, torch.device("cpu")), rows)
    loaded.model.train()
    jobs = [lambda on=on: update(loaded, micro, on) for on in (False, True)]
    ratio("update with replay and agreement / without", *jobs, rounds)


def update(loaded: LoadedModel, micro: MicroBatch, on: bool) -> None:
    score(loaded.model, micro.tokens, routes=micro.extras["routes"] if on else None, record=on).logp.sum().backward()


def ratio(name: str, without: Callable[[], object], with_it: Callable[[], object], rounds: int) -> None:
    """Seconds of the second over those of the first: the median of pairs, and how far they spread."""
    seconds = alternate({"without": without, "with": with_it}, rounds)
    low, middle, high = quartiles(seconds["with"], seconds["without"])
    print(f"{name}: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
