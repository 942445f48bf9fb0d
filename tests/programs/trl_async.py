"""TRL's `AsyncGRPOTrainer` with Trimtab's losses on the laboratory model, without a server.

    python tests/programs/trl_async.py parity|presets|own|train|guarded|refusals|whole FOLDER

Prints a JSON object as its last line. The environment must have TRL; its attention kernel, which needs a GPU, is
replaced by the same attention in torch.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing
from trl.experimental.async_grpo import AsyncGRPOTrainer as PlainTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trimtab.adapters.hooks import HOOKS
from trimtab.adapters.micro_batch import turns_of
from trimtab.adapters.trl import AsyncGRPOTrainer, Guard
from trimtab.adapters.trl_async import _with_versions
from trimtab.adapters.trl_packed import VERSIONS
from trimtab.errors import TrimtabError
from trimtab.monitor import Monitor
from trimtab.objectives import Objective, PolicyLogps, State, objective, objectives
from trimtab.trainer.models import laboratory

NEWEST = 5
"""Version of the trainer's weights where single losses are compared."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> Tensor:
    """Attention of packed segments, (tokens, heads, size): the last query of a segment sees all of its keys."""
    result = []
    for (a, b), (c, d) in zip(starts_q.unfold(0, 2, 1).tolist(), starts_k.unfold(0, 2, 1).tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[c:d]) * softmax_scale
        visible = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        result.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), value[c:d]))
    return torch.cat(result)


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # It asks CUDA.


class Worker:
    """A worker that has sampled already, and the transfer of weights to it, which does nothing."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def check_health(self, _: float) -> None:
        raise AssertionError("the samples are used up")

    def send_weights(self, weights: Iterator[Any]) -> None:
        for _ in weights:
            pass

    def nothing(self, *_: Any) -> None:
        pass

    start = stop = update_model_version = init_weight_transfer = pause = resume = destroy = nothing


def saved(folder: Path, name: str = laboratory.NAME) -> Path:
    path = folder / name
    if not path.exists():
        model, tokenizer = laboratory.build(0, name)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def logps_of(model: Any, sample: RolloutSample) -> Tensor:
    """(time,) log-probs of a sample's tokens, 0 at its first, without any packing."""
    ids = torch.tensor(sample.input_ids)
    logits = model(ids[None]).logits[0, :-1].float()
    return torch.nn.functional.pad(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0], (1, 0))


def drawn(model: Any, count: int, version: int | None = None) -> list[RolloutSample]:
    """Groups of four samples with one prompt, half of them of two turns, from responses that no rule rejects to others.

    Without `version` they are of several.
    """
    make, samples = torch.Generator().manual_seed(7), []
    for index in range(count):
        group = index // 4
        if index % 4 == 0:
            prompt = torch.randint(0, 10, (4 + group % 3,), generator=make).tolist()
        turns = [torch.randint(0, 10, (2 + (index * 3 + turn) % 5,), generator=make) for turn in range(1 + index % 2)]
        ids, mask = list(prompt), [0] * len(prompt)
        for turn in turns:
            ids += [*turn.tolist(), 11, 12]  # Two tokens of the template end a turn.
            mask += [1] * len(turn) + [0, 0]
        sample = RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array(ids),
            completion_mask=np.array(mask),
            old_log_probs=np.zeros(len(ids), dtype=np.float32),
            advantage=float((-1) ** (index + 1) * (0.5 + torch.rand((), generator=make))),
            model_version=NEWEST - index % 3 if version is None else version,
            group_id=group,
            metrics={"reward": float(index % 2)},
        )
        with torch.no_grad():
            logps = logps_of(model, sample)
        noise = 10 ** (-4 + 4 * index / count) * (1 + torch.randn(len(ids), generator=make))
        sample.old_log_probs = (torch.tensor(mask) * (logps + noise)).clamp(max=0).numpy()
        samples.append(sample)
    return samples


def build(
    kind: type[PlainTrainer],
    folder: Path,
    samples: list[RolloutSample] | Worker,
    own: dict[str, Any],
    *,
    model: str = laboratory.NAME,
    **options: Any,
) -> PlainTrainer:
    settings = {"per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 1.0, **options}
    arguments = AsyncGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        optim="sgd",
        max_grad_norm=0.0,
        token_budget=0,
        **settings,
    )
    worker = samples if isinstance(samples, Worker) else Worker(samples)
    return kind(
        str(saved(folder, model)),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1="}]),
        processing_class=laboratory.build(0)[1],
        rollout_worker=worker,
        weight_transfer=worker,
        **own,
    )


