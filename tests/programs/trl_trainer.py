"""Runs of TRL's trainer with Trimtab's losses on the laboratory model; the environment must have TRL.

    python tests/programs/trl_trainer.py FUNCTION FOLDER     (a function of this file)

Prints a JSON object as its last line.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig
from trl import GRPOTrainer as PlainTrainer

from trimtab.adapters.hooks import HOOKS
from trimtab.adapters.loss_settings import SETTINGS
from trimtab.adapters.trl import GRPOTrainer, Guard
from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.monitor import Monitor
from trimtab.objectives import PolicyLogps, objective, objectives
from trimtab.trainer.models import laboratory

HARMLESS = {
    *("beta", "use_bias_correction_kl", "steps_per_generation", "use_vllm"),
    *("vllm_importance_sampling_correction", "router_aux_loss_coef"),  # the adapter reads these six
    "vllm_importance_sampling_cap",  # TRL stores it as vllm_importance_sampling_clip_max
    "max_completion_length",  # it limits generation; the constant denominator is length_max of the objective
}
"""Settings that TRL's loss reads and that stay beside a loss of Trimtab."""
PROMPTS = ["3141592653=", "2718281828=", "1414213562=", "1732050807="]


def digits(completions: list[str], **_: Any) -> list[float]:
    """The share of odd digits: a reward that differs within every group."""
    return [sum(one in "13579" for one in text) / max(1, len(text)) for text in completions]


def sampled(prompts: list[str], trainer: PlainTrainer, noise: float = 0.3) -> dict[str, list[list[Any]]]:
    """Samples from the model that is trained, with log-probs as of a slightly different sampler."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    batch = torch.tensor(ids)
    with torch.no_grad():
        full = trainer.model.generate(
            batch, max_new_tokens=8, do_sample=True, attention_mask=torch.ones_like(batch), pad_token_id=0
        )
        logits = trainer.model(full).logits[:, batch.shape[1] - 1 : -1].float()
    completions = full[:, batch.shape[1] :]
    logps = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    logps = logps + noise * torch.randn(logps.shape, generator=torch.Generator().manual_seed(len(trainer.seen)))
    trainer.seen.append(completions)
    lengths = [
        row.index(trainer.processing_class.eos_token_id) + 1
        if trainer.processing_class.eos_token_id in row
        else len(row)
        for row in completions.tolist()
    ]
    return {
        "prompt_ids": ids,
        "completion_ids": [row[:n] for row, n in zip(completions.tolist(), lengths, strict=True)],
        "logprobs": [row[:n] for row, n in zip(logps.tolist(), lengths, strict=True)],
    }


def build(
    kind: type[PlainTrainer],
    folder: Path,
    *,
    steps: int,
    own: dict[str, Any],
    rollout: Callable[..., Any] | None = None,
    reference: Path | None = None,
    **options: Any,
) -> PlainTrainer:
    model, tokenizer = laboratory.build(0)
    if reference is not None:
        model.config._name_or_path = model.name_or_path = str(reference)
    model.config._attn_implementation = "eager"
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "max_steps": steps,
        "logging_steps": 1,
        **options,
    }
    settings |= {"report_to": "none", "save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True}
    arguments = GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, seed=0, **settings)
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 16])
    kind.seen = []  # type: ignore[attr-defined]
    return kind(
        model=model,
        processing_class=tokenizer,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        reward_funcs=digits,
        rollout_func=rollout or sampled,
        **own,
    )


class Compared(GRPOTrainer):
    """Computes both losses and gradients on each micro-batch, and trains with ours."""

    differences: list[dict[str, float]]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        theirs = PlainTrainer._compute_loss(self, model, inputs)
        loss = super()._compute_loss(model, inputs)
        self.differences.append(difference(loss, theirs, model))
        return loss


def difference(loss: Tensor, expected: Tensor, model: Any) -> dict[str, float]:
    """Of two losses, and of their gradients relative to the largest one."""
    found, wanted = gradient(loss, model), gradient(expected, model)
    scale = max(one.abs().max().item() for one in wanted)
    apart = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
    return {"loss": abs(loss.item() - expected.item()), "gradient": apart / max(scale, 1e-3), "scale": scale}


def trained(trainer: Any, loss_type: str = "") -> dict[str, float]:
    """Trains, and returns the largest differences and the number of micro-batches. loss_type: TRL's."""
    trainer.loss_type = loss_type or trainer.loss_type
    trainer.differences = []
    trainer.train()
    largest = {key: max(one[key] for one in trainer.differences) for key in ("loss", "gradient", "scale")}
    return largest | {"micro-batches": len(trainer.differences)}


