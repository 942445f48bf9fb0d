"""A `GRPOTrainer` for TRL that records log-probs and can train any Trimtab objective. Checked against TRL 1.16.

    from trimtab.adapters.trl import GRPOTrainer
    trainer = GRPOTrainer(model, reward_funcs, args=config, train_dataset=data, dump="logps")  # TRL's own loss
    trainer = GRPOTrainer(model, reward_funcs, args=config, train_dataset=data, objective="icepop", dump="logps")

Generation, rewards, advantages and everything else remain TRL's. `AsyncGRPOTrainer` does the same with the trainer of
that name in `trl.experimental`, and is imported on first use (trl_async.py).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.adapters.hooks import hook
from trimtab.adapters.micro_batch import dropped_shares
from trimtab.adapters.trl_guard import Guard as Guard
from trimtab.adapters.trl_shared import TrainsObjective, Update, check_settings
from trimtab.errors import TrimtabError
from trimtab.objectives import Metrics, PolicyLogps

if TYPE_CHECKING:
    from trimtab.adapters.trl_async import AsyncGRPOTrainer as AsyncGRPOTrainer

# Not an import statement: type checkers would take `trl` for this file.
_TRL: Any = importlib.import_module("trl")
PlainTrainer: Any = _TRL.GRPOTrainer

FORWARD = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""Inputs of vision models, which are passed to the forward pass unchanged."""