def packed(samples: list[RolloutSample], parts: int) -> list[dict[str, Tensor]]:
    """Micro-batches of one row each, as TRL's collator makes them, of different sizes."""
    borders = [round(len(samples) * (part / parts) ** 1.5) for part in range(parts + 1)]
    collate = _with_versions(async_grpo_trainer.DataCollatorForRollout(0))
    batches = []
    for start, end in pairwise(borders):
        row = packing.TreeRow()
        for sample in samples[start:end]:
            row.add(
                {
                    "input_ids": sample.input_ids,
                    "completion_mask": sample.completion_mask,
                    "old_log_probs": sample.old_log_probs,
                    "advantage": sample.advantage,
                    "group_id": sample.group_id,
                    "metrics": {VERSIONS: sample.model_version},
                }
            )
        batches.append(collate([[row]]))
    return batches


def gradient(loss: Tensor, model: Any) -> Tensor:
    named = sorted(model.named_parameters())
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, [value for _, value in named])])


def computed(trainer: PlainTrainer, batches: list[dict[str, Tensor]], scale: list[float]) -> tuple[float, Tensor]:
    """The loss of an update and its gradient, as the sum over micro-batches, each times a number."""
    trainer.model_version = NEWEST
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.get_batch_samples(iter(batches), len(batches), "cpu")
    loss, total = 0.0, torch.zeros(())
    for batch, factor in zip(batches, scale, strict=True):
        value = trainer.compute_loss(trainer.model, batch) * factor
        loss, total = loss + value.item(), total + gradient(value, trainer.model)
    return loss, total


def library(one: Objective, model: Any, samples: list[RolloutSample]) -> tuple[float, Tensor]:
    """The loss and gradient of the library for samples that are forwarded alone."""

    def padded(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    begin = [int(sample.completion_mask.argmax()) for sample in samples]
    mask, behavior = (
        padded([torch.tensor(getattr(one, name))[start:] for one, start in zip(samples, begin, strict=True)])
        for name in ("completion_mask", "old_log_probs")
    )
    mask = mask.bool()
    current = padded([logps_of(model, sample)[start:] for sample, start in zip(samples, begin, strict=True)])
    age = torch.tensor([[NEWEST - sample.model_version + 1] for sample in samples])
    logps = PolicyLogps(
        current=current,
        behavior=behavior,
        mask=mask,
        proximal=current.detach(),
        turn=turns_of(mask),
        age=age.expand(mask.shape),
    )
    advantage = torch.tensor([[sample.advantage] for sample in samples], dtype=torch.float32)
    loss = one(logps, advantage).loss
    return loss.item(), gradient(loss, model)


def difference(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> dict[str, float]:
    scale = expected[1].abs().max().item()
    gap = (found[1] - expected[1]).abs().max().item() / scale
    return {"loss": abs(found[0] - expected[0]), "gradient": gap, "scale": scale, "value": expected[0]}


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved(folder), attn_implementation="eager").eval()


def parity(folder: Path) -> dict[str, Any]:
    """`token-bypass` against TRL's own loss: one micro-batch, and three of which TRL averages the means.

    The mixture of experts has the auxiliary loss of its router too.
    """
    samples = drawn(plain_model(folder), 12)
    bypass = {"objective": "token-bypass"}
    ours = build(AsyncGRPOTrainer, folder, samples, bypass)
    theirs = build(PlainTrainer, folder, samples, {})
    three = packed(samples, 3)
    tokens = [batch["global_n_tokens"].item() for batch in three]
    found, once = computed(ours, three, [1.0] * 3), computed(ours, packed(samples, 1), [1.0])
    weighted = computed(theirs, three, [3 * one / sum(tokens) for one in tokens])
    mixture = {"model": laboratory.MIXTURE, "router_aux_loss_coef": 0.1}
    kinds = ((AsyncGRPOTrainer, bypass), (PlainTrainer, {}))
    of_mixture = [build(kind, folder, samples, own, **mixture) for kind, own in kinds]
    return {
        "tokens": tokens,
        "mixture": difference(*(computed(trainer, packed(samples, 1), [1.0]) for trainer in of_mixture)),
        "auxiliary": of_mixture[0]._metrics["train"]["aux_loss"],
        "one micro-batch": difference(once, computed(theirs, packed(samples, 1), [1.0])),
        "three, weighted by tokens": difference(found, weighted),
        "three, as TRL has them": difference(found, computed(theirs, three, [1.0] * 3)),
        "metrics": sorted(ours._metrics["train"]),
    }


class OneMicroBatch(AsyncGRPOTrainer):
    """A planted fault: the denominators are those of the first micro-batch."""

    def _summed(self, parts: Any) -> State:
        return super()._summed(parts[:1])


def presets(folder: Path) -> dict[str, dict[str, float]]:
    """Every preset that the hook carries, packed into one, two and four rows, against the library."""
    model = plain_model(folder)
    samples = drawn(model, 12)
    result: dict[str, dict[str, float]] = {}
    trainer = build(AsyncGRPOTrainer, folder, samples, {"objective": "grpo"})
    faulty = build(OneMicroBatch, folder, samples, {"objective": "grpo"})
    kept = objective("icepop", denominator="kept", aggregation="token-mean", weight_max=1.05, weight_min=0.95)
    built = [objective(name, **({"length_max": 8} if name in ("dr-grpo", "luffy") else {})) for name in objectives()]
    for one in [*built, replace(kept, name="kept"), replace(objective("seq-tis", normalize=True), name="normalized")]:
        if HOOKS["trl-async"].refusal(one) is not None:
            continue
        expected = library(one, model, samples)
        trainer._objective = faulty._objective = one
        cases = {
            f"{one.name}, {parts}": computed(trainer, packed(samples, parts), [1.0] * parts) for parts in (1, 2, 4)
        }
        if one.name in ("token-bypass", "icepop", "kept"):
            cases[f"planted, {one.name}"] = computed(faulty, packed(samples, 2), [1.0] * 2)
        result |= {name: difference(found, expected) for name, found in cases.items()}
    return result


def own(folder: Path) -> dict[str, Any]:
    """TRL's trainer, ours with `dump` and `monitor`, and ours without anything: none of them has an objective."""
    watched = {"dump": folder / "logps", "monitor": Monitor(folder / "monitor", on_alarm=lambda _: None)}
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.1, "epsilon_high": 0.3}
    runs = []
    for kind, given in ((PlainTrainer, {}), (AsyncGRPOTrainer, watched), (AsyncGRPOTrainer, {})):
        trainer = build(kind, folder, drawn(plain_model(folder), 36, version=1), given, **options)
        trainer.train()
        log = [
            {key: value for key, value in row.items() if isinstance(value, float) and key != "epoch"}
            for row in trainer.state.log_history
        ]
        runs.append((log, [value.detach().clone() for value in trainer.model.parameters()], torch.get_rng_state()))
    (log, weights, random), (ours, *_), _ = runs
    clock = ("time", "_per_s", "perf/", "queue")
    names = [key for key in log[0] if not key.endswith("_s") and not any(word in key for word in clock)]
    rows = [json.loads(line) for path in sorted((folder / "logps").iterdir()) for line in path.open()]
    return {
        "names": names,
        "log": [[[row.get(key) for key in names] for row in run[0][:4]] for run in runs],
        "weights": all(torch.equal(a, b) for run in runs for a, b in zip(weights, run[1], strict=True)),
        "random": all(torch.equal(random, run[2]) for run in runs),
        "added": sorted(ours[0].keys() - log[0].keys()),
        "versions": sorted({(row["step"], row["policy_version"], row["proximal_version"]) for row in rows}),
        "observed": [json.loads(line)["age"] for line in (folder / "monitor" / "metrics.jsonl").open()],
        "sample": (folder / "monitor" / "sample.jsonl").exists(),
    }