def gradient(loss: Tensor, model: Any) -> list[Tensor]:
    return [one.clone() for one in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]


def parity(folder: Path) -> dict[str, Any]:
    """`grpo` against TRL's loss types of the same aggregation, with several updates a generation and iterations."""
    result = {}
    for loss_type, aggregation in (("dapo", "token-mean"), ("grpo", "seq-mean-token-mean")):
        for name, options in {
            "one update": {},
            "four micro-batches": {"gradient_accumulation_steps": 4},
            "two updates a generation": {"steps_per_generation": 4},
            "three iterations": {"num_iterations": 3},
        }.items():
            if loss_type == "dapo" and "steps_per_generation" in options:
                continue  # TRL divides by the mean over the updates of a generation, this by the update's own tokens.
            built = objective("grpo", aggregation=aggregation)
            trainer = build(Compared, folder, steps=6, own={"objective": built}, **options)
            result[f"{loss_type}, {name}"] = trained(trainer, loss_type)
    return result


class Exact(Compared):
    """The sampler's log-probs are those at the start of the update, for which TRL takes the policy then."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        old = inputs.get("old_per_token_logps")
        if old is None:
            old = self._score(model, inputs)[0].detach()
        return super()._compute_loss(model, inputs | {"sampling_per_token_logps": old})


def saved(folder: Path) -> Path:
    """The model as files: TRL loads the reference by the name of the model."""
    model, tokenizer = laboratory.build(0)
    model.save_pretrained(folder / "reference")
    tokenizer.save_pretrained(folder / "reference")
    return folder / "reference"


def kl(folder: Path) -> dict[str, dict[str, float]]:
    """`grpo` with a KL term against TRL's, with and without its correction."""
    path, result = saved(folder), {}
    for corrected, kind in ((False, "k3"), (True, "unbiased")):
        built = objective("grpo", aggregation="token-mean", kl=kind, kl_coef=0.1)
        for iterations in (1, 3):
            options = {"beta": 0.1, "use_bias_correction_kl": corrected, "num_iterations": iterations}
            trainer = build(Exact, folder, steps=6, own={"objective": built}, reference=path, **options)
            result[f"{kind}, {iterations}"] = trained(trainer, "dapo")
    return result


class Library(GRPOTrainer):
    """Compares the loss with the library's on the same tensors: one micro-batch is the update."""

    differences: list[dict[str, float]]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        current, _, _ = self._score(model, inputs)
        mask = inputs["completion_mask"].bool()
        logps = PolicyLogps(
            current=current,
            behavior=inputs["sampling_per_token_logps"],
            mask=mask,
            proximal=inputs.get("old_per_token_logps", current.detach()),
            turn=torch.zeros_like(mask, dtype=torch.long),
        )
        expected = self._objective(logps, inputs["advantages"][:, None]).loss
        loss = super()._compute_loss(model, inputs)
        self.differences.append(difference(loss, expected, model))
        return loss


def near(prompts: list[str], trainer: PlainTrainer) -> dict[str, list[list[Any]]]:
    """From responses that no mask rejects to responses that most do."""
    output = sampled(prompts, trainer, noise=0.0)
    noise = torch.Generator().manual_seed(0)
    for row, scale in zip(output["logprobs"], torch.logspace(-5, -1, len(prompts)).tolist(), strict=True):
        row[:] = [value + scale * torch.randn((), generator=noise).item() for value in row]
    return output


def presets(folder: Path) -> dict[str, dict[str, float]]:
    """Every preset that the hook carries, over two updates after a generation; in the second all policies differ."""
    result = {}
    for name in objectives():
        built = objective(name, **({"length_max": 8} if name in ("dr-grpo", "luffy") else {}))
        if HOOKS["trl"].refusal(built) is not None:
            continue
        scaled = {"scale_rewards": "none"} if built.advantage == "dr-grpo" else {}
        options = {"gradient_accumulation_steps": 1, "num_iterations": 2, "per_device_train_batch_size": 8}
        trainer = build(Library, folder, steps=2, own={"objective": built}, rollout=near, **options, **scaled)
        result[name] = trained(trainer)
    return result


