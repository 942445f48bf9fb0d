"""Shared by the adapters of TRL's two trainers: a mixin with objective, dump, monitor and guard; refused settings."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trimtab.adapters.hooks import build, refuse_standard_deviation
from trimtab.adapters.loss_settings import SETTINGS, chosen, refuse
from trimtab.adapters.micro_batch import missing_logps, prefixed_metrics, turns_of, usable_tokens
from trimtab.adapters.recording import Dump, open_monitor, response_rows
from trimtab.adapters.trl_guard import Guard, ReturnAtSign
from trimtab.errors import TrimtabError
from trimtab.monitor import Monitor
from trimtab.objectives import Metrics, Objective, PolicyLogps, State


@dataclass
class Update:
    """The state of one update, and what its micro-batches have added so far."""

    step: int
    state: State | None = None  # of the objective; None if the loss is TRL's own
    metrics: Metrics | None = None  # of the objective; None if the loss is TRL's own
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the dump
    observed: dict[str, float] = field(default_factory=dict)  # metrics of the monitor


class TrainsObjective:
    """Mixin put before a TRL trainer class: adds `objective`, `dump`, `monitor` and `guard`.

    `trimtab.adapters.trl.GRPOTrainer` describes these four parameters; the others are TRL's.
    """

    _hook: ClassVar[str]  # a key of `hooks.HOOKS`
    accelerator: Any
    add_callback: Any
    _metrics: Any
    _at_sign: ReturnAtSign | None = None
    _update: Update | None = None

    def __init__(
        self,
        *args: Any,
        objective: str | Objective | None = None,
        dump: str | Path | None = None,
        monitor: Monitor | str | Path | bool | None = None,
        guard: Guard | bool = False,
        **kwargs: Any,
    ) -> None:
        """Raises `TrimtabError` if the loss would never be called, and for objectives that the hook cannot carry."""
        self._objective = None if objective is None else build(self._hook, objective, {})
        self._dump = None if dump is None else Dump(dump)
        if not isinstance(guard, Guard | bool):
            raise TrimtabError(f"guard={guard!r}: give True, or a Guard of trimtab.adapters.trl")
        self._guard = Guard() if guard is True else guard or None
        self._monitor = open_monitor(monitor or True, merge_ranks=True) if monitor or self._guard else None
        if self._used and "unsloth" in sys.modules:
            raise TrimtabError(
                "Unsloth replaces compute_loss, so that this loss would never be called: do not import it"
            )
        if self._used:
            self._check_arguments(inspect.signature(super().__init__).bind(*args, **kwargs).arguments)
        super().__init__(*args, **kwargs)  # type: ignore[misc]  # of TRL's trainer, the next base
        if self._guard is not None and self._monitor is not None:
            self._at_sign = ReturnAtSign(self, self._guard, self._monitor)
            self.add_callback(self._at_sign)

    def _check_arguments(self, given: Mapping[str, Any]) -> None:
        """Raises `TrimtabError` for another version of TRL, and for arguments that the objective or a dump excludes."""
        raise NotImplementedError

    @property
    def _records(self) -> bool:
        """Whether log-probs are written or shown to a monitor."""
        return self._dump is not None or self._monitor is not None

    @property
    def _used(self) -> bool:
        """Whether anything differs from TRL's trainer."""
        return self._objective is not None or self._records

    @property
    def _reads_sampler(self) -> bool:
        """Whether the objective reads the sampler's log-probs. Only then, tokens without one are left out of it."""
        return self._objective is not None and "behavior" in self._objective.needs

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)  # type: ignore[misc]  # of TRL's trainer, the next base
        if self._monitor is not None:
            self._monitor.close()  # on all processes
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]  # of TRL's trainer, the next base
        if self._at_sign is not None:
            self._at_sign.see_loss(loss)
        return loss

    def _logps(self, batch: Any, current: Tensor | None, entropy: Tensor | None = None) -> PolicyLogps:
        """Returns the log-probs of a micro-batch. batch: `PaddedResponses` or `PackedResponses`."""
        mask, behavior, age = batch.mask, batch.behavior, self._age(batch)
        proximal = current.detach() if batch.proximal is None and current is not None else batch.proximal
        return PolicyLogps(
            current=current,
            behavior=behavior,
            mask=usable_tokens(mask, behavior, proximal) if self._reads_sampler and proximal is not None else mask,
            proximal=proximal,
            reference=batch.reference,
            entropy=entropy,
            turn=turns_of(mask),
            age=None if age is None else (age + 1)[:, None].expand(mask.shape),
        )

    def _age(self, batch: Any) -> Tensor | None:  # noqa: ARG002
        """Returns (batch,) by how many updates the sampler's weights are older than the trainer's; None if unknown."""
        return None

    @torch.no_grad()
    def _prepared(self, batches: Sequence[Any], score: Callable[[int], Tensor]) -> State | None:
        """Returns the statistics of the update that begins, over all its micro-batches and all processes.

        score: returns the current log-probs of the micro-batch with an index, by an additional forward pass, for which
        all processes are needed. Without an objective, returns None.
        """
        if self._objective is None:
            return None
        holes = self._reads_sampler and any(missing_logps(batch.mask, batch.behavior).any() for batch in batches)
        known = torch.tensor(int(holes), device=self.accelerator.device)
        # If a log-prob is missing, `usable_tokens` needs the trainer's log-probs.
        scored = bool(self.accelerator.reduce(known, reduction="sum")) or bool(self._objective.prepare_needs)
        parts = []
        for index, batch in enumerate(batches):
            logps = self._logps(batch, score(index) if scored else None)
            parts.append(self._objective.prepare(logps, batch.advantage))
        return self._summed(parts)

    def _summed(self, parts: Sequence[State]) -> State:
        """Returns the state of an update: the sum of the states of its micro-batches, over all processes."""
        state = sum(parts[1:], parts[0])
        return state.all_reduce() if self.accelerator.num_processes > 1 else state

    def _record(self, update: Update, batch: Any, logps: PolicyLogps, *, version: int | Tensor | None) -> None:
        """Adds the responses of a micro-batch to the rows of the dump, and shows them to the monitor.

        All trained tokens are recorded, including those without a sampler log-prob. version: of the weights that
        sampled, one number or (batch,); None if unknown.
        """
        assert logps.current is not None
        assert logps.proximal is not None
        each = batch.advantage[:, 0] if batch.advantage.shape[1] == 1 else None
        if self._dump is not None:
            tokens = {
                "response_ids": batch.response_ids,
                "logp_behavior": batch.behavior,
                "logp_proximal": batch.proximal,
                "logp_current": logps.current.detach().float(),
                "loss_mask": batch.mask,
            }
            responses = {
                "advantage": each,
                "prompt_id": [" ".join(map(str, ids)) for ids in batch.prompt_ids],
                "policy_version": [version] * len(batch.mask) if isinstance(version, int) else version,
                "proximal_version": None if version is None else [update.step] * len(batch.mask),
            }
            update.rows += response_rows(batch.length, tokens, responses)
        if self._monitor is not None:
            update.observed = self._monitor.observe(
                logp_train=logps.proximal.detach(),
                logp_rollout=batch.behavior,
                mask=batch.mask,
                step=update.step,
                version=version,
                advantage=each,
                response_ids=batch.response_ids,
            )

    def _collect(self, update: Update, metrics: Metrics | None, *, last: bool) -> None:
        """Adds a micro-batch's metrics, None without an objective; after the last one, logs and writes the update."""
        if metrics is not None:
            update.metrics = metrics if update.metrics is None else update.metrics + metrics
        if not last:
            return
        self._log("train", ({} if update.metrics is None else update.metrics.finalize()) | update.observed)
        if self._dump is not None and update.rows:
            self._dump.write(update.step + 1, update.rows, rank=self.accelerator.process_index)

    def _log(self, mode: str, values: dict[str, float]) -> None:
        """Puts the means over processes into TRL's log. All processes have the same keys; some values may be NaN."""
        if not values:
            return
        here = torch.tensor(list(values.values()), device=self.accelerator.device)
        means = self.accelerator.gather(here).view(-1, len(values)).nanmean(0).tolist()
        for key, value in prefixed_metrics(dict(zip(values, means, strict=True))).items():
            self._metrics[mode][key].append(value)