def train(folder: Path) -> dict[str, Any]:
    """Four updates of eight samples with icepop, whose log-probs are written and observed."""
    model = plain_model(folder)
    samples = drawn(model, 36, version=1)
    samples[0].old_log_probs[samples[0].completion_mask.argmax()] = math.nan
    with torch.no_grad():
        exact = [logps_of(model, sample) for sample in samples[:8]]
    monitor = Monitor(folder / "monitor")
    own = {"objective": "icepop", "dump": folder / "logps", "monitor": monitor}
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.1}
    trainer = build(AsyncGRPOTrainer, folder, samples, own, **options)
    trainer.train()
    monitor.close()
    rows = [json.loads(line) for path in sorted((folder / "logps").iterdir()) for line in path.open()]
    by_advantage = {round(row["advantage"], 5): row for row in rows}
    used = [(by_advantage[round(sample.advantage, 5)], sample) for sample in samples[:32]]
    log = trainer.state.log_history[:4]
    return {
        "rows": len(rows),
        "wrong": sum(not is_row_of(row, sample) for row, sample in used),
        "logp": max(
            abs(found - wanted)
            for (row, sample), logps in zip(used, exact, strict=False)
            for found, wanted, trained in zip(
                row["logp_current"], logps[sample.completion_mask.argmax() :].tolist(), row["loss_mask"], strict=False
            )
            if trained
        ),
        "versions": sorted({(row["step"], row["policy_version"], row["proximal_version"]) for row in rows}),
        "age": [row["trimtab/age"] for row in log],
        "unscored": [row["trimtab/unscored"] for row in log],
        "metrics": sorted(log[-1]),
        "forwarded": [row["batch/forwarded_tokens_per_step"] for row in log],
        "unique": sum(packed(samples[i : i + 4], 1)[0]["attention_mask"].sum().item() for i in (0, 4)),
    }