def planted(folder: Path) -> dict[str, float]:
    """The largest difference when our clip bound is another one."""
    own = {"objective": objective("grpo", aggregation="token-mean", clip_low=0.1)}
    return trained(build(Compared, folder, steps=6, own=own, num_iterations=3))


def unscored(folder: Path) -> dict[str, Any]:
    """The first token of one response in four has no log-prob: `icepop` leaves it out, `grpo` trains it as TRL does."""

    def holes(prompts: list[str], trainer: PlainTrainer) -> dict[str, list[list[Any]]]:
        output = sampled(prompts, trainer)
        for row in output["logprobs"][::4]:
            row[0] = None
        return output

    trainer = build(GRPOTrainer, folder, steps=2, own={"objective": "icepop"}, rollout=holes)
    trainer.train()
    log = [row for row in trainer.state.log_history if "trimtab/unscored" in row]
    finite = all(bool(torch.isfinite(one).all()) for one in trainer.model.parameters())
    shares = {name: [row[f"trimtab/{name}"] for row in log] for name in ("unscored", "unscored_tokens")}
    built = objective("grpo", aggregation="seq-mean-token-mean")
    plain = trained(build(Compared, folder, steps=2, own={"objective": built}, rollout=holes), "grpo")
    return {**shares, "finite": finite, "grpo": plain}


def train(folder: Path) -> dict[str, Any]:
    """`icepop` trains: the reward rises, and the log has our metrics."""
    alarms: list[str] = []
    monitor = Monitor(folder / "monitor", on_alarm=lambda alarm: alarms.append(alarm.name))
    own = {"objective": objective("icepop"), "dump": folder / "logps", "monitor": monitor}
    trainer = build(GRPOTrainer, folder, steps=60, own=own, gradient_accumulation_steps=4)
    trainer.train()
    monitor.close()
    log = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "first": sum(row["reward"] for row in log[:5]) / 5,
        "last": sum(row["reward"] for row in log[-5:]) / 5,
        "metrics": sorted(key for key in log[-1] if key.startswith("trimtab/")),
        "log": log[-1],
        "files": sorted(path.name for path in (folder / "logps").iterdir()),
        "alarms": alarms,
        "observed": [json.loads(line)["mismatch/k3"] for line in (folder / "monitor" / "metrics.jsonl").open()],
    }


LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
TWO = {"steps_per_generation": 4, "num_iterations": 2, "epsilon_high": 0.28, "delta": 1.5}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in LOSS_TYPES},
    "three iterations": {"num_iterations": 3},
    "four generations": {"loss_type": "grpo", "steps_per_generation": 1, "gradient_accumulation_steps": 4},
    "options": {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "KL": {"beta": 0.1, "use_bias_correction_kl": True},
    "vLLM": {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
    "vLLM, two updates": {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask", **TWO},
    "vLLM, across updates": {"loss_type": "grpo", "steps_per_generation": 3},
    "vLLM, vespo": {"loss_type": "vespo", "num_iterations": 2},
    "vLLM, no correction": {"vllm_importance_sampling_correction": False},
}
"""Settings of TRL's own loss; with a name that begins with vLLM, TRL corrects for a sampler."""
ALONE = ("dapo", "three iterations", "vLLM, across updates")


def behind_vllm(trainer: PlainTrainer) -> PlainTrainer:
    """As if the rollout function used TRL's vLLM, to which weights would be sent."""
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


def own(folder: Path) -> dict[str, dict[str, Any]]:
    """TRL's trainer, ours with `dump` and `monitor`, and for `ALONE` ours without anything: none has an objective."""
    reference = saved(folder)
    return {
        name: compared(folder / name, reference, name.startswith("vLLM"), settings) for name, settings in OWN.items()
    }


def compared(folder: Path, reference: Path, vllm: bool, settings: dict[str, Any]) -> dict[str, Any]:
    watched = {"dump": folder / "logps", "monitor": Monitor(folder / "monitor", on_alarm=lambda _: None)}
    runs = []
    kinds: list[tuple[Any, dict[str, Any]]] = [(PlainTrainer, {}), (GRPOTrainer, watched)]
    for kind, own in kinds + [(GRPOTrainer, {})] * (folder.name in ALONE):
        options = {"steps": 4, "reference": reference, "eval_strategy": "steps", "eval_steps": 2}
        trainer = build(kind, folder, own=own, **options, **settings)
        trainer = behind_vllm(trainer) if vllm else trainer
        trainer.train()
        weights = [value.detach().clone() for value in trainer.model.parameters()]
        runs.append((without_times(trainer), weights, torch.get_rng_state()))
    (log, weights, random), (ours, *_), *alone = runs
    rows = [json.loads(line) for path in sorted((folder / "logps").iterdir()) for line in path.open()]
    start = laboratory.build(0)[0].parameters()
    return {
        "log": [{key: row[key] for key in plain} for plain, row in zip(log, ours, strict=True)] == log
        and all(log == other for other, *_ in alone),
        "weights": all(torch.equal(a, b) for run in runs for a, b in zip(weights, run[1], strict=True)),
        "random": all(torch.equal(random, run[2]) for run in runs),
        "norms": [row["grad_norm"] for row in log if "loss" in row],
        "moved": max((a - b).abs().max().item() for a, b in zip(weights, start, strict=True)),
        "added": sorted({key for plain, row in zip(log, ours, strict=True) for key in row.keys() - plain}),
        "versions": sorted({(row["step"], row.get("policy_version"), row.get("proximal_version")) for row in rows}),
        "rows": len(rows),
        "gap": max(map(gap, rows)),
        "observed": [json.loads(line) for line in (folder / "monitor" / "metrics.jsonl").open()],
        "sampled": sum(1 for _ in (folder / "monitor" / "sample.jsonl").open()),
        "sample": (folder / "monitor" / "sample.jsonl").exists(),
    }


def without_times(trainer: PlainTrainer) -> list[dict[str, Any]]:
    """What the trainer logged, without what its clock says."""
    timed = ("time", "per_second")
    return [
        {key: value for key, value in row.items() if not any(word in key for word in timed)}
        for row in trainer.state.log_history
    ]


def gap(row: dict[str, Any]) -> float:
    """The largest distance of the current policy and that of the generation, where TRL computed both."""
    old = row.get("logp_proximal") or row["logp_current"]
    return max((abs(a - b) for a, b in zip(row["logp_current"], old, strict=True)), default=0.0)


def state(folder: Path) -> list[str]:
    """TRL's own trainer, without vLLM, and the trainer_state.json of its run with an evaluation."""
    trainer = build(PlainTrainer, folder, steps=12, own={})
    trainer.train()
    trainer.evaluate(trainer.train_dataset.select(range(8)))
    trainer.save_state()
    return sorted({name for row in trainer.state.log_history for name in row})


def monitored(folder: Path) -> dict[str, Any]:
    """Weights and log after three updates with and without `monitor=True`."""
    runs = []
    for monitor in (True, False):
        trainer = build(GRPOTrainer, folder, steps=3, own={"objective": "icepop", "monitor": monitor})
        trainer.train()
        runs.append((trainer.model.parameters(), [row for row in trainer.state.log_history if "reward" in row]))
    (ours, seen), (plain, log) = runs
    return {
        "same": all(map(torch.equal, ours, plain)),
        "loss": [[row["loss"], row["grad_norm"]] for row in seen] == [[row["loss"], row["grad_norm"]] for row in log],
        "k3": [row["trimtab/mismatch/k3"] for row in seen],
        "added": sorted(seen[0].keys() - log[0].keys()),
    }


def lost(folder: Path) -> dict[str, Any]:
    """A sampler that keeps the weights of the start, while TRL sends its own before every generation; dumped, too."""
    first, alarms = laboratory.build(0)[0], []

    def stale(prompts: list[str], trainer: PlainTrainer) -> dict[str, list[list[Any]]]:
        trained, trainer.model = trainer.model, first
        try:
            return sampled(prompts, trainer, noise=0.0)
        finally:
            trainer.model = trained

    monitor = Monitor(folder / "monitor", on_alarm=lambda alarm: alarms.append((alarm.name, alarm.status)))
    own = {"monitor": monitor, "dump": folder / "logps"}
    options = {"steps": 24, "gradient_accumulation_steps": 8}
    trainer = behind_vllm(build(GRPOTrainer, folder, own=own, rollout=stale, **options))
    trainer.train()
    return {"alarms": alarms, "next": monitor.close().next_step}


def unguarded(folder: Path) -> dict[str, Any]:
    """TRL's trainer and ours with a guard that sees no sign, for 10 steps with copies every 4, two generations."""
    runs = []
    for kind, own in ((PlainTrainer, {}), (GRPOTrainer, {"guard": Guard(every=2)})):
        trainer = build(kind, folder, steps=10, own=own, num_iterations=2)
        trainer.train()
        runs.append((without_times(trainer), trainer.model.parameters(), torch.get_rng_state()))
    (log, weights, random), (ours, other, after) = runs
    return {
        "log": [{key: row[key] for key in plain} for plain, row in zip(log, ours, strict=True)] == log,
        "weights": all(map(torch.equal, weights, other)),
        "random": torch.equal(random, after),
        "snapshots": [one.step for one in trainer._at_sign._snapshots],
        "added": sorted({key for plain, row in zip(log, ours, strict=True) for key in row.keys() - plain}),
    }


class Faulty(GRPOTrainer):
    """Trains with infinite losses in some steps, and notes weights and state of the optimizer at others."""

    infinite: tuple[int, ...] = ()
    noted: dict[str, list[Tensor]]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.note(f"before {self.state.global_step}")
        return super().training_step(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        return loss * torch.inf if self.state.global_step in self.infinite else loss

    def drop_responses(self) -> None:
        super().drop_responses()
        self.note(f"returned {self.state.global_step}")

    def note(self, name: str) -> None:
        moments = [one for state in self.optimizer.state.values() for one in state.values()]
        self.noted.setdefault(name, [one.detach().clone() for one in (*self.model.parameters(), *moments)])


def noisy(prompts: list[str], trainer: PlainTrainer) -> dict[str, list[list[Any]]]:
    """For five steps the sampler's log-probs are far from the trainer's."""
    return sampled(prompts, trainer, noise=3.0 if 22 <= trainer.state.global_step < 27 else 0.3)


def falling(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """A reward that falls to a tenth after 30 steps."""
    return [one * (0.1 if 30 <= trainer_state.global_step < 50 else 1.0) for one in digits(completions)]


def faulted(folder: Path, steps: int, guard: Guard | bool, infinite: tuple[int, ...] = (), **options: Any) -> Any:
    """A trained `Faulty`, and what the guard and the log say of it."""
    own = {"guard": guard}
    trainer = build(Faulty, folder, steps=steps, own=own, rollout=noisy, **options)
    trainer.reward_funcs = [falling]
    trainer.infinite, trainer.noted = infinite, {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in warned if one.category is TrimtabWarning]
    return trainer, {
        "said": [text for text in said if "returned" in text or "stops" in text or "watched" in text],
        "steps": trainer.state.global_step,
        "rates": [row["learning_rate"] for row in trainer.state.log_history if "loss" in row],
        "marks": [
            [row["step"], row["trimtab/guard/returns"], row["trimtab/guard/continues_from"]]
            for row in trainer.state.log_history
            if "trimtab/guard/returns" in row
        ],
        "finite": all(bool(torch.isfinite(one).all()) for one in trainer.model.parameters()),
    }


def faults(folder: Path) -> dict[str, Any]:
    """Low ESS, losses that are infinite once and again and again, and no return allowed."""
    found = {}
    plain = {"lr_scheduler_type": "constant"}
    trainer, found["ess"] = faulted(folder, 34, Guard(on=("ess",), every=4), **plain)
    found["ess"]["same"] = all(map(torch.equal, trainer.noted["returned 26"], trainer.noted["before 4"]))
    found["ess"]["kept"] = [one.step for one in trainer._at_sign._snapshots]
    trainer, found["infinite"] = faulted(folder, 12, True, (6, 9), lr_scheduler_type="linear", num_iterations=2)
    found["infinite"]["same"] = all(map(torch.equal, trainer.noted["returned 7"], trainer.noted["before 0"]))
    _, found["reward"] = faulted(folder, 54, Guard(on=("reward",)), learning_rate=1e-5, **plain)
    _, found["never"] = faulted(folder, 12, Guard(times=0, every=4), (6,), **plain)
    _, found["often"] = faulted(folder, 30, Guard(times=2, every=2), tuple(range(5, 30)), **plain)
    _, found["not watched"] = faulted(folder, 4, Guard(on=("reward",)), (3,), **plain, logging_steps=10)
    return found


def ranks(folder: Path) -> dict[str, Any]:
    """Several processes: one loss of one of them is infinite."""
    rank = int(os.environ["RANK"])
    trainer = build(Faulty, folder, steps=12, own={"guard": True})
    trainer.infinite, trainer.noted = ((6,) if rank == 1 else ()), {}
    trainer.args.save_strategy, trainer.args.save_steps = SaveStrategy.STEPS, 3
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in warned if "training stops" in str(one.message)]
    return {"steps": trainer.state.global_step, "said": said}


def without_log_probs(prompts: list[str], trainer: PlainTrainer) -> dict[str, list[list[Any]]]:
    return sampled(prompts, trainer) | {"logprobs": None}


def refusals(folder: Path) -> list[str]:
    return list(_refused(folder))


def _refused(folder: Path) -> Iterator[str]:
    reference = saved(folder)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"objective": "oapl"}, {}),
        ({"objective": "score-centering"}, {}),
        ({"objective": "icepop"}, {"loss_type": "sapo"}),
        ({"objective": "icepop"}, {"steps_per_generation": 1}),
        ({"objective": objective("grpo", kl_coef=0.1)}, {}),
        ({"objective": objective("grpo", kl_coef=0.1)}, {"beta": 0.1, "use_bias_correction_kl": True}),
        ({"objective": objective("grpo", kl_coef=0.1, kl="unbiased")}, {"beta": 0.1, "use_bias_correction_kl": False}),
        ({"objective": objective("dr-grpo", length_max=8)}, {}),
    ]
    for own, options in cases:
        yield refusal(build, GRPOTrainer, folder, steps=1, own=own, reference=reference, **options)
    # Without a sampler that reports log-probs: said before a model is loaded, as this one cannot be.
    plain = GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none")
    for own in ({"objective": "icepop"}, {"objective": "grpo", "dump": folder / "logps"}):
        yield refusal(GRPOTrainer, "no/such-model", digits, plain, **own)
    # A rollout function may return none: nothing is written that `diagnose` could not read.
    own = {"objective": "grpo", "dump": folder / "logps"}
    trainer = build(GRPOTrainer, folder, steps=1, own=own, rollout=without_log_probs)
    yield f"{refusal(trainer.train)} ({(folder / 'logps').exists()})"
    sys.modules["unsloth"] = ModuleType("unsloth")
    yield refusal(build, GRPOTrainer, folder, steps=1, own={"objective": "grpo"})


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except TrimtabError as error:
        return str(error)
    return "accepted"