def __getattr__(name: str) -> Any:
    if name == "AsyncGRPOTrainer":
        return importlib.import_module("trimtab.adapters.trl_async").AsyncGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class GRPOTrainer(TrainsObjective, PlainTrainer):
    """A `trl.GRPOTrainer` that records log-probs and can train a Trimtab objective.

    objective: a preset, or an `Objective` for other numbers and parts. Without it, the loss stays TRL's own, bit for
    bit, with every option of TRL. dump: a folder for the log-probs of the first update after each generation, which
    `trimtab diagnose` reads. monitor: a `trimtab.Monitor`, a folder for one, or True for one without files. It sees the
    same batches as `dump`, is closed when training ends, and its metrics go to TRL's log. guard: True, or a `Guard` for
    other numbers. At the first sign of a collapse, it restores earlier weights (trl_guard.py); without `monitor`, it
    uses a monitor without files. Other parameters are TRL's.

    With an objective, denominators and other statistics cover the whole update: all micro-batches of an accumulation
    window, on all processes. If it reads the sampler's log-probs, tokens without one are not trained. Their responses
    are not trained either, unless the trainer is certain of the token (`usable_tokens`). `trimtab/unscored` is the
    share of responses left out, `trimtab/unscored_tokens` of tokens. Raises `TrimtabError`, before a model is loaded,
    for settings of TRL that would have no effect, and if TRL lacks what the objective or the dump needs.
    """

    _hook = "trl"
    _buffered_inputs: Any
    _scored: Tensor | None = None
    _sampled = 0

    def _check_arguments(self, given: Mapping[str, Any]) -> None:
        known = inspect.signature(PlainTrainer._get_per_token_logps_and_entropies).parameters
        if not {"logits_to_keep", "compute_entropy", "compute_aux_loss"} <= known.keys():
            raise TrimtabError("this version of TRL scores tokens by another method: use TRL 1.16")
        settings = given.get("args") or _TRL.GRPOConfig()
        if self._objective is not None:
            check_settings(self._objective, settings, _TRL.GRPOConfig)
        if not settings.use_vllm and given.get("rollout_func") is None:
            self._check_sampler(None)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Stores the number of updates before this generation; TRL sends its weights to vLLM before each generation."""
        if self.model.training:
            self._sampled = self.state.global_step
        return super()._generate_and_score_completions(inputs)

    def drop_responses(self) -> None:
        """Makes TRL generate again for the next micro-batch: discarded weights generated the buffered responses."""
        self._buffered_inputs = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._scored = result[0].detach() if self._records else None
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self._objective is None:
            return self._own_loss(model, inputs)
        batch = self._read(inputs)
        current, entropy, auxiliary = self._score(model, inputs)
        logps = self._logps(batch, current, entropy)
        update = self._begun(model) if self.model.training else None
        output = self._objective(logps, batch.advantage, state=None if update is None else update.state)
        # Each loss is a share of the whole update; TRL averages gradients over processes, so this undoes the division.
        loss = output.loss * (1 if update is None else self.accelerator.num_processes)
        if auxiliary is not None:
            steps = 1 if update is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * auxiliary / steps
        metrics = output.metrics + dropped_shares(batch.mask, logps.mask)
        if update is None:
            self._log("eval", metrics.finalize())
        else:
            self._add(update, batch, logps, metrics)
        return loss

    def _own_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Returns TRL's own loss, and records the log-probs that it computed."""
        loss = super()._compute_loss(model, inputs)
        if self._records and self.model.training:
            batch = self._read(inputs)
            self._add(self._begun(model), batch, self._logps(batch, self._scored), None)
        self._scored = None
        return loss

    def _score(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return self._get_per_token_logps_and_entropies(
            model,
            ids,
            attention,
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in FORWARD if inputs.get(name) is not None},
        )

    def _read(self, inputs: Mapping[str, Any]) -> PaddedResponses:
        batch = PaddedResponses(inputs)
        self._check_sampler(batch.behavior)
        return batch

    def _check_sampler(self, behavior: Tensor | None) -> None:
        """Raises `TrimtabError` if the sampler's log-probs are needed and TRL does not have them."""
        used = [self._objective.name] if self._objective is not None and self._reads_sampler else []
        used += [name for name, reader in (("dump", self._dump), ("monitor", self._monitor)) if reader is not None]
        if behavior is None and used:
            raise hook("trl").absent(used[0], "behavior")

    def _begun(self, model: Any) -> Update:
        """Returns the update of this micro-batch, which is created at the first micro-batch of the update."""
        if self._update is None or self._update.step != self.state.global_step:
            steps = range(self._step, self._step + self.current_gradient_accumulation_steps)
            window = [self._buffered_inputs[step % self.args.steps_per_generation] for step in steps]
            batches = list(map(self._read, window))
            state = self._prepared(batches, lambda index: self._score(model, window[index])[0])
            self._update = Update(self.state.global_step, state)
        return self._update

    def _add(self, update: Update, batch: PaddedResponses, logps: PolicyLogps, metrics: Metrics | None) -> None:
        """Adds a micro-batch to its update; records it once, if the weights are still those that sampled it."""
        size = self.args.steps_per_generation
        first = update.step == self._sampled and self._step % (size * self.num_iterations) < size
        if first and self._records:
            # Without vLLM, a rollout function has its own sampler, whose weights are not known here.
            self._record(update, batch, logps, version=self._sampled if self.use_vllm else None)
        self._collect(update, metrics, last=self.accelerator.sync_gradients)


class PaddedResponses:
    """The responses of a micro-batch of `GRPOTrainer`; attributes as in `PackedResponses`."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        mask, advantage = inputs["completion_mask"], inputs["advantages"]
        self.mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
        self.length = mask.sum(1)
        self.advantage = advantage[:, None] if advantage.ndim == 1 else advantage
        self.response_ids = inputs["completion_ids"]
        self.behavior = inputs.get("sampling_per_token_logps")
        self.proximal = inputs.get("old_per_token_logps")  # None if this is the first update after the generation
        self.reference = inputs.get("ref_per_token_logps")
        self._prompts = inputs["prompt_ids"], inputs["prompt_mask"]

    @property
    def prompt_ids(self) -> list[list[int]]:
        return [ids[mask.bool()].tolist() for ids, mask in zip(*self._prompts, strict=True)]
