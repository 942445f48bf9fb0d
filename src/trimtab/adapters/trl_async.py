"""An `AsyncGRPOTrainer` for TRL that records log-probs and can train any Trimtab objective. Checked against TRL 1.16.

    from trimtab.adapters.trl import AsyncGRPOTrainer
    trainer = AsyncGRPOTrainer(model, reward_funcs, args=config, train_dataset=data, objective="icepop", dump="logps")

Rollouts, rewards, advantages, packing, the forward pass and everything else remain TRL's.
"""

from __future__ import annotations

import contextlib
import queue
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab.adapters.hooks import peer_module, refuse_standard_deviation
from trimtab.adapters.micro_batch import dropped_shares
from trimtab.adapters.trl_packed import VERSIONS, PackedResponses
from trimtab.adapters.trl_shared import TrainsObjective, Update, check_ignored
from trimtab.errors import TrimtabError
from trimtab.objectives import Metrics, PolicyLogps, State

_TRL: Any = peer_module("TRL", "trl.experimental.async_grpo.async_grpo_trainer")
PlainTrainer: Any = _TRL.AsyncGRPOTrainer


class AsyncGRPOTrainer(TrainsObjective, PlainTrainer):
    """A `trl.experimental.async_grpo.AsyncGRPOTrainer` that records log-probs and can train a Trimtab objective.

    Parameters and errors are those of `trimtab.adapters.trl.GRPOTrainer`, but `dump` receives every update. If an
    update is one micro-batch, the objective `token-bypass` is TRL's own loss.

    With an objective, each sample serves one update, so the policy at the start of the update is the current one. A
    response is a sample of TRL's, even if it shares tokens with other samples of its row.
    """

    _hook = "trl-async"
    _window: list[dict[str, Any]]
    _seen = _version = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._used and self.rollout_queue is not None:
            self.rollout_queue = _VersionedQueue(self.rollout_queue)

    def _check_arguments(self, given: Mapping[str, Any]) -> None:
        if not hasattr(_TRL, "TreeRow"):
            raise TrimtabError("this version of TRL packs samples by another method: use TRL 1.16")
        if self._objective is None:
            return
        if given.get("args") is not None:
            check_ignored(given["args"], _TRL.AsyncGRPOConfig)
        remedy = "TRL's rollout worker divides by it, pass a rollout_worker that does not"
        refuse_standard_deviation(self._objective, given.get("rollout_worker") is None, remedy)

    def drop_responses(self) -> None:
        """Drops the queued samples, and sends the restored weights to the engine.

        Samples that are being generated arrive later; TRL drops those older than `max_staleness`.
        """
        with contextlib.suppress(queue.Empty):
            while self.rollout_queue is not None:
                self.rollout_queue.get(block=False)
        self._sync_weight()

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self._used:
            loader.base_dataloader.collate_fn = _with_versions(loader.base_dataloader.collate_fn)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Stores the micro-batches of the update that begins."""
        samples = super().get_batch_samples(*args, **kwargs)
        self._window, self._update, self._seen = samples[0], None, 0
        return samples

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        if not self._used:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._update is None:
            self._update = Update(self.state.global_step, self._begun(model))
        update, part = self._update, PackedResponses(inputs)
        own, outputs = self._forward(model, inputs)
        current, entropy = (part.unpacked(one.flatten()) for one in (outputs.log_probs, outputs.entropy))
        logps = self._logps(part, current, entropy)
        if self._objective is None:
            self._log("train", {"age": self._age(part).float().mean().item()})
            self._add(update, part, logps, None)
            return own
        for name in [key for key in self._metrics["train"] if key.startswith("clip_ratio/")]:
            del self._metrics["train"][name]  # They count clips by `epsilon`, which has no effect here.
        output = self._objective(logps, part.advantage, state=update.state)
        # Each loss is a share of the whole update; TRL averages gradients over processes, so this undoes the division.
        loss = output.loss * self.accelerator.num_processes
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / self.current_gradient_accumulation_steps
        self._log("train", {"age": self._age(part).float().mean().item()})
        self._add(update, part, logps, output.metrics + dropped_shares(part.mask, logps.mask))
        return loss

    def _forward(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Returns TRL's own loss, which logs TRL's metrics and updates its counters, and the outputs of the model."""
        returned: list[Any] = []

        def forward(**keywords: Any) -> Any:
            returned.append(model(**keywords))
            return returned[-1]

        return super().compute_loss(forward, inputs), returned[0]

    def _unlogged_forward(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Returns the outputs of an additional forward pass that leaves TRL's metrics and counters unchanged."""
        counts = {name: value for name, value in vars(self).items() if name.startswith("_step_")}
        metrics, self._metrics = self._metrics, {"train": defaultdict(list)}
        try:
            return self._forward(model, inputs)[1]
        finally:
            self._metrics = metrics
            self.__dict__.update(counts)

    @torch.no_grad()
    def _begun(self, model: Any) -> State | None:
        """Stores the version of the weights. Returns the statistics of the update that begins; None without objective.

        Only the main process knows the version.
        """
        version = self.model_version if self.accelerator.is_main_process else 0
        known = torch.tensor(version, device=self.accelerator.device)
        self._version = int(self.accelerator.reduce(known, reduction="sum"))
        window = [self._prepare_inputs(inputs) for inputs in self._window]
        parts = [PackedResponses(inputs) for inputs in window]

        def score(index: int) -> Tensor:
            return parts[index].unpacked(self._unlogged_forward(model, window[index]).log_probs.flatten())

        return self._prepared(parts, score)

    def _age(self, batch: PackedResponses) -> Tensor:
        """Returns (batch,) by how many updates the weights that sampled are older than the trainer's weights."""
        every = self.args.weight_sync_steps
        return ((self._version - batch.version) * every + self.state.global_step % every).clamp(min=0)

    def _add(self, update: Update, part: PackedResponses, logps: PolicyLogps, metrics: Metrics | None) -> None:
        """Adds a micro-batch to its update."""
        self._seen += 1
        if self._records:
            # The version in updates, as in Trimtab's own trajectory files.
            self._record(update, part, logps, version=update.step - self._age(part))
        self._collect(update, metrics, last=self._seen == len(self._window))


class _VersionedQueue:
    """TRL's queue of samples; adds the weight version of each sample to its metrics, which reach the collator."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.qsize = queue.qsize

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._queue.get(*args, **kwargs)
        sample.metrics = {**sample.metrics, VERSIONS: sample.model_version}
        return sample


def _with_versions(collate: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
    """Returns TRL's collator with one more tensor: the weight version of each sample of each row, -1 at padding."""

    def collated(examples: list[Any]) -> dict[str, Any]:
        (packed,) = examples
        versions = [torch.tensor([one["metrics"].pop(VERSIONS) for one in row.samples]) for row in packed]
        return collate(examples) | {VERSIONS: pad_sequence(versions, batch_first=True, padding_value=-1)}

    return collated