def options(_: Path) -> dict[str, list[str]]:
    """What TRL's own losses read of its configuration classes, against the table of the adapter.

    unlisted: fields that a loss reads, whether stored by the constructor or not, and no table has. defaults: those
    whose default is another than in the table.
    """
    asynchronous = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    classes = ((PlainTrainer, GRPOConfig), (asynchronous.AsyncGRPOTrainer, asynchronous.AsyncGRPOConfig))
    read: set[str] = set()
    for trainer, config in classes:
        known = {item.name for item in dataclasses.fields(config)} - {
            item.name for item in dataclasses.fields(TrainingArguments)
        }
        methods = [trainer._compute_loss] if trainer is PlainTrainer else [trainer.compute_loss]
        stored: dict[str, set[str]] = {}
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(trainer.__init__)))):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                fields = re.findall(r"\bargs\.(\w+)", ast.unparse(node.value))
                stored.setdefault(node.targets[0].attr, set()).update(fields)
        for method in methods:
            for name in re.findall(r"self\.(?:args\.)?(\w+)", inspect.getsource(method)):
                read |= ({name} | stored.get(name, set())) & known
        # The weights of the sampler's correction come with the batch.
        read |= {name for name in known if name.startswith("vllm_importance_sampling")}
    defaults = {item.name: item.default for item in dataclasses.fields(GRPOConfig)}
    return {
        "read": sorted(read),
        "unlisted": sorted(read - SETTINGS["TRL"].keys() - HARMLESS),
        "unread": sorted((SETTINGS["TRL"].keys() | HARMLESS) - read),
        "defaults": sorted(name for name, one in SETTINGS["TRL"].items() if defaults[name] != one.default),
    }


if __name__ == "__main__":
    assert "trimtab.adapters.trl_async" not in sys.modules  # Nor what it imports, which may be missing.
    functions = (parity, kl, presets, planted, own, lost, train, state, monitored, unscored, refusals, options)
    functions += (unguarded, faults, ranks)
    print(json.dumps({one.__name__: one for one in functions}[sys.argv[1]](Path(sys.argv[2]))))