def is_row_of(row: dict[str, Any], sample: RolloutSample) -> bool:
    """Whether a row of the dump has the tokens of a sample up to its last trained one, and the sampler's log-probs."""
    begin, end = sample.completion_mask.argmax(), len(sample.input_ids) - 2
    logps = [None if math.isnan(one) else one for one in sample.old_log_probs[begin:end].tolist()]
    return (
        row["prompt_id"] == " ".join(map(str, sample.input_ids[:begin]))
        and row["response_ids"] == sample.input_ids[begin:end].tolist()
        and row["loss_mask"] == sample.completion_mask[begin:end].astype(bool).tolist()
        and row["logp_behavior"] == logps
    )


def whole(folder: Path) -> dict[str, Any]:
    """The weights after three updates of eight samples, by trainer and number of micro-batches."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    result = {}
    cases = [("trimtab", 2)] if processes > 1 else [("trimtab", 1), ("trimtab", 4), ("trl", 1), ("trl", 4)]
    for name, windows in cases:
        samples = drawn(plain_model(folder), 32, version=1)
        kind, own = (PlainTrainer, {}) if name == "trl" else (AsyncGRPOTrainer, {"objective": "seq-tis"})
        options = {"per_device_train_batch_size": 8 // processes // windows, "gradient_accumulation_steps": windows}
        trainer = build(kind, folder, samples, own, max_steps=3, learning_rate=0.3, **options)
        trainer.train()
        named = sorted(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
        result[f"{name}, {windows}"] = {
            "weights": [(one.flatten() * torch.linspace(1, 2, one.numel())).double().sum().item() for _, one in named],
            "age": [row.get("trimtab/age") for row in trainer.state.log_history[:3]],
        }
    return result


class Refilled(Worker):
    """A worker that samples again when it is told of new weights and has no sample left."""

    refills = 0

    def update_model_version(self, version: int) -> None:
        if self.rollout_buffer.empty():
            self.refills += 1
            for sample in drawn(self.model, 36, version):
                self.rollout_buffer.put(sample)


class Infinite(AsyncGRPOTrainer):
    """The loss of the third update is infinite."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == 2:
            self.before = [one.detach().clone() for one in self.model.parameters()]
        return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        return loss * torch.inf if self.state.global_step == 2 else loss

    def drop_responses(self) -> None:
        self.restored = [one.detach().clone() for one in self.model.parameters()]
        self.waited, self.sent = self.rollout_queue.qsize(), self.model_version
        super().drop_responses()


def guarded(folder: Path) -> dict[str, Any]:
    """A return drops the samples that wait, and sends the engine the weights that were put back."""
    worker = Refilled([])
    worker.model = plain_model(folder)
    options = {"gradient_accumulation_steps": 2, "max_steps": 5, "learning_rate": 0.1}
    trainer = build(Infinite, folder, worker, {"guard": Guard(every=2)}, **options)
    trainer.train()
    return {
        "same": all(map(torch.equal, trainer.before, trainer.restored)),
        "waited": trainer.waited,
        "refills": worker.refills,
        "versions": [trainer.sent, trainer.model_version],
        "finite": all(bool(torch.isfinite(one).all()) for one in trainer.model.parameters()),
        "marks": [row.get("trimtab/guard/continues_from") for row in trainer.state.log_history[:5]],
        "rates": [row["learning_rate"] for row in trainer.state.log_history[:5]],
    }


def refusals(folder: Path) -> list[str]:
    """Said before a model is loaded, as this one cannot be."""
    plain = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"objective": "oapl"}, {}),
        ({"objective": "score-centering"}, {}),
        ({"objective": objective("grpo", kl_coef=0.1)}, {}),
        ({"objective": objective("dr-grpo", length_max=8)}, {}),
        ({"objective": "icepop"}, {"epsilon": 0.1, "epsilon_high": 0.3}),
    ]
    result = []
    for own, options in cases:
        try:
            AsyncGRPOTrainer("no/such-model", args=AsyncGRPOConfig(**plain, **options), **own)
        except TrimtabError as error:
            result.append(str(error))
    return result


if __name__ == "__main__":
    functions = (parity, presets, own, train, whole, guarded, refusals)
    print(json.dumps({one.__name__: one for one in functions}[sys.argv[1]](Path(sys.argv[2]))))
    if torch.distributed.is_initialized():  # A process that ends with its group open may abort: threads are running.
        torch.distributed.destroy_process_group()
