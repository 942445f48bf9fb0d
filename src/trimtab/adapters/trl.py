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
from trimtab.adapters.micro_batch import dropped_shares, missing_logps, turns_of, usable_tokens
from trimtab.adapters.trl_guard import Guard as Guard
from trimtab.adapters.trl_shared import TrainsObjective, Update, check_settings
from trimtab.errors import TrimtabError
from trimtab.objectives import Metrics, Objective, PolicyLogps, State

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
    window, on all processes. Tokens for which the sampler reported no log-prob are not trained. Their responses are not
    trained either, unless the trainer is certain of the token (`usable_tokens`). `trimtab/unscored` is the share of
    responses left out, `trimtab/unscored_tokens` of tokens. Raises `TrimtabError`, before a model is loaded, for
    settings of TRL that would have no effect, and if TRL lacks what the objective or the dump needs.
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
        current, entropy, auxiliary = self._score(model, inputs)
        logps, advantage = self._logps(inputs, current, entropy), _advantage(inputs)
        update = self._begun(model) if self.model.training else None
        output = self._objective(logps, advantage, state=None if update is None else update.state)
        # Each loss is a share of the whole update; TRL averages gradients over processes, so this undoes the division.
        loss = output.loss * (1 if update is None else self.accelerator.num_processes)
        if auxiliary is not None:
            steps = 1 if update is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * auxiliary / steps
        metrics = output.metrics + dropped_shares(_mask(inputs), logps.mask)
        if update is None:
            self._log("eval", metrics.finalize())
        else:
            self._add(update, inputs, logps, metrics)
        return loss

    def _own_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Returns TRL's own loss, and records the log-probs that it computed."""
        loss = super()._compute_loss(model, inputs)
        if self._records and self.model.training:
            self._add(self._begun(model), inputs, self._logps(inputs, self._scored), None)
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

    def _logps(self, inputs: dict[str, Any], current: Tensor | None, entropy: Tensor | None = None) -> PolicyLogps:
        behavior, proximal = inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps")
        self._check_sampler(behavior)
        if proximal is None and current is not None:
            proximal = current.detach()  # TRL omits it if this is the first update after the generation.
        mask = _mask(inputs)
        return PolicyLogps(
            current=current,
            behavior=behavior,
            mask=mask if behavior is None or proximal is None else usable_tokens(mask, behavior, proximal),
            proximal=proximal,
            reference=inputs.get("ref_per_token_logps"),
            entropy=entropy,
            turn=turns_of(mask),
        )

    def _check_sampler(self, behavior: Tensor | None) -> None:
        """Raises `TrimtabError` if the sampler's log-probs are needed and TRL does not have them."""
        readers = {"dump": self._dump, "monitor": self._monitor}
        used = [name for name, reader in readers.items() if reader is not None]
        if self._objective is not None and "behavior" in self._objective.needs:
            used.insert(0, self._objective.name)
        if behavior is not None or not used:
            return
        raise hook("trl").absent(used[0], "behavior")

    def _begun(self, model: Any) -> Update:
        """Returns the update of this micro-batch, which is created at the first micro-batch of the update."""
        if self._update is None or self._update.step != self.state.global_step:
            state = None if self._objective is None else self._whole_update(model, self._objective)
            self._update = Update(self.state.global_step, state)
        return self._update

    @torch.no_grad()
    def _whole_update(self, model: Any, objective: Objective) -> State:
        """Returns the statistics of the update that begins, over all its micro-batches and all processes."""
        buffered, size = self._buffered_inputs, self.args.steps_per_generation
        steps = range(self._step, self._step + self.current_gradient_accumulation_steps)
        parts = []
        for inputs in (buffered[step % size] for step in steps):
            # If a log-prob is missing, `usable_tokens` needs the trainer's log-probs.
            behavior = inputs.get("sampling_per_token_logps")
            holes = behavior is not None and bool(missing_logps(_mask(inputs), behavior).any())
            current = self._score(model, inputs)[0] if holes or objective.prepare_needs else None
            parts.append(objective.prepare(self._logps(inputs, current), _advantage(inputs)))
        return self._summed(parts)

    def _add(self, update: Update, inputs: dict[str, Any], logps: PolicyLogps, metrics: Metrics | None) -> None:
        """Adds a micro-batch to its update; records it once, if the weights are still those that sampled it."""
        size = self.args.steps_per_generation
        first = update.step == self._sampled and self._step % (size * self.num_iterations) < size
        if first and self._records:
            self._record(
                update,
                logps,
                mask=_mask(inputs),
                advantage=_advantage(inputs),
                response_ids=inputs["completion_ids"],
                length=inputs["completion_mask"].sum(1),
                prompts=lambda: _prompt_ids(inputs),
                # Without vLLM, a rollout function has its own sampler, whose weights are not known here.
                version=self._sampled if self.use_vllm else None,
                scored=inputs.get("old_per_token_logps"),
            )
        self._collect(update, metrics, last=self.accelerator.sync_gradients)


def _mask(inputs: dict[str, Any]) -> Tensor:
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def _advantage(inputs: dict[str, Any]) -> Tensor:
    advantage = inputs["advantages"]
    return advantage[:, None] if advantage.ndim == 1 else advantage


def _prompt_ids(inputs: dict[str, Any]) -> list[list[int]]:
    prompts = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in prompts]