def check_ignored(args: Any, config_class: type) -> None:
    """Raises `TrimtabError` for options that only TRL's own loss reads, with what replaces them.

    args: the configuration of a run. config_class: its class, which has the defaults.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(config_class)}
    settings = {name: one._replace(default=defaults[name]) for name, one in SETTINGS["TRL"].items() if name in defaults}
    refuse("TRL", settings, chosen(settings, args))


def check_settings(objective: Objective, args: Any, config_class: type) -> None:
    """Raises `TrimtabError` for settings of TRL that would have no effect, or that contradict the objective.

    args: the `GRPOConfig` of a run. config_class: that class, which has the defaults.
    """
    check_ignored(args, config_class)
    steps, window = args.steps_per_generation, args.gradient_accumulation_steps
    if steps % window:
        raise TrimtabError(
            f"steps_per_generation = {steps} is not a multiple of gradient_accumulation_steps = {window}: an update "
            "would span two generations and its denominators are not known at its start: make it a multiple"
        )
    if args.use_vllm and not args.vllm_importance_sampling_correction:
        raise TrimtabError("set vllm_importance_sampling_correction=True: with it TRL computes old_per_token_logps")
    if (objective.kl.coef > 0) != (args.beta != 0):
        value = "0.1 (only that it is not 0 counts)" if objective.kl.coef > 0 else "0"
        raise TrimtabError(f"kl_coef of the objective is {objective.kl.coef:g}: set beta={value} in GRPOConfig")
    unbiased = objective.kl.kind == "unbiased"
    if objective.kl.coef > 0 and unbiased != args.use_bias_correction_kl:
        other = "k3" if unbiased else "unbiased"
        raise TrimtabError(
            f'kl of the objective is "{objective.kl.kind}": set use_bias_correction_kl={unbiased} in GRPOConfig '
            f'(TRL\'s default is True), or kl="{other}" in the objective'
        )
    refuse_standard_deviation(objective, args.scale_rewards not in ("none", False), 'set scale_rewards="none"')
